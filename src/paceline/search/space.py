"""Space: the file of a search, and the Job of each of its points."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.duration import seconds_of
from paceline.config.errors import InputError
from paceline.config.files import read_toml
from paceline.config.frozen import MOST, FrozenConfig
from paceline.config.job import JobSpec, change_job, dotted
from paceline.config.outputs import shown_path

CURE = "write tables [search] and [search.space], see docs/search.md"
# Of a setting that a search can't change: one Run per trial, on this machine, to the Job's end.
_HELD = ("name", "cluster", "elastic", "checkpoint", "train.steps", "train.tokens", "train.epochs")

ObjectiveName = Literal["loss", "time", "memory", "latency", "energy", "usd"]
RuleName = Literal["auto", "best", "cheapest", "knee"]
Positive = Annotated[float, Field(gt=0, le=MOST)]
Point = Mapping[str, Any]
"""Settings of a Job that differ, by dotted names."""


class Range(FrozenConfig):
    """Numbers between two, both included."""

    low: int | float
    high: int | float
    log: bool = False
    """Whether each doubling is as far as the next."""
    step: int | None = Field(None, gt=0, le=MOST)
    """Between whole numbers; 1 where it is left out."""

    @property
    def is_whole(self) -> bool:
        """Whether it has whole numbers alone: both ends are."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @model_validator(mode="after")
    def _has_numbers(self) -> Self:
        if not max(abs(self.low), abs(self.high)) <= MOST:
            raise ValueError(f"low and high must be at most {MOST:.0e}.")
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be below high = {self.high:g}.")
        if self.log and self.low <= 0:
            raise ValueError(f"log = true needs low above 0, and it is {self.low:g}.")
        if self.step is not None and (self.log or not self.is_whole):
            raise ValueError("step is for whole low and high without log: leave it out.")
        return self


class Limits(FrozenConfig):
    """What a point must not exceed. All but that of the loss are predicted: a point beyond one of
    them never runs."""

    loss: Positive | None = None
    """Held-out loss: for the rule "cheapest"."""
    time_s: Positive | None = None
    """Of the whole training."""
    step_s: Positive | None = None
    """Of one training step."""
    memory_gb: Positive | None = None
    """Of a device, GB (10^9 bytes)."""
    latency_ms: Positive | None = None
    """Of a token when one text is served."""
    energy_kwh: Positive | None = None
    usd: Positive | None = None


class Search(FrozenConfig):
    """A table [search]."""

    job: str
    """The Job's file; a relative path is relative to the search's file."""
    objectives: Annotated[
        tuple[ObjectiveName, ...], Field(strict=False, min_length=1, max_length=6)
    ] = ("loss", "time")
    """All of them are to be small. "loss" is measured, the others are predicted."""
    within: str = "30 min"
    """Device time of all trials together, as it is predicted: seconds times devices."""
    rungs: int = Field(3, ge=1, le=10)
    """Lengths that trials are trained to, the last one the Job's."""
    factor: int = Field(3, ge=2, le=100)
    """Of a rung one trial in so many goes on to the next, which is so many times as long."""
    rule: RuleName = "auto"
    """The answer: the least loss; the cheapest by the second objective whose loss is within its
    limit; the knee of the front; "auto": as the objectives and limits suggest."""
    seed: int = Field(0, ge=0, lt=2**31)
    space: dict[str, Any]
    """By setting: a list of choices, or {low, high}. A table of settings in the place of a value
    sets all of them."""
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if "loss" not in self.objectives:
            raise ValueError(
                'objectives lack "loss", and what is predicted needs no trial: add it, or use '
                "paceline plan."
            )
        if len(set(self.objectives)) < len(self.objectives):
            raise ValueError("an objective stands twice: leave one of them out.")
        if self.rule == "cheapest" and (self.limits.loss is None or len(self.objectives) < 2):
            raise ValueError('rule = "cheapest" needs limits.loss and a second objective.')
        if self.rule == "knee" and len(self.objectives) < 2:
            raise ValueError('rule = "knee" needs a second objective: add one.')
        return self

    @property
    def rule_used(self) -> RuleName:
        """With "auto" decided."""
        if self.rule != "auto":
            return self.rule
        if len(self.objectives) == 1:
            return "best"
        return "knee" if self.limits.loss is None else "cheapest"

    @property
    def within_s(self) -> float:
        """Device-seconds."""
        return seconds_of("search.within", self.within)


