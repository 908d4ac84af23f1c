"""Sweep: one Job many times, with other settings each time, as a file with a [sweep] table says it.

A trial is what differs from the Job. It is a run of its own, below the same folder as all others.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field

from paceline.config.errors import InputError
from paceline.config.files import read_toml
from paceline.config.frozen import FrozenConfig, Ways
from paceline.config.job import JobSpec, dotted, to_toml
from paceline.config.outputs import shown_path
from paceline.launch.prepare import named_after

MOST_TRIALS = 1000
_CURE = "write a table [sweep], see docs/cluster.md"

Settings = Mapping[str, Any]
"""Of a Job, by dotted names."""


class Sweep(FrozenConfig):
    """A table [sweep]."""

    job: str
    """The Job's file; a relative path is relative to the sweep's file."""
    name: str = Field("", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Trials are the runs NAME-001, NAME-002, ...; left out: the file's name."""
    grid: dict[str, Any] = Field(default_factory=dict)
    """Values by setting: each combination of them is a trial."""
    trials: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Trials besides those of the grid: a value by setting."""
    at_most: Ways | None = None
    """So many trials run at once; left out: as many as fit, and one on engine "local"."""
    priority: int = Field(0, ge=-(10**6), le=10**6)
    """As `paceline launch --priority`, which counts more."""


class _SweepFile(FrozenConfig):
    sweep: Sweep


@dataclass(frozen=True)
class Trial:
    """One of a sweep."""

    settings: Settings
    """In which it differs from the sweep's Job."""
    job: JobSpec


def is_sweep(file: Path) -> bool:
    """Whether a file is one of a sweep, and not of a Job."""
    return file.is_file() and "sweep" in read_toml(file, "give the path of a job.toml")


def read_sweep(file: Path, name: str | None) -> Sweep:
    """The sweep of a file.

    Args:
        name: in the place of the file's.

    Raises:
        InputError: it can't be read, or holds something else; names the file and the key.
    """
    raw = read_toml(file, _CURE)
    table = raw.get("sweep")
    if isinstance(table, dict):
        raw["sweep"] = {"name": named_after(file), **table, **({"name": name} if name else {})}
    try:
        return _SweepFile.parse(raw).sweep
    except InputError as error:
        raise InputError(f"{shown_path(file)}: {error}") from None


def trials_of(
    sweep: Sweep,
    file: Path,
    overrides: Sequence[str],
    read: Callable[[Path, list[str]], JobSpec],
) -> list[Trial]:
    """All trials, those of the grid first, in which the last setting changes fastest.

    Args:
        file: the sweep's.
        overrides: `--set`s for all of them.
        read: makes a Job of its file and `--set`s, its length in steps.

    Raises:
        InputError: there are none or too many, a trial is no Job, or two are equal.
    """
    job_file = file.parent / sweep.job
    read(job_file, list(overrides))  # what is wrong without any trial is no trial's fault
    given = {text.partition("=")[0].strip() for text in overrides}
    known: dict[str, Settings] = {}
    trials = []
    try:
        for settings in _all_settings(sweep):
            job = _job(settings, job_file, overrides, given, read)
            text = to_toml(job)
            if text in known:
                raise InputError(
                    f"the trials {settings_text(known[text])} and {settings_text(settings)} have "
                    "equal settings: leave one of them out."
                )
            known[text] = settings
            trials.append(Trial(settings, job))
    except InputError as error:
        raise InputError(f"{shown_path(file)}: {error}") from None
    return trials


def settings_text(settings: Settings) -> str:
    """As a person writes them."""
    parts = (f"{name}={_toml(value)}" for name, value in settings.items())
    return ", ".join(parts) or "the Job as it is"


def _all_settings(sweep: Sweep) -> Iterator[Settings]:
    axes = dotted(sweep.grid)
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise InputError(
                f"grid.{name} = {_toml(values)} is no list of at least one value: write the values "
                "that it is to have, in brackets."
            )
    num = len(sweep.trials) + (math.prod(map(len, axes.values())) if axes else 0)
    if not 0 < num <= MOST_TRIALS:
        raise InputError(
            f"the sweep has {num:,} trials, and it must have 1 to {MOST_TRIALS:,}: give its grid, "
            f"or its list of trials, {'fewer' if num else 'some'} values."
        )
    if axes:
        for values in itertools.product(*axes.values()):
            yield dict(zip(axes, values, strict=True))
    yield from map(dotted, sweep.trials)


def _job(
    settings: Settings,
    file: Path,
    overrides: Sequence[str],
    given: set[str],
    read: Callable[[Path, list[str]], JobSpec],
) -> JobSpec:
    for name in settings:
        if name == "name":
            raise InputError("trials are numbered and can't set their name: leave it out.")
        if name in given:
            raise InputError(f"{name} is set by --set and by the sweep: leave one of them out.")
    own = [f"{name}={_toml(value)}" for name, value in settings.items()]
    try:
        return read(file, [*overrides, *own])
    except InputError as error:
        said = str(error).removeprefix("--set ")
        raise InputError(f"trial {settings_text(settings)}: {said}") from None


def _toml(value: Any) -> str:
    """On one line, as it stands behind a setting's name."""
    text = tomli_w.dumps({"value": value}).partition("=")[2].strip()
    return re.sub(r",?\n\s*\]", "]", re.sub(r"\[\n\s*", "[", text)).replace(",\n    ", ", ")
