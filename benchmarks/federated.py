"""Federated adapters: `paceline federate` against Flower's FedAvg of LoRA, and all data together.

How it works: a decoder of 0.9 M parameters that knows Python's own library learns Paceline's pages,
code and tests, which are cut among clients (Dirichlet over the three, so no two parts are alike).
Each recipe gets the same base, first adapters, parts, rounds and samples; its learning rate rises
and falls by a cosine over the rounds. In each round a quarter of the clients, drawn by a seed, is
lost: the process that computes for it is killed (SIGKILL) when it was asked.

- ours: `paceline federate` as it stands, clients telling what some steps come to ("fedavg") under
  SecAgg+, with as few bits that it uploads an eighth of FedAvg without secrets; several times, each
  with other parts, order of the data and clients that are lost.
- doubled: the same, each step on twice the samples, which cost clients time and no upload.
- gradients: as ours, clients telling gradients of the samples of all these steps.
- FedAvg: `peers/flower_fedavg.py`, both matrices in fp32, without SecAgg+, and with Flower's.
- together: one process, as many steps as clients of FedAvg make in all rounds, each on as many
  samples as all who answer have in it; with several orders of the data, which alone make a
  difference.
- together, in large steps: as many steps as there are rounds, on the samples of a round.
- together, doubled: as many steps as at first, on twice the samples, as "doubled" has.

Uploads are the bytes of the messages' objects as Flower sends them. Held-out loss is computed by
transformers and peft from the adapters on disk. The adapters that the server came to are compared
with what its optimizer makes of the mean of what clients told, read from their folders.

What it doesn't say: seconds (processes share the cores), or large networks.

    python -m benchmarks.federated [--rounds 32] [--clients 8] [--secagg-rounds 1] [--keep FOLDER]

It needs the extra `federate`, and peft; two cores take three hours. With --keep a start that was
cut off goes on, recipe by recipe.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.config.finetune import TENSORS_FILE
from paceline.config.job import read_job
from paceline.federate.command import prepare
from paceline.federate.processes import running, write_app
from paceline.federate.rounds import Factor
from paceline.federate.scale import Scale
from paceline.federate.server_optimizer import ServerOptimizer
from paceline.federate.shared_file import Tensors, plus, read_tensors, vector_of
from paceline.federate.state import read_state
from paceline.federate.telling import Telling
from paceline.observe.run import write_atomic
from paceline.render.figures import bytes_text

FACTORS: Sequence[Factor] = ("a", "b")
SEQ, END, CHARS, EVERY = 128, 256, 800, 20
GRADIENT_BITS = [6, 6, 4, 4, 4, 4, 3, 3]
SOURCES = {"pages": ("docs", "*.md"), "code": ("src", "*.py"), "tests": ("tests", "*.py")}
PEER = "benchmarks.peers.flower_fedavg"
MODEL = """
[model]
family = "decoder"
vocab_size = 257
hidden_size = {width}
ffn_size = {ffn}
num_layers = {layers}
num_heads = 4
num_kv_heads = 4
max_seq_len = 128
tie_embeddings = true
"""
BASE = """
name = "base"
{model}
[cluster]
devices_per_node = 1
[data]
source = "python-stdlib"
tokenizer = "bytes"
[optim]
lr = 4e-3
warmup_steps = {warmup}
schedule = "cosine"
[train]
steps = {base_steps}
global_batch = 16
seq_len = 128
eval_every = 0
"""
ADAPTERS = """
name = "adapters"
[model]
hf = "{base}"
[cluster]
devices_per_node = 1
[finetune]
method = "lora"
rank = {rank}
alpha = {alpha}
[optim]
lr = {lr}
warmup_steps = {warmup}
schedule = "cosine"
[train]
weights = true
steps = {rounds}
global_batch = {batch}
seq_len = 128
eval_every = 0
[data]
tokenizer = "bytes"
eval_fraction = 0.01
"""
FEDERATE = """
[federate]
job = "{name}_job.toml"
clients = {clients}
rounds = {rounds}
{telling}
split = "dirichlet"
alpha = {alpha}
"""


def main() -> None:
    """Train by every recipe, and keep what was found."""
    parser = parser_of(__doc__)
    for name, value, what in (
        ("clients", 8, "at least 4"),
        ("rounds", 32, "of each recipe"),
        ("secagg-rounds", 1, "of FedAvg with Flower's SecAgg+; it has a loss if they are all"),
        ("warmup", 4, "rounds until the learning rate is what it is"),
        ("steps", 4, "of a client of FedAvg in a round"),
        ("batch", 8, "samples of 128 bytes in such a step"),
        ("federations", 2, "of ours"),
        ("doubled", 2, "federations of ours on twice the samples"),
        ("gradients", 1, "federations of clients that tell gradients"),
        ("orders", 3, "of the data, for all together"),
        ("rank", 32, "of adapters"),
        ("width", 128, "of the network"),
        ("layers", 4, "of the network"),
        ("base-steps", 400, "of the base on Python's library"),
        ("seed", 0, "of who drops out, of parts and orders: the first of several"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} ({value})")
    for name, default in (("bits", [4, 4, 4, 4, 4, 4, 3, 3]), ("gradient-bits", GRADIENT_BITS)):
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=default,
            help=f"of a number, in equal parts of the rounds ({' '.join(map(str, default))})",
        )  # fmt: skip
    for name, rate, of in (
        ("lr", 5e-3, "Flower's FedAvg, gradients and large steps"),
        ("own-lr", 1.5e-2, "ours"),
        ("doubled-lr", 1e-2, "ours on twice the samples"),
        ("together-lr", 1e-2, "all data together in as many steps"),
    ):
        parser.add_argument(f"--{name}", type=float, default=rate, help=f"of {of} ({rate:g})")
    parser.add_argument("--alpha", type=float, default=0.5, help="of the split (0.5)")
    parser.add_argument("--keep", help="folder of all that is made; a later start goes on there")
    asked = parser.parse_args()
    about = taken_with("benchmarks.federated", "flwr", "peft", "transformers")
    # Clients import the peers from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    plain = {**vars(asked), "results": None, "keep": None}
    number = dict.fromkeys(("federations", "doubled", "gradients", "orders"))  # may grow
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(asked.keep or passing).absolute()
        folder.mkdir(exist_ok=True)
        if _once(folder / "asked.json", lambda: plain) | number != plain | number:
            raise SystemExit(f"{folder} was begun with other options: give them, or another --keep")
        found = _measured(folder, asked)
    found = {"about": about, "asked": plain, **found}
    page = _page(found, asked) + f"\n{signature(about)}\n"
    print(page)
    keep(folder_of(asked.results, about), "federated", found, page)


def _measured(folder: Path, asked: Any) -> dict[str, Any]:
    """What all recipes come to; what the folder has of an earlier start isn't made again."""
    held_out = _write_texts(folder)
    base = folder / "base"
    if not base.exists():
        _base(folder, asked)
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\nsource = "{folder / name}.jsonl"\nweight = 1\n'
        for name in SOURCES
    )
    steps = f"steps = {asked.steps}"
    own = f'tells = "fedavg"\n{steps}\nbits = {asked.bits}'
    of_batches = f'tells = "gradients"\nbits = {asked.gradient_bits}'
    whole = {"batch": asked.batch * asked.steps}
    ours = {**_in_all_steps(asked), "lr": asked.own_lr, "batch": asked.batch}
    doubled = {**ours, "lr": asked.doubled_lr, "batch": 2 * asked.batch}
    recipes: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("ours", own, ours),
        ("doubled", own, doubled),
        ("gradients", of_batches, whole),
        ("fedavg", steps, {}),
        ("fedavg_secagg", steps, {}),
    )
    for name, telling, changed in recipes:
        (folder / f"{name}_job.toml").write_text(_job(base, asked, **changed) + sources)
        federation = FEDERATE.format(name=name, telling=telling, **vars(asked))
        (folder / f"{name}.toml").write_text(federation)
    first = folder / "first"
    if not first.exists():
        shutil.rmtree(folder / "begun", ignore_errors=True)
        begun = prepare(folder / "fedavg.toml", [], folder / "begun", read_job)
        (begun.folder / "adapters").rename(first)
    rounds = {"fedavg": asked.rounds, "fedavg_secagg": asked.secagg_rounds}

    def made(name: str) -> dict[str, Any]:
        """What a recipe came to."""
        out, found = folder / name, {}
        shutil.rmtree(out, ignore_errors=True)
        recipe, _, order = name.rpartition("_") if name not in rounds else (name, "", "0")
        seed = asked.seed + int(order)
        if recipe in TOGETHER:
            _together(folder, _job(base, asked, **TOGETHER[recipe](asked)), out, seed)
        else:
            dropped = _dropped(asked, seed)
            with _dropping(out, dropped, int(name in rounds)) as watch:
                if name in rounds:
                    _flower(folder, name, rounds[name])
                else:
                    _command(
                        "paceline", "federate", str(folder / f"{recipe}.toml"), "--out", str(out),
                        f"--set=train.seed={seed}", f"--set=finetune.adapters={first}",
                    )  # fmt: skip
            found = {**_told(out, dropped), "missed": watch.missed, "beyond": watch.beyond}
        loss = _held_out_loss(base, out / "adapters", held_out)
        print(f"{name}: {loss:.4f} nats a byte", flush=True)
        return {**found, "loss": loss}

    times = {"ours": asked.federations, "doubled": asked.doubled, "gradients": asked.gradients}
    names = ["ours_0", *rounds]  # those without which there is no page
    for recipe, most in {**dict.fromkeys(TOGETHER, asked.orders), **times}.items():
        names += [f"{recipe}_{number}" for number in range(most)]
    found = {
        name: _once(folder / f"{name}.json", partial(made, name)) for name in dict.fromkeys(names)
    }
    found["first"] = {"loss": _held_out_loss(base, first, held_out)}
    parts = sorted((folder / "fedavg" / "clients").glob("*/data.jsonl"))
    return {
        "recipes": found,
        "rows": [len(part.read_text().splitlines()) for part in parts],
        "held_out_bytes": len(held_out),
        "numbers": {each: len(vector_of(read_tensors(first), each)) for each in FACTORS},
    }


