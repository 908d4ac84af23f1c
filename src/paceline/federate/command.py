"""`paceline federate`: the order of things."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from paceline.config.errors import InputError, RunError
from paceline.config.federate import Federate, read_federate
from paceline.config.job import Job, JobSpec, to_raw, to_toml
from paceline.config.job_sections import Checkpoint, Data, Observe
from paceline.config.mixture import Source
from paceline.config.model import Model
from paceline.config.urls import is_url
from paceline.federate.grid import HALF
from paceline.federate.privacy import noise_for
from paceline.federate.processes import running, write_app
from paceline.federate.rounds import Shares
from paceline.federate.scale import least_bits
from paceline.federate.server_optimizer import JOB_FILE
from paceline.federate.shared_file import TRAINED_FILE, read_tensors, trained_names, write_tensors
from paceline.federate.split import clients_of_rows
from paceline.federate.state import read_state
from paceline.models.adapters import adapted_layers
from paceline.models.names import TensorSource, sources
from paceline.models.peft_format import write_adapters
from paceline.models.weights import read_decoder, shapes_of, write_weights
from paceline.observe.asked import ASKED_FILE, must_be_same
from paceline.observe.locks import owned
from paceline.observe.run import json_lines, read_lines, write_atomic
from paceline.render.figures import bytes_text, duration_text
from paceline.train.finetune import check_finetune, decoder_to_train, fill_adapters
from paceline.train.optimizers import check_groups, group_of
from paceline.train.starting_weights import check_network
from paceline.train.this_machine import resolve_on_this_machine

_CONSOLE = Console(highlight=False, soft_wrap=True)
_SUFFIXES = (".jsonl", ".txt")
_POLL_S = 0.5


def federate_command(
    file: Path,
    overrides: Sequence[str],
    out: Path | None,
    read: Callable[[Path, list[str]], JobSpec],
) -> dict[str, Any]:
    """Train adapters or weights on many clients, here as processes of this machine; a federation
    that was stopped goes on.

    Args:
        file: with a table [federate].
        overrides: `--set`s for the Job of all clients.
        out: folder of what comes of it; None: federated/<name of the file>.
        read: makes a Job of its file and `--set`s.

    Returns:
        the last round as plain data, and where the adapters or weights are.

    Raises:
        InputError: wrong input; nothing was written.
        RunError: the rounds ended early.
    """
    prepared = prepare(file, overrides, out, read)
    folder, shares = prepared.folder, prepared.stated["shares"]
    with owned(folder):
        _go_on(folder, shares)
        write_app(folder / "app", prepared.stated)
        last = _follow(folder, prepared.asked, shares)
    return {**last, shares: str(folder / shares)}


class Prepared(NamedTuple):
    """A federation that has not begun, or was stopped."""

    folder: Path
    asked: Federate
    stated: dict[str, Any]
    """What both ends are told."""


def prepare(
    file: Path,
    overrides: Sequence[str],
    out: Path | None,
    read: Callable[[Path, list[str]], JobSpec],
) -> Prepared:
    """Write what everybody starts from, and each client's data and Job, unless they are there.

    Takes what `federate_command` takes.

    Raises:
        InputError: wrong input; nothing was written.
    """
    if find_spec("flwr") is None:
        raise InputError(
            "paceline federate needs Flower, which is not installed: pip install "
            '"paceline[federate]".'
        )
    asked = read_federate(file)
    given = read(file.parent / asked.job, list(overrides))
    spec = _of_client(given, asked)
    job = _checked(spec)
    if asked.tells == "gradients":
        _check_steps_of_server(job)
    elif job.optim.name == "schedulefree":
        raise InputError(
            "paceline federate keeps an optimizer's state on each client, and that of "
            'optim.name = "schedulefree" has weights of its own: use another optimizer.'
        )
    if asked.tells != "changes":
        bits, least = min(asked.all_bits), least_bits(asked.taking_part)
        if bits < least:
            raise InputError(
                f"federate.bits = {bits} are too few for the sum of what {asked.taking_part} "
                f"clients tell: give at least {least}."
            )
    parts = _parts(asked, given)
    batches = _batches(asked, spec, [len(rows) for _, rows in parts])
    noise = noise_for(asked.privacy, asked.clients, asked.rounds) if asked.privacy else 0.0
    folder = (out or Path("federated") / file.stem).absolute()
    kept = {"federate": to_raw(asked), "job": to_raw(spec)}
    if folder.exists():
        _check_goes_on(folder, asked, kept)
        return Prepared(folder, asked, _stated(folder, asked, job, noise))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"{folder} can't be written ({error.strerror}): give another --out."
        ) from None
    try:
        write_start(folder, job)
        write_atomic(folder / JOB_FILE, to_toml(spec))
        for client, (part, batch) in enumerate(zip(parts, batches, strict=True)):
            own = spec.replace(train=spec.train.replace(global_batch=batch))
            _write_client(folder, client, part, own, _shares(job))
        must_be_same(folder, "federation", kept)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Prepared(folder, asked, _stated(folder, asked, job, noise))


def _check_goes_on(folder: Path, asked: Federate, kept: dict[str, Any]) -> None:
    """Refuse a folder that holds something else, or all rounds.

    Raises:
        InputError: it does.
    """
    if not (folder / ASKED_FILE).exists():
        raise InputError(
            f"{folder} is there already, and is no federation that was begun: remove it, or give "
            "another --out."
        )
    must_be_same(folder, "federation", kept)
    state = read_state(folder)
    if state is not None and state.round >= asked.rounds:
        raise InputError(
            f"{folder} has all {asked.rounds} rounds already: remove it, or give another --out."
        )


def _go_on(folder: Path, shares: Shares) -> None:
    """Bring what rounds left to how it was when the last one was kept."""
    for passing in ("app", "flower"):
        shutil.rmtree(folder / passing, ignore_errors=True)
    if (state := read_state(folder)) is not None:
        before = [line for line in _rounds(folder) if line["round"] < state.round]
        write_atomic(folder / "rounds.jsonl", json_lines([*before, state.line]))
        write_tensors(folder / shares, state.shared)
        _CONSOLE.print(f"{folder} goes on after round {state.round}", markup=False)


def _batches(asked: Federate, spec: JobSpec, rows: Sequence[int]) -> list[int]:
    """Samples of each client's batch: the Job's, of rounds of changes; else in the mean, as it has
    rows.

    Raises:
        InputError: one is larger than can be told.
    """
    batch, unit = spec.train.global_batch, 1
    if asked.tells == "changes":
        return [batch] * len(rows)
    if isinstance(spec.layout.micro_batch, int):
        unit = spec.layout.micro_batch
    mean = sum(rows) / len(rows)
    found = [unit * max(1, round(batch * each / mean / unit)) for each in rows]
    if max(found) > HALF:
        raise InputError(
            f"train.global_batch = {batch} gives the client with most rows a batch of {max(found)} "
            f"samples, and no more than {HALF} can be told: make it smaller."
        )
    return found


def _of_client(spec: JobSpec, asked: Federate) -> JobSpec:
    """What a client trains in a round, but for its data: that of all stands in its place.

    Raises:
        InputError: it is no Job, or sources aren't read alike.
    """
    return spec.replace(
        cluster=spec.cluster.replace(devices_per_node=1, num_nodes=1),
        data=_as_one(spec.data),
        train=spec.train.replace(
            steps=asked.steps_of_job,
            epochs=None,
            tokens=None,
            eval_every=0,
            patience=0,
        ),
        checkpoint=Checkpoint(every=0),
        observe=Observe(tensorboard=False, profile_every=0),
    )


def _as_one(data: Data) -> Data:
    """All sources as one: a client's rows are in one file, whichever they are of."""
    if not data.sources:
        return data
    first = data.sources[0]
    ways = {name: getattr(first, name) for name in ("format", "text_field", "filter", "dedup")}
    for each in data.sources:
        if each != Source(name=each.name, source=each.source, weight=first.weight, **ways):
            raise InputError(
                f'data.sources "{each.name}" is read in another way than "{first.name}" or by '
                "epochs, and a client reads rows of all alike: give them equal weights and "
                "settings, or none."
            )
    names = [each.source for each in data.sources]
    every = [one for name in names for one in ([name] if isinstance(name, str) else name)]
    return data.replace(source=every, sources=(), eval_sets=(), **ways)


