"""Job: the one complete input of a run.

A person writes a `JobSpec`, with "auto" (or nothing) where they have no wish. `plan` makes a `Job`
of it, and only Jobs are run. A JobSpec is read from TOML, changed by `--set section.key=value` on
the raw data before anything is derived, and a Job is written as TOML that reads to the same Job.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import TypeAdapter, model_validator

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.files import parse_toml, read_json, read_toml
from paceline.config.frozen import FrozenConfig
from paceline.config.hardware import Cluster, ClusterSpec
from paceline.config.huggingface import from_hf
from paceline.config.job_rules import LENGTHS, NO_TEACHER, disagreement
from paceline.config.job_sections import Sections
from paceline.config.layout import Layout
from paceline.config.mamba import mamba2_from_hf
from paceline.config.outputs import shown_path
from paceline.config.override import override

_OBJECT = TypeAdapter(dict[str, Any])
# What stands for the communication of an axis without ranks.
_UNUSED: Mapping[str, Mapping[str, str]] = {
    "dp": {"algorithm": "backend"}, "fsdp": {"algorithm": "backend"}, "pp": {}, "ep": {},
}  # fmt: skip


class JobSpec(Sections):
    """Model + cluster + layout + data + optimizer + run settings, as a person writes them."""

    @model_validator(mode="after")
    def _sections_agree(self) -> "JobSpec":
        if problem := disagreement(self):
            raise ValueError(problem)
        return self

    def on(self, cluster: Cluster) -> "JobOnCluster":
        """What is asked for, on a concrete cluster."""
        return JobOnCluster.parse({**vars(self), "cluster": cluster})


class JobOnCluster(JobSpec):
    """A JobSpec whose cluster is decided: what layouts are compared for."""

    cluster: Cluster

    def with_layout(self, layout: Layout, comm: Comm) -> "Job":
        """The Job that has this layout, and this between its ranks."""
        return Job.parse({**vars(self), "layout": layout, "comm": comm})


class Job(JobOnCluster):
    """A concrete Job: what runs. Nothing of its cluster or its layout is left to decide."""

    layout: Layout = Layout()

    @property
    def micro_batch(self) -> int:
        """Samples per rank and forward pass."""
        return self.layout.micro_batch

    @property
    def step_layout(self) -> Layout:
        """The layout of the ranks that step together: under local updates those of one worker."""
        return self.layout.replace(dp=1) if self.comm.local.method != "none" else self.layout

    @property
    def num_workers(self) -> int:
        """That step each for itself under local updates; else 1."""
        return self.layout.num_ranks // self.step_layout.num_ranks

    @property
    def interleave(self) -> int:
        """Neighbouring data ranks that take the micro-batches of a step in turns, so that what
        comes together is summed at once, where sums are exact; 1: each takes neighbours."""
        return self.layout.fsdp if self.elastic.exact and self.layout.scatters_each else 1

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in one step."""
        return self.train.global_batch // (self.layout.num_data_ranks * self.micro_batch)


AnyJob = TypeVar("AnyJob", bound=JobSpec)


def read_job(path: Path | None, overrides: Iterable[str] = ()) -> JobSpec:
    """Read a JobSpec from TOML (the built-in demo Job where no path is given) and apply `--set`s.

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


def job_of(raw: Mapping[str, Any], folder: Path) -> JobSpec:
    """A JobSpec from what a person wrote, in a file or as nested dicts.

    Args:
        raw: its sections.
        folder: where files are that it names by relative paths.

    Raises:
        InputError: one sentence with what is wrong.
    """
    expanded = _expand_teacher(_expand_heads(_expand_hf(raw, folder), folder), folder)
    return with_effects(JobSpec.parse(_expand_cluster(expanded, folder)))


def with_effects(job: JobSpec) -> JobSpec:
    """A JobSpec that a person wrote, and not the planner, which may have chosen layouts without any
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


