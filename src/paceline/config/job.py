"""Job: the one complete input of a run.

A person writes a partial Job, with "auto" (or nothing) where they have no wish. `plan.resolve`
returns a concrete one, and only concrete Jobs are run. A Job is read from TOML, changed by
`--set section.key=value` on the raw data before anything is derived, and written back as TOML that
reads to the same Job.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, TypeAdapter, model_validator

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.files import parse_toml, read_json, read_toml
from paceline.config.hardware import Cluster
from paceline.config.huggingface import from_hf
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.noun import MOST, Auto, Count, CountOrNone, Noun, Width
from paceline.config.recommender import Clicks, Dlrm, RowOptim
from paceline.config.recommender import disagreement as recommender_disagreement
from paceline.config.vision import EfficientNet, ResNet

_OBJECT = TypeAdapter(dict[str, Any])
_LOCAL = "127.0.0.1"
LENGTHS = ("steps", "epochs", "tokens")
"""Settings of [train] that say how long a run is; one of them is given."""
Names = Annotated[tuple[str, ...], Field(strict=False)]


class CustomModel(Noun):
    """A person's own `nn.Module`, handed to `paceline.train`; only its name is data."""

    family: Literal["custom"] = "custom"
    name: str = "custom"
    """Kept in the Run, so that checkpoints of one model are never loaded into another."""


class Data(Noun):
    """What is trained on. The order of samples is a pure function of (train.seed, step)."""

    source: str | Names = "python-stdlib"
    """Files, globs or folders; "python-stdlib": the running interpreter's own library; "clicks": a
    synthetic click log, for recommenders; "images": synthetic textures, for ResNets."""
    format: Auto | Literal["text", "jsonl", "parquet", "arrow"] = "auto"
    """"auto" goes by the file's suffix; "arrow" is a Hugging Face dataset directory on disk."""
    text_field: str = "text"
    """The column or key that holds a document's text (JSONL, Parquet, Arrow)."""
    tokenizer: str = "bpe:4096"
    """"bpe:N" trains one on the source, "bytes", or the path of a tokenizer.json (by default that
    of `model.hf`, where it has one)."""
    eval_fraction: float = Field(0.01, gt=0, lt=0.5)
    """Part of the tokens that is held out for evaluation, by whole documents where it can be."""
    reset_at_documents: bool = False
    """Start attention and positions anew at every document inside a packed sequence."""
    cache_dir: str = "auto"
    """Where tokenised data is kept, "auto": $XDG_CACHE_HOME/paceline or ~/.cache/paceline."""
    clicks: Clicks = Clicks()


class Optim(Noun):
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = Field(3e-4, gt=0, le=1e3)
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, le=1e3)
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    clip_norm: float = Field(1.0, ge=0, le=1e15)
    """Largest global gradient norm; 0: gradients are not clipped."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the floor; or stay and fall linearly at the end; or stay."""
    warmup_steps: CountOrNone = 0
    decay_steps: CountOrNone = 0
    """Length of the last, falling part of "wsd", steps."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step over the peak."""
    rows: RowOptim = RowOptim()


class Train(Noun):
    """How long and on how much."""

    steps: CountOrNone = 0
    """Optimizer steps of the whole run; left out: as many as `epochs` or `tokens` make."""
    epochs: float | None = Field(None, gt=0, le=MOST)
    """In place of `steps`: times that the train split, or one's own data, is read. They are made
    into steps, rounded up, before the run starts."""
    tokens: Count | None = None
    """In place of `steps`, of language models: tokens that are trained on, rounded up to steps."""
    global_batch: Width
    """Samples of one step over all ranks, whatever their number."""
    seq_len: Width = 1024
    """Tokens of a sample (language models)."""
    seed: int = Field(0, ge=0, lt=2**63)
    eval_every: CountOrNone = 0
    """Steps between evaluations on the held-out split; 0: only at the end."""
    eval_batches: Count = 4
    """Global batches of the held-out split that an evaluation reads."""
    patience: CountOrNone = 0
    """Evaluations in a row without a better `checkpoint.best` that end the run; 0: none do."""
    max_bad_steps: Count = 5
    """Steps in a row with a non-finite loss or gradient (each is skipped) that end the run."""
    weights: str | None = None
    """Folder of safetensors to start from, in Hugging Face's layout; true: that of `model.hf`. Else
    random weights."""