def _checked(spec: JobSpec) -> Job:
    """The Job on this machine, if clients can train it.

    Raises:
        InputError: they can't.
    """
    finetune = spec.finetune
    for name, value, needed in (
        ("objective", finetune.objective, "likelihood"),
        ("decomposed", finetune.decomposed, False),
        ("factors", finetune.factors, "both"),
    ):
        if value != needed:
            raise InputError(
                f"paceline federate needs finetune.{name} = {json.dumps(needed)}, and this Job's "
                f"is {json.dumps(value)}: change it."
            )
    if spec.data.tokenizer.startswith("bpe:"):
        raise InputError(
            f'data.tokenizer = "{spec.data.tokenizer}" would be another one on each client: name '
            "a tokenizer.json."
        )
    job = resolve_on_this_machine(spec).job
    assert isinstance(job.model, Model)
    check_finetune(job.model, job)
    network = decoder_to_train(job.model, job)
    check_groups((name for name, _ in network.named_parameters()), job.optim)
    if _shares(job) == "weights":
        if job.train.weights is None:
            raise InputError(
                "clients start from the same weights, and there are none: set train.weights to "
                "their folder."
            )
        check_network(job.model, job.train.weights)
        if not _trained_names(job):
            raise InputError(
                "optim.groups leave every parameter as it is: give some an lr_factor above 0."
            )
    return job