def decided(job: JobSpec) -> Job:
    """The Job that a file holds, for those that paceline wrote: nothing of it is left to plan.

    Raises:
        InputError: something is.
    """
    left = [f"cluster.{name}" for name in job.cluster.undecided]
    left += [f"layout.{name}" for name in job.layout.undecided]
    if left:
        raise InputError(
            f'{left[0]} = "auto" is left to the planner, and in the job.toml of a run nothing is: '
            "put back the one that paceline wrote."
        )
    return Job.parse(to_raw(job))


def change_job(job: AnyJob, overrides: Iterable[str]) -> AnyJob:
    """The Job with some `--set`s applied.

    Raises:
        InputError: one sentence with what is wrong.
    """
    raw = to_raw(job)
    _override_all(raw, list(overrides))
    return type(job).parse(raw)


def read_cluster(path: Path) -> Cluster:
    """Read a Cluster file, as `paceline bench` writes one.

    Raises:
        InputError: one sentence with what is wrong.
    """
    spec = _read_cluster_spec(path)
    for name in spec.undecided:
        raise InputError(
            f"{shown_path(path)} doesn't say its {name}: give a Cluster file that paceline bench "
            "wrote."
        )
    return Cluster.parse(vars(spec))


def _read_cluster_spec(path: Path) -> ClusterSpec:
    raw = read_toml(path, "give the path of a Cluster file that paceline bench wrote")
    return ClusterSpec.parse(raw, str(path))


def _read_raw(path: Path | None) -> dict[str, Any]:
    if path is None:
        return parse_toml(resources.files("paceline.config").joinpath("demo.toml").read_text())
    file = path / "job.toml" if os.path.isdir(path) else path  # noqa: PTH112  # never raises
    raw = read_toml(file, "give the path of a job.toml")
    for command in ("federate", "search"):  # whose files have a table of that name
        if command in raw and "model" not in raw:
            raise InputError(
                f"{file} has a table [{command}] and is no Job: give it to `paceline {command}`, "
                f"and here give the Job that {command}.job names."
            )
    return raw


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _override_all(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `--set`s.

    One of LENGTHS takes the place of that in the file. What was chosen for an axis of the layout
    goes with the axis: the planner's choice, as much as a person's, is about ranks that are gone.
    """
    before = _axes(raw)
    if any(_key(text) == f"train.{name}" for text in overrides for name in LENGTHS):
        train = raw.get("train", {})
        for name in LENGTHS if isinstance(train, dict) else ():
            train.pop(name, None)
    for text in overrides:
        override(raw, text)
    after, named = _axes(raw), {".".join(_key(text).split(".")[:2]) for text in overrides}
    for axis, unused in _UNUSED.items():
        if before[axis] != 1 and after[axis] == 1 and f"comm.{axis}" not in named:
            _forget(raw, axis, unused)


def _axes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks of each axis that has communication of its own; 1 where nothing says more."""
    layout = raw.get("layout")
    stated = layout if isinstance(layout, Mapping) else {}
    return {axis: 1 if stated.get(axis) == "auto" else stated.get(axis, 1) for axis in _UNUSED}


def _forget(raw: dict[str, Any], axis: str, unused: Mapping[str, str]) -> None:
    comm = raw.get("comm")
    if isinstance(comm, dict) and axis in comm:
        comm[axis] = dict(unused)
        for name in Comm.parse(comm, "comm").effectless:
            del comm[name]


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
        f"model.hf: {folder} holds adapters (adapter_config.json): name the folder of their base "
        f"model{f' ({base})' if base else ''}, and start from them by finetune.adapters."
    )