class Checkpoint(Noun):
    """When the state is kept. The last step is always kept."""

    every: CountOrNone = 1000
    """Steps between checkpoints; 0: only at the end."""
    keep_last: Count = 2
    keep_every: Count | None = None
    """Also keep each checkpoint whose step is a multiple of this, for ever."""
    best: str | None = None
    """Also keep that of the best evaluation by this figure: "eval_loss", or another one of
    evaluations or of one's own loss. `checkpoints/best` points to it."""
    best_is: Literal["least", "most"] = "least"
    """Which of two figures is the better one."""


class Observe(Noun):
    """What is written down about the run while it goes on."""

    profile_every: CountOrNone = 0
    """Steps between profiled windows; 0: none."""
    profile_steps: int = Field(2, gt=0, le=1000)
    """Steps of one window."""
    tensorboard: bool = True
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port of the metrics endpoint; none is opened where this is left out."""
    prometheus_host: str = _LOCAL
    """Address at which it listens; it has no password (docs/security.md)."""
    debug_port: int | None = Field(None, ge=1, le=65535)
    """Port of torch's debug page (stacks of all ranks, collectives), on rank 0's host; it has no
    password, so it listens at 127.0.0.1: reach it from elsewhere with `ssh -L`."""


class Job(Noun):
    """Model + Cluster + Layout + data + optimizer + run settings."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The Run is the directory `runs/<name>`."""
    model: Annotated[
        Model | Dlrm | ResNet | EfficientNet | CustomModel, Field(discriminator="family")
    ]
    cluster: Cluster = Cluster()
    layout: Layout = Layout()
    comm: Comm = Comm()
    data: Data = Data()
    optim: Optim = Optim()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()

    @model_validator(mode="after")
    def _sections_agree(self) -> "Job":
        if problem := _disagreement(self):
            raise ValueError(problem)
        return self

    @property
    def is_concrete(self) -> bool:
        """Whether no "auto" is left that a run depends on, and its length is in steps."""
        no_wish = "auto" not in vars(self.cluster).values() and not self.layout.undecided
        return no_wish and self.train.steps > 0

    @property
    def micro_batch(self) -> int:
        """Samples per rank and forward pass, of a concrete Job."""
        assert self.layout.micro_batch != "auto"
        return self.layout.micro_batch

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in one step, of a concrete Job."""
        return self.train.global_batch // (self.layout.num_data_ranks * self.micro_batch)


def _disagreement(job: Job) -> str | None:
    """What two sections demand that can't both hold, None where they agree."""
    model, train, optim = job.model, job.train, job.optim
    lengths = {name: getattr(train, name) for name in LENGTHS}
    given = [f"train.{name} = {value}" for name, value in lengths.items() if value]
    if not given:
        is_given = "steps" in train.model_fields_set
        what = "= 0 is no run, it must be greater than 0" if is_given else "is missing"
        return f"train.steps {what}: give it a value, or give train.epochs or train.tokens."
    if len(given) > 1:
        return f"{' and '.join(given)} each say how long the run is: keep one of them."
    if train.tokens is not None and not isinstance(model, Model):
        return (
            f"{given[0]} counts what language models read and this model reads samples: give "
            "train.steps instead."
        )
    if isinstance(model, Model) and train.seq_len > model.max_seq_len:
        return (
            f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = "
            f"{model.max_seq_len}: shorten the one or raise the other."
        )
    ramps = optim.warmup_steps + (optim.decay_steps if optim.schedule == "wsd" else 0)
    if ramps > train.steps > 0:
        return (
            f"warm-up and decay take {ramps} steps but train.steps = {train.steps}: "
            "shorten optim.warmup_steps or optim.decay_steps."
        )
    window = job.observe.profile_steps + 1
    if 0 < job.observe.profile_every < window:
        return (
            f"observe.profile_every = {job.observe.profile_every} is shorter than a window of "
            f"{job.observe.profile_steps} profiled steps and one of warm-up: give {window} or more."
        )
    if optim.decay_steps and optim.schedule != "wsd":
        return (
            f"optim.decay_steps = {optim.decay_steps} has no effect with "
            f'optim.schedule = "{optim.schedule}": set it to 0 or use schedule = "wsd".'
        )
    if job.checkpoint.best is None and job.checkpoint.best_is != Checkpoint().best_is:
        return (
            f'checkpoint.best_is = "{job.checkpoint.best_is}" has no effect without a figure to '
            'judge by: set checkpoint.best = "eval_loss" as well.'
        )
    if train.patience and job.checkpoint.best is None:
        return (
            f"train.patience = {train.patience} has no effect without a figure to judge by: set "
            'checkpoint.best = "eval_loss" as well.'
        )
    observe = job.observe
    if observe.prometheus_port is None and observe.prometheus_host != _LOCAL:
        return (
            f"observe.prometheus_host = {observe.prometheus_host!r} has no effect without "
            "observe.prometheus_port: give the port or leave it out."
        )
    if not observe.profile_every and observe.profile_steps != Observe().profile_steps:
        return (
            f"observe.profile_steps = {observe.profile_steps} has no effect with "
            "observe.profile_every = 0: set that or leave it out."
        )
    if optim.schedule == "constant" and optim.final_lr_ratio != Optim().final_lr_ratio:
        return (
            f"optim.final_lr_ratio = {optim.final_lr_ratio} has no effect with "
            'optim.schedule = "constant": leave it out or use another schedule.'
        )
    return _of_language_models(job) or _lost_workers(job) or recommender_disagreement(job)