def _check_steps_of_server(job: Job) -> None:
    """Refuse what the server's steps don't do.

    Raises:
        InputError: it is asked for.
    """
    assert isinstance(job.model, Model)
    plain = all(
        each.lr_factor in (0.0, 1.0) and each.model_fields_set <= {"pattern", "lr_factor"}
        for each in job.optim.groups
    )
    for name, is_so, change in (
        ("optim.name", job.optim.name not in ("adamw", "sgd", "lion"), "adamw, sgd or lion"),
        ("optim.groups", not plain, "groups with no setting but lr_factor = 0"),
        ("model.parametrization", job.model.parametrization is not None, "none"),
    ):
        if is_so:
            raise InputError(
                f'federate.tells = "gradients" steps on the server, which takes no such {name}: '
                f'use {change}, or tells = "changes".'
            )


def _shares(job: Job) -> Shares:
    return "adapters" if job.finetune.is_adapted else "weights"


def _trained_names(job: Job) -> list[str]:
    """Names in Hugging Face's layout of the tensors that steps change."""
    assert isinstance(job.model, Model)

    def is_trained(source: TensorSource) -> bool:
        names = (source.name,) if source.join is None else source.join.names
        groups = [group_of(name, job.optim) for name in names]
        return any(each is None or each.lr_factor > 0 for each in groups)

    found = sources(job.model, shapes_of(job.model)).items()
    return [name for name, source in found if is_trained(source)]


def _parts(asked: Federate, job: JobSpec) -> list[tuple[str, list[str]]]:
    """Suffix and rows of each client's data.

    Raises:
        InputError: rows can't be told, or somebody has none.
    """
    names = [each.source for each in job.data.sources] or [job.data.source]
    files = [_files(name) for name in names]
    suffixes = {file.suffix for group in files for file in group}
    if len(suffixes) > 1 or not suffixes <= set(_SUFFIXES):
        raise InputError(
            f"the rows of data.source are cut among clients, of {' or '.join(_SUFFIXES)} files, "
            f"and it has {', '.join(sorted(suffixes))}: give files of one of these kinds."
        )
    rows: list[str] = []
    sources: list[int] = []
    for source, group in enumerate(files):
        for file in group:
            found = [line for line in _read(file).split("\n") if line.strip()]
            rows += found
            sources += [source] * len(found)
    who = clients_of_rows(
        np.array(sources, np.int64), asked.clients, asked.split, asked.alpha, job.train.seed
    )
    parts: list[list[str]] = [[] for _ in range(asked.clients)]
    for row, client in zip(rows, who, strict=True):
        parts[client].append(row)
    for client, part in enumerate(parts):
        if not part:
            raise InputError(
                f"client {client} of {asked.clients} has none of {len(rows)} rows with "
                f'federate.split = "{asked.split}": take fewer clients or another split.'
            )
    [suffix] = suffixes
    return [(suffix, part) for part in parts]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} can't be read as UTF-8 ({error}): replace it.") from None