def _expand_hf(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Replace `[model] hf = "path"` by the shapes that this config.json states; its folder's
    tokenizer is the data's where none is given, and its weights are taken where they are asked for.
    """
    model = raw.get("model")
    sections = [raw.get(name, {}) for name in ("data", "train")]
    if not all(isinstance(section, Mapping) for section in sections):
        return raw  # configs, or what is no section: `JobSpec.parse` tells
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
    is_mamba = config.get("model_type") == "mamba2"
    shapes = mamba2_from_hf(config) if is_mamba else from_hf(config)
    changes = {key: value for key, value in model.items() if key != "hf"}
    if train.get("weights") is True:
        train["weights"] = str(path.parent)
    if "tokenizer" not in data and (path.parent / "tokenizer.json").is_file():
        data["tokenizer"] = str(path.parent)
    return {**raw, "model": _merged(to_raw(shapes), changes), "data": data, "train": train}


def _expand_heads(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Where `[model] family = "heads"` names a run: the shapes of its decoder, its data where none
    is given, and the step of its newest checkpoint."""
    model = raw.get("model")
    if not isinstance(model, Mapping) or model.get("family") != "heads" or "trunk" in model:
        return raw
    run = folder / str(model.get("of", ""))
    stated = _read_raw(run) if "of" in model else {}
    trunk = stated.get("model")
    if not isinstance(trunk, Mapping) or trunk.get("family", "decoder") != "decoder":
        raise InputError(
            f'model.family = "heads" needs a run of a decoder, and model.of = '
            f"{model.get('of')!r} is none: give its directory, such as runs/demo."
        )
    names = (each.name.removeprefix("step-") for each in (run / "checkpoints").glob("step-*"))
    newest = max((int(name) for name in names if name.isdecimal()), default=0)
    model = {"step": newest, **model, "of": str(run), "trunk": trunk}
    return {**raw, "model": model, "data": raw.get("data", stated.get("data", {}))}


def _expand_teacher(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Where `finetune.distill` names a teacher: its shapes, its tokenizer where none is given, and
    axes that the layout leaves to the planner are those on which there can be one."""
    finetune, data, layout = (raw.get(name, {}) for name in ("finetune", "data", "layout"))
    if not all(isinstance(section, Mapping) for section in (finetune, data, layout)):
        return raw
    distill = finetune.get("distill")
    if not isinstance(distill, Mapping) or "teacher" not in distill or "model" in distill:
        return raw
    path = folder / str(distill["teacher"])
    is_folder, is_run = (os.path.isfile(path / name) for name in ("config.json", "job.toml"))  # noqa: PTH113  # never raises
    if is_folder:
        config = read_json(path / "config.json", _OBJECT, "export it again")
        shapes = to_raw(from_hf(config))
    elif is_run:
        shapes = _read_raw(path).get("model", {})
    else:
        raise InputError(
            f"finetune.distill.teacher: {shown_path(path)} is neither a run nor a folder of "
            "weights: give the directory of a run, such as runs/demo, or a folder with config.json "
            "and safetensors."
        )
    if not isinstance(shapes, Mapping) or shapes.get("family", "decoder") != "decoder":
        raise InputError(
            f"finetune.distill.teacher: {shown_path(path)} is no decoder, and only a decoder says "
            "what it thinks of each next token: give the run of one."
        )
    tokenizer = path if is_folder else path / "tokenizer"
    if "tokenizer" not in data and (tokenizer / "tokenizer.json").is_file():
        data = {**data, "tokenizer": str(tokenizer)}
    ones = {axis: 1 for axis in NO_TEACHER if layout.get(axis, "auto") == "auto"}
    distill = {**distill, "teacher": str(path), "model": shapes}
    changed = {"finetune": {**finetune, "distill": distill}, "data": data}
    return {**raw, **changed, "layout": {**layout, **ones}}


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
    stated = to_raw(_read_cluster_spec(folder / str(cluster["file"])))
    no_wish: tuple[Any, ...] = ("auto", [], {})
    changes = {key: value for key, value in cluster.items() if value not in no_wish}
    del changes["file"]
    return {**raw, "cluster": _merged(stated, changes)}


def to_raw(config: FrozenConfig) -> dict[str, Any]:
    """A config as plain data for TOML: settings that are None are left out (TOML has no null)."""
    return _without_none(config.model_dump(mode="json"))


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings in which plain data differ: dotted name, value before, value now; None: not set."""
    old, new = dotted(before), dotted(now)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [(name, old.get(name), new.get(name)) for name in names]


def dotted(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Plain data by dotted names, as "optim.lr"."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        inner = isinstance(value, Mapping)
        found |= dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def to_toml(job: JobSpec) -> str:
    """The Job as TOML that reads back to an equal one."""
    return tomli_w.dumps(to_raw(job))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