def _of_language_models(job: Job) -> str | None:
    """What is set of text that a network without text never sees."""
    if isinstance(job.model, Model | CustomModel):
        return None
    data, train = Data(source=job.data.source, clicks=job.data.clicks), job.train
    given = {f"data.{name}": (value, getattr(data, name)) for name, value in job.data}
    given["train.seq_len"] = (train.seq_len, Train.model_fields["seq_len"].default)
    given["train.weights"] = (train.weights, None)
    for name, (value, none) in given.items():
        if value != none:
            return (
                f"{name} = {value!r} is of language models and has no effect with model.family = "
                f'"{job.model.family}": leave it out.'
            )
    return None


def _lost_workers(job: Job) -> str | None:
    """What comm.local.min_workers demands of model and checkpoints."""
    local, every = job.comm.local, job.checkpoint.every
    if local.min_workers and isinstance(job.model, CustomModel):
        return (
            f"comm.local.min_workers = {local.min_workers} needs a model of Paceline's own, for a "
            "script's ranks are started and end together: set it to 0."
        )
    if local.min_workers and job.checkpoint.best is not None:
        return (
            f"checkpoint.best = {job.checkpoint.best!r} needs workers that are there from the "
            "start: leave it out, or set comm.local.min_workers = 0."
        )
    if local.min_workers and every % local.every:
        return (
            f"checkpoint.every = {every} would keep the first worker's steps since the last round "
            f"and nobody else's: make it a multiple of comm.local.every = {local.every}."
        )
    return None


def read_job(path: Path | None, overrides: Iterable[str] = ()) -> Job:
    """Read a Job from TOML (the built-in demo Job where no path is given) and apply `--set`s.

    Args:
        path: a TOML file, or a Run directory that holds a job.toml.
        overrides: "section.key=value" texts; values are TOML, or else plain strings.

    Raises:
        InputError: one sentence with what is wrong.
    """
    raw = _read_raw(path)
    overrides = list(overrides)
    if path is None and any(_key(text) == "model.hf" for text in overrides):
        del raw["model"], raw["data"]["tokenizer"]  # the demo's
    _override_all(raw, overrides)
    folder = path.parent if path is not None and path.is_file() else Path.cwd()
    return job_of(raw, folder)


def job_of(raw: Mapping[str, Any], folder: Path) -> Job:
    """A Job from what a person wrote, in a file or as nested dicts.

    Args:
        raw: its sections.
        folder: where files are that it names by relative paths.

    Raises:
        InputError: one sentence with what is wrong.
    """
    return with_effects(Job.parse(_expand_cluster(_expand_hf(raw, folder), folder)))


def with_effects(job: Job) -> Job:
    """A Job that a person wrote, and not the planner, which may have chosen layouts without any
    compression.

    Raises:
        InputError: it sets what has no effect.
    """
    for name in job.comm.effectless:
        raise InputError(
            f"comm.{name} = {getattr(job.comm, name)} has no effect where nothing is compressed: "
            "leave it out, or set comm.dp.compress."
        )
    return job


def change_job(job: Job, overrides: Iterable[str]) -> Job:
    """The Job with some `--set`s applied.

    Raises:
        InputError: one sentence with what is wrong.
    """
    raw = to_raw(job)
    _override_all(raw, list(overrides))
    return Job.parse(raw)