class _SearchFile(FrozenConfig):
    search: Search


@dataclass(frozen=True)
class Choices:
    """A setting with a value of a list; values are known by their JSON."""

    values: Mapping[str, Any]

    def key_of(self, value: Any) -> str:
        """Of a value that it has: 1 and true are two."""
        return _key(value)


Dimension = Range | Choices


def read_search(file: Path) -> Search:
    """The search of a file.

    Raises:
        InputError: it can't be read, or holds something else; names the file and the key.
    """
    raw = read_toml(file, CURE)
    try:
        found = _SearchFile.parse(raw).search
        _ = found.within_s, dimensions_of(found)
    except InputError as error:
        raise InputError(f"{shown_path(file)}: {error}") from None
    return found


def dimensions_of(search: Search) -> dict[str, Dimension]:
    """The settings that the space has, by dotted name.

    Raises:
        InputError: one of them is neither choices nor a range, or can't be searched.
    """
    found = dict(_dimensions(search.space))
    if not 0 < len(found) <= 100:
        raise InputError(f"search.space has {len(found)} settings: give it 1 to 100.")
    for name, dimension in found.items():
        values = dimension.values.values() if isinstance(dimension, Choices) else ()
        for key in (name, *(key for value in values for key in settings_of({name: value}))):
            if any(key == held or key.startswith(f"{held}.") for held in _HELD):
                raise InputError(
                    f"search.space.{key} can't be searched: each trial is a run of its own on this "
                    "machine, as long as the Job says; leave it out."
                )
    return found


def _dimensions(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Dimension]]:
    found: list[tuple[str, Dimension]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value:
            found.append((name, Choices({_key(each): each for each in value})))
        elif isinstance(value, Mapping) and {"low", "high"} & value.keys():
            found.append((name, Range.parse(value, f"search.space.{name}")))
        elif isinstance(value, Mapping) and value:
            found += _dimensions(value, f"{name}.")
        else:
            raise InputError(
                f"search.space.{name} = {value!r} is no choice: give a list of values, or "
                "{low = 1e-4, high = 1e-2, log = true}."
            )
    return found


def _key(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise InputError(f"search.space has {value!r}, which no setting takes.") from None


def settings_of(point: Point) -> dict[str, Any]:
    """The settings that a point sets, tables laid flat."""
    return dotted(point)


def job_at(job: JobSpec, point: Point) -> JobSpec:
    """The search's Job with the settings of a point.

    Raises:
        InputError: it is no Job.
    """
    texts = [f"{name}={_toml(value)}" for name, value in settings_of(point).items()]
    return change_job(job, texts)


def point_text(point: Point) -> str:
    """As a person writes it, numbers to three digits."""
    shown = {
        name: f"{value:.3g}" if isinstance(value, float) else _toml(value)
        for name, value in settings_of(point).items()
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _toml(value: Any) -> str:
    """On one line, as TOML says it."""
    return repr(value) if isinstance(value, float) else json.dumps(value)


def rung_steps(search: Search, steps: int) -> tuple[int, ...]:
    """Steps at which trials are compared, increasing; the last is the Job's length.

    They are multiples of the first, so that one setting evaluates at each.

    Raises:
        InputError: the Job is too short for so many rungs.
    """
    first = steps / search.factor ** (search.rungs - 1)
    if first < 1:
        raise InputError(
            f"search.rungs = {search.rungs} with factor = {search.factor} needs a Job of at least "
            f"{search.factor ** (search.rungs - 1):,} steps, and it has {steps:,}: lower one of "
            "them."
        )
    every = math.floor(first)
    return (*(every * search.factor**at for at in range(search.rungs - 1)), steps)
