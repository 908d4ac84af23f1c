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
from typing import Any

import tomli_w
from pydantic import TypeAdapter, model_validator

from paceline.config.errors import InputError
from paceline.config.files import parse_toml, read_json, read_toml
from paceline.config.frozen import FrozenConfig
from paceline.config.hardware import Cluster
from paceline.config.huggingface import from_hf
from paceline.config.job_rules import LENGTHS, disagreement
from paceline.config.job_sections import Sections

_OBJECT = TypeAdapter(dict[str, Any])


class Job(Sections):
    """Model + Cluster + Layout + data + optimizer + run settings."""

    @model_validator(mode="after")
    def _sections_agree(self) -> "Job":
        if problem := disagreement(self):
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
        return raw  # configs, or what is no section: `Job.parse` tells
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


def to_raw(config: FrozenConfig) -> dict[str, Any]:
    """A config as plain data for TOML: settings that are None are left out (TOML has no null)."""
    return _without_none(config.model_dump(mode="json"))


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