def read_cluster(path: Path) -> Cluster:
    """Read a Cluster file, as `paceline bench` writes one.

    Raises:
        InputError: one sentence with what is wrong.
    """
    raw = read_toml(path, "give the path of a Cluster file that paceline bench wrote")
    return Cluster.parse(raw, str(path))


def _read_raw(path: Path | None) -> dict[str, Any]:
    if path is None:
        return parse_toml(resources.files("paceline.config").joinpath("demo.toml").read_text())
    file = path / "job.toml" if os.path.isdir(path) else path  # noqa: PTH112  # never raises
    return read_toml(file, "give the path of a job.toml")


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _override_all(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `--set`s; one of LENGTHS takes the place of that in the file."""
    if any(_key(text) == f"train.{name}" for text in overrides for name in LENGTHS):
        train = raw.get("train", {})
        for name in LENGTHS if isinstance(train, dict) else ():
            train.pop(name, None)
    for text in overrides:
        _override(raw, text)


def _override(raw: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {text!r} is not of the form section.key=value.")
    section = raw
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise InputError(f"--set {text!r}: {key} is a value, not a section.")
    section[keys[-1]] = _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _refuse_adapters(folder: Path) -> None:
    """A folder of LoRA's or other adapters: to train a network is not what it is for."""
    name = "adapter_config.json"
    stated = folder if folder.name == name else folder / name
    if not stated.is_file():
        return
    base = None
    with suppress(InputError):
        base = read_json(stated, _OBJECT, "fetch it again").get("base_model_name_or_path")
    raise InputError(
        f"model.hf: {folder} holds adapters (adapter_config.json), which are neither planned nor "
        f"trained yet: name the folder of their base model{f' ({base})' if base else ''}, to plan "
        "or train all of its parameters."
    )


def _expand_hf(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Replace `[model] hf = "path"` by the shapes that this config.json states; its folder's
    tokenizer is the data's where none is given, and its weights are taken where they are asked for.
    """
    model = raw.get("model")
    sections = [raw.get(name, {}) for name in ("data", "train")]
    if not all(isinstance(section, Mapping) for section in sections):
        return raw  # nouns, or what is no section: `Job.parse` tells
    data, train = ({**section} for section in sections)
    if not isinstance(model, Mapping) or "hf" not in model:
        if train.get("weights") is True:
            raise InputError(
                "train.weights = true takes the weights of model.hf, which is not given: name "
                "their folder."
            )
        return raw
    path = folder / str(model["hf"])
    _refuse_adapters(path)
    path = path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112  # never raises
    config = read_json(path, _OBJECT, "give model.hf a folder with a model's config.json")
    shapes = from_hf(config)
    changes = {key: value for key, value in model.items() if key != "hf"}
    if train.get("weights") is True:
        train["weights"] = str(path.parent)
    if "tokenizer" not in data and (path.parent / "tokenizer.json").is_file():
        data["tokenizer"] = str(path.parent)
    return {**raw, "model": _merged(to_raw(shapes), changes), "data": data, "train": train}


def _merged(stated: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What is stated, with the changes, section by section."""
    merged = dict(stated)
    for key, value in changes.items():
        is_section = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if is_section else value
    return merged


def _expand_cluster(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Replace `[cluster] file = "path"` by what that file states; wishes beside it win."""
    cluster = raw.get("cluster")
    if not isinstance(cluster, Mapping) or "file" not in cluster:
        return raw
    stated = to_raw(read_cluster(folder / str(cluster["file"])))
    no_wish: tuple[Any, ...] = ("auto", [], {})
    changes = {key: value for key, value in cluster.items() if value not in no_wish}
    del changes["file"]
    return {**raw, "cluster": _merged(stated, changes)}


def to_raw(noun: Noun) -> dict[str, Any]:
    """A noun as plain data for TOML: settings that are None are left out (TOML has no null)."""
    return _without_none(noun.model_dump(mode="json"))


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings in which plain data differ: dotted name, value before, value now; None: not set."""
    old, new = _dotted(before), _dotted(now)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [(name, old.get(name), new.get(name)) for name in names]


def _dotted(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        inner = isinstance(value, Mapping)
        found |= _dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def to_toml(job: Job) -> str:
    """The Job as TOML that reads back to an equal Job."""
    return tomli_w.dumps(to_raw(job))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