def _files(names: str | Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        matches = [] if is_url(name) else [Path(each) for each in sorted(glob(name))]  # noqa: PTH207
        if not matches or not all(each.is_file() for each in matches):
            raise InputError(
                f"data.source: {name} is no file here, and rows of files are cut among clients: "
                "give files or globs."
            )
        found += matches
    return found


def write_start(folder: Path, job: Job) -> None:
    """The adapters or weights that everybody starts from."""
    assert isinstance(job.model, Model)
    if _shares(job) == "weights":
        assert job.train.weights is not None
        state = read_decoder(job.train.weights).state_dict()
        write_weights(folder / "weights", job.model, state, max_shard_bytes=sys.maxsize)
        write_atomic(folder / TRAINED_FILE, json.dumps(_trained_names(job)))
        return
    decoder = decoder_to_train(job.model, job)
    for layer in adapted_layers(decoder).values():
        layer.lora_a.to_empty(device="cpu")
        layer.lora_b.to_empty(device="cpu")
    fill_adapters(job, decoder)
    state = decoder.state_dict()
    write_adapters(
        folder / "adapters", job.model, state, job.finetune, job.train.weights, torch.float32
    )


def _write_client(
    folder: Path,
    client: int,
    part: tuple[str, list[str]],
    spec: JobSpec,
    shares: Shares,
) -> None:
    suffix, rows = part
    own = folder / "clients" / str(client)
    shutil.copytree(folder / shares, own / shares)
    data = own / f"data{suffix}"
    data.write_text("".join(f"{row}\n" for row in rows))
    job = spec.replace(data=spec.data.replace(source=str(data)))
    write_atomic(own / "job.toml", to_toml(job))


def _stated(folder: Path, asked: Federate, job: Job, noise: float) -> dict[str, Any]:
    """What both ends are told; Flower takes plain values with such names."""
    return {
        "folder": str(folder),
        "shares": _shares(job),
        "tells": asked.tells,
        "clients": asked.clients,
        "rounds": asked.rounds,
        "taking-part": asked.taking_part,
        "least": asked.least,
        "bits": " ".join(map(str, asked.all_bits)),
        "steps": asked.steps,
        "told": asked.told,
        # Packed with all bits, but of "changes": Flower's factor, samples, sizes of tensors.
        "head": 2 + len(read_tensors(folder / _shares(job), trained_names(folder))),
        "timeout": asked.timeout_s,
        # A number moves by no more than about the learning rate in a step of AdamW.
        "limit": job.optim.lr * asked.steps,
        # A norm of 0 means that no privacy was asked for.
        "clip": asked.privacy.clip if asked.privacy else 0.0,
        "delta": asked.privacy.delta if asked.privacy else 0.0,
        "noise": noise,
    }


def _follow(folder: Path, asked: Federate, shares: Shares) -> dict[str, Any]:
    """Run the rounds, and say what becomes of each; the last one."""
    _CONSOLE.print(
        f"{asked.clients} clients, {asked.taking_part} in a round; logs are in {folder / 'logs'}",
        markup=False,
    )
    lines = _rounds(folder)

    def done() -> int:
        return lines[-1]["round"] if lines else 0

    with (
        _ended_by_signals(),
        running(
            folder / "app", folder / "flower", asked.clients, folder / "logs", folder / "clients"
        ) as run,
    ):
        while done() < asked.rounds:
            is_over = run.poll() is not None
            for line in _rounds(folder)[len(lines) :]:
                lines.append(line)
                _CONSOLE.print(_text(line), markup=False)
            if is_over and done() < asked.rounds:
                raise RunError(
                    f"Flower's run ended after {done()} of {asked.rounds} rounds: "
                    f"{folder / 'logs' / 'run.log'} says why."
                )
            time.sleep(_POLL_S)
    if not any(line["is_summed"] for line in lines):
        raise RunError(
            f"paceline: no round changed anything, for too few clients answered: their log.txt in "
            f"{folder / 'clients'} say why, or the logs in {folder / 'logs'}."
        )
    _CONSOLE.print(f"{shares}: {folder / shares}", markup=False)
    return lines[-1]


def _rounds(folder: Path) -> list[dict[str, Any]]:
    file = folder / "rounds.jsonl"
    return [json.loads(line) for line in read_lines(file)] if file.exists() else []


def _text(line: dict[str, Any]) -> str:
    text = f"round {line['round']}: {line['answered']} of {line['asked']} clients"
    if not line["is_summed"]:
        return f"{text}, too few: it changes nothing"
    upload = bytes_text(line["upload_bytes"] / max(1, line["answered"]))
    took = duration_text(line["seconds"])
    told = f", epsilon {line['epsilon']:.3g} so far" if "epsilon" in line else ""
    what = {"all": "changes", "gradient": "gradients"}.get(line["factor"], line["factor"].upper())
    if not line["round"]:
        what = "sizes"
    return f"{text}, {what} summed, {upload} from each, {took}{told}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A request to end is an exception, so that what was started is ended as well."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