def _once(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file has, which is written where it isn't there."""
    if not file.exists():
        write_atomic(file, json.dumps(make()))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


# ---- data and base ------------------------------------------------------------------------------


def _write_texts(folder: Path) -> bytes:
    """Write the rows of each source, and give the held-out text: each twentieth row."""
    held_out = b""
    for name, (room, pattern) in SOURCES.items():
        rows = [row for file in sorted((ROOT / room).rglob(pattern)) for row in _rows(file)]
        trained = [row for number, row in enumerate(rows) if number % EVERY]
        held_out += b"".join(row.encode() + b"\0" for row in rows[::EVERY])
        lines = "".join(json.dumps({"text": row}) + "\n" for row in trained)
        (folder / f"{name}.jsonl").write_text(lines)
    return held_out


def _rows(file: Path) -> Iterator[str]:
    """Parts of a file that end with a line and are about as long as CHARS."""
    part = ""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        part += line
        if len(part) >= CHARS:
            yield part
            part = ""
    if part:
        yield part


def _base(folder: Path, asked: Any) -> Path:
    model = MODEL.format(width=asked.width, ffn=3 * asked.width, layers=asked.layers)
    steps = asked.base_steps
    text = BASE.format(model=model, base_steps=steps, warmup=steps // 20)
    (folder / "base.toml").write_text(text)
    _command("paceline", "train", str(folder / "base.toml"), cwd=folder)
    _command("paceline", "export", str(folder / "runs/base"), str(folder / "base"))
    return folder / "base"


def _job(base: Path, asked: Any, **changed: Any) -> str:
    """The Job of a recipe, but for its data."""
    return ADAPTERS.format(base=base, **{**vars(asked), "alpha": 2 * asked.rank, **changed})


def _in_all_steps(asked: Any) -> dict[str, Any]:
    """What the Job of all together has of its own."""
    answering = asked.clients - asked.clients // 4
    return {
        "lr": asked.together_lr,
        "rounds": asked.rounds * asked.steps,
        "warmup": asked.warmup * asked.steps,
        "batch": asked.batch * answering,
    }


def _in_large_steps(asked: Any) -> dict[str, Any]:
    return {"batch": asked.batch * asked.steps * (asked.clients - asked.clients // 4)}


def _on_twice_the_samples(asked: Any) -> dict[str, Any]:
    once = _in_all_steps(asked)
    return {**once, "batch": 2 * once["batch"]}


TOGETHER: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "together": _in_all_steps,
    "together_large": _in_large_steps,
    "together_doubled": _on_twice_the_samples,
}
"""Recipes of one process that has all data."""


def _together(folder: Path, job: str, out: Path, seed: int) -> None:
    names = ", ".join(f'"{folder / name}.jsonl"' for name in SOURCES)
    out.mkdir()
    (out / "job.toml").write_text(f"{job}source = [{names}]\n")
    _command(
        "paceline", "train", "job.toml",
        f"--set=train.seed={seed}", f"--set=finetune.adapters={folder / 'first'}", cwd=out,
    )  # fmt: skip
    _command("paceline", "export", "runs/adapters", "adapters", "--format", "peft", cwd=out)


def _held_out_loss(base: Path, adapters: Path, text: bytes) -> float:
    """Nats a byte, of pieces of SEQ that begin anew."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    network = PeftModel.from_pretrained(network, adapters).eval()
    ids = torch.tensor(list(text), dtype=torch.int64)
    ids = torch.where(ids == 0, END, ids)
    pieces = ids[: len(ids) // SEQ * SEQ].reshape(-1, SEQ)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in pieces.split(64):
            logits = network(batch).logits[:, :-1].reshape(-1, network.config.vocab_size)
            targets = batch[:, 1:].reshape(-1)
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    return total / count


# ---- rounds -------------------------------------------------------------------------------------


def _command(module: str, *arguments: str, cwd: Path | None = None) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=cwd, check=True)


def _flower(folder: Path, name: str, rounds: int) -> None:
    """Rounds of the peer, from the very parts and adapters that ours began with."""
    begun = prepare(folder / f"{name}.toml", [], folder / name, read_job)
    rows = [
        (begun.folder / "clients" / str(n) / "data.jsonl").read_text().count("\n")
        for n in range(begun.asked.clients)
    ]
    told = {"secagg": name == "fedavg_secagg", "rows": max(rows), "steps": begun.asked.steps}
    ends = {"server": f"{PEER}.server", "client": f"{PEER}.client"}
    write_app(begun.folder / "app", {**begun.stated, "rounds": rounds, **told}, ends)
    home, logs = begun.folder / "flower", begun.folder / "logs"
    ends_in = begun.folder / "clients"
    with running(begun.folder / "app", home, begun.asked.clients, logs, ends_in) as run:
        while len(lines := _lines(begun.folder)) < rounds:
            if run.poll() is not None and len(_lines(begun.folder)) < rounds:
                raise SystemExit(
                    f"{name} ended after {len(lines)} rounds:\n{(logs / 'run.log').read_text()}"
                )
            time.sleep(0.5)


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Lines of the rounds that are over."""
    file = folder / "rounds.jsonl"
    whole = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in whole]


def _dropped(asked: Any, seed: int) -> dict[int, set[int]]:
    """The clients that are killed in each round."""
    stream = np.random.default_rng(seed)
    return {
        number: set(stream.choice(asked.clients, asked.clients // 4, replace=False).tolist())
        for number in range(asked.rounds + 1)
    }


class _Watch(threading.Thread):
    """Kills clients while they compute, and follows what the others tell."""

    def __init__(self, folder: Path, dropped: dict[int, set[int]], first: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._dropped, self._first = folder, dropped, first
        self._stated: dict[str, Any] = {}
        self._server: ServerOptimizer | None = None
        self._tensors: Tensors = {}
        self._scale: Scale | None = None
        self.over = threading.Event()
        self.missed: list[float] = []
        """Of each round of ours: the farthest that a number of the adapters is from what the
        server makes of the sum of what clients told, as far as the modulus goes."""
        self.beyond: list[float] = []
        """Of each round of ours: what the sum lost as it left the modulus, of its square."""

    def run(self) -> None:
        clients, number, began = self._folder / "clients", -1, 0.0
        left: set[int] = set()
        while not self.over.wait(0.5):
            if not (self._folder / "app").exists():
                continue
            now = len(_lines(self._folder)) + self._first
            if now != number:
                if now > self._first and not self._first:
                    self._check(now - 1)
                number, began = now, time.time()
                left = set(self._dropped.get(number, ()))
                if not self._stated and not self._first:
                    self._stated = _stated(self._folder)
                    self._tensors = read_tensors(self._folder / "adapters")
                    if self._stated["tells"] == "gradients":
                        self._server = ServerOptimizer(self._folder, self._tensors)
            for client in list(left):
                own = clients / str(client)
                # It stays alive until it is asked, or another one would be there by then.
                has_it = (own / "adapters" / TENSORS_FILE).stat().st_mtime > began
                if _signal(own, signal.SIGKILL if has_it else signal.SIGSTOP) and has_it:
                    left.remove(client)

    def _check(self, number: int) -> None:
        """Take the step of a round that is over, and compare."""
        total: Any = 0.0
        samples = 0
        for client in range(len(list((self._folder / "clients").iterdir()))):
            if client not in self._dropped[number]:
                own = self._folder / "clients" / str(client)
                total = total + np.load(own / "told.npy")
                samples += read_job(own / "job.toml").train.global_batch
        if number and self._scale is not None:
            telling = Telling.of_round(self._stated, self._tensors, number, self._scale)
            known = telling.as_known(total)
            self.beyond.append(float(np.square(known - total).sum() / np.square(total).sum()))
            if self._server is None:
                self._tensors = plus(self._tensors, "all", known / samples)
            else:
                self._tensors = self._server.step(number - 1, known / samples)
            shared = vector_of(read_tensors(self._folder / "adapters"), "all")
            self.missed.append(float(np.abs(vector_of(self._tensors, "all") - shared).max()))
        state = read_state(self._folder)
        assert state is not None
        self._scale = Scale.of_json(state.settings["scale"])  # of the next round


def _stated(folder: Path) -> dict[str, Any]:
    """What both ends of a federation are told."""
    project = tomllib.loads((folder / "app" / "pyproject.toml").read_text())
    found: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return found


def _signal(client: Path, number: int) -> bool:
    """Whether the process that computes for a client was there to get a signal."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "paceline.federate.client_training" in line and line[-1] == str(client):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                return True
    return False


@contextmanager
def _dropping(folder: Path, dropped: dict[int, set[int]], first: int) -> Iterator[_Watch]:
    watch = _Watch(folder, dropped, first)
    watch.start()
    try:
        yield watch
        time.sleep(5)  # the last round is looked at
    finally:
        watch.over.set()
        watch.join()


def _told(folder: Path, dropped: dict[int, set[int]]) -> dict[str, Any]:
    """Upload of a client that stayed, in a round, and what the rounds say of themselves."""
    lines = _lines(folder)
    clients = len(list((folder / "clients").iterdir()))
    for line in lines:
        if line["answered"] != clients - len(dropped[line["round"]]):
            raise SystemExit(f"{folder.name}: others dropped out than were to: {line}")
    # Ours has a round 0 before the others, whose bytes count.
    answers = sum(line["answered"] for line in lines if line["round"])
    upload = sum(line["upload_bytes"] for line in lines) / answers
    print(f"{folder.name}: {upload:,.0f} bytes from a client in a round", flush=True)
    return {"upload_bytes": upload, "rounds": lines}


# ---- the page -----------------------------------------------------------------------------------


def _page(found: dict[str, Any], asked: Any) -> str:
    recipes = found["recipes"]

    def of(recipe: str) -> list[dict[str, Any]]:
        """Each that was made by a recipe."""
        return [each for name, each in recipes.items() if name.rpartition("_")[0] == recipe]

    def loss_of(made: Sequence[dict[str, Any]]) -> float:
        return sum(each["loss"] for each in made) / len(made)

    plain, secret = (recipes[name]["upload_bytes"] for name in ("fedavg", "fedavg_secagg"))
    ours, doubled, gradients = map(of, ("ours", "doubled", "gradients"))
    together, large, together_doubled = map(of, TOGETHER)
    federations = [*ours, *doubled, *gradients]
    titles = (
        "recipe",
        "upload of a client in a round",
        "of FedAvg's",
        "of FedAvg's with SecAgg+",
        "held-out loss",
        "all data together's",
        "the same in large steps'",
        "the same on twice the samples'",
    )

    def told(loss: float) -> list[str]:
        beside = [
            f"{loss / loss_of(each) - 1:+.2%}" for each in (together, large, together_doubled)
        ]
        return [f"{loss:.4f}", *beside]

    lines: list[Sequence[str]] = []
    for recipe, name in (
        *((each, f"paceline federate, {number}") for number, each in enumerate(ours)),
        *((each, f"twice the samples, {number}") for number, each in enumerate(doubled)),
        *((each, f"gradients, {number}") for number, each in enumerate(gradients)),
        (recipes["fedavg"], "Flower's FedAvg, fp32"),
        (recipes["fedavg_secagg"], "Flower's FedAvg and SecAgg+"),
    ):
        upload, rounds = recipe["upload_bytes"], recipe["rounds"]
        shares = (f"1 / {plain / upload:.2f}", f"1 / {secret / upload:.2f}")
        loss = told(recipe["loss"]) if len(rounds) >= asked.rounds else [""] * 4
        lines.append((name, bytes_text(upload), *shares, *loss))
    for name, made in (
        ("", together),
        (" in large steps", large),
        (" on twice the samples", together_doubled),
    ):
        lines += [
            (f"all data together{name}, {number}", "", "", "", *told(each["loss"]))
            for number, each in enumerate(made)
        ]
    lines.append(("no adapters", "", "", "", *told(recipes["first"]["loss"])))
    counts, masked = found["numbers"], len(recipes["fedavg_secagg"]["rounds"])
    answering, all_steps = asked.clients - asked.clients // 4, asked.rounds * asked.steps
    batch = asked.batch * asked.steps
    compared = ""
    if checked := [one["missed"] for one in federations if "missed" in one]:
        compared = f"""After each round of {len(checked)} of
{len(federations)} federations the adapters were compared with what the server makes of
the sum of what clients told, as far as the modulus goes: no number was more than
{max(map(max, checked)):.1e} off. """
    beyond = max(max(each["beyond"]) for each in federations)
    means = "".join(
        f"- {name}: {loss_of(made) / loss_of(together) - 1:+.2%} of all data together\n"
        for name, made in (("ours", ours), ("twice the samples", doubled), ("gradients", gradients))
        if made
    )
    return f"""# Federated adapters

{markdown(titles, lines, ("recipe",))}
Means of our federations:

{means}
Each has other parts and orders of the data, and others are lost. Under SecAgg+ a number has
{", ".join(map(str, asked.bits))} bits in equal parts of the rounds, of gradients
{", ".join(map(str, asked.gradient_bits))}.

{asked.clients} clients with {min(found["rows"])} to {max(found["rows"])} rows, of whom
{asked.clients // 4} are killed in each of {asked.rounds} rounds ({masked} of FedAvg with SecAgg+).
A round has {asked.steps} steps of each client on {asked.batch} times {SEQ} bytes: of Flower's on
as many on each client, of ours more or fewer as a client has more or fewer rows, and twice as many
where it says so. Of gradients it has a single step of the server on {batch} of each client, more or
fewer. All data together take {all_steps} steps on {asked.batch * answering}, or {asked.rounds}
large ones on {batch * answering}, or as many as at first on twice the samples. The learning rate
rises in the first {asked.warmup} rounds, to {asked.own_lr:g} of ours, {asked.doubled_lr:g} on twice
the samples, {asked.together_lr:g} of all data together in as many steps and {asked.lr:g} of all
others, and falls by a cosine. Adapters of rank {asked.rank} have {counts["a"]:,} numbers in A and
{counts["b"]:,} in B. Leaving the modulus cost a sum of theirs at most {beyond:.1%}
of its square. {compared}Losses are in nats a byte, of {found["held_out_bytes"]:,} held-out bytes.
"""


if __name__ == "__main__":
    main()
