"""The order of samples of a mixture: a pure function of the seed and the running number.

How it works: weights are made into counts of a period of 2**14 samples, and in it each source has
its places at even distances, so that any stretch of the order is mixed as the weights say, to about
a sample. How many samples of a source come before a running number is then a multiplication and a
look into the period: nothing is replayed, and a run resumes from one number. Where weights change,
at a stage or where a source has been read as often as it may, another period begins; there are as
many of those as stages and limits. The samples of a source come in an order of its own (order.py),
epoch by epoch, which depends on the seed and its name and on no other source.

Weights are held to 1 / 2**14; a source whose weight is less has one place in a period.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from paceline.config.job_sections import Data
from paceline.train.data.order import Ids, sample_ids

PERIOD = 2**14


@dataclass(frozen=True)
class MixedSource:
    """What the order needs to know of a source."""

    name: str
    num_samples: int
    most: int | None = None
    """Samples of it that a run may read; None: any number."""


class WeightsFrom(NamedTuple):
    """Weights of the sources from a running number on."""

    first: int
    weights: tuple[float, ...]


class _Period(NamedTuple):
    """Which source each of PERIOD samples is of."""

    sources: Ids
    """(PERIOD,)"""
    earlier: Ids
    """Samples of the same source before, in the period: (PERIOD,)."""
    counts: Ids
    """Of each source: (sources,)."""


class _Stretch(NamedTuple):
    """Running numbers that go by one period."""

    first: int
    before: Ids
    """Samples of each source that come before: (sources,)."""
    period: _Period

    def counts_at(self, number: int) -> Ids:
        """Samples of each source before a running number of this stretch."""
        whole, rest = divmod(number - self.first, PERIOD)
        inside = np.bincount(self.period.sources[:rest], minlength=len(self.before))
        return self.before + whole * self.period.counts + inside

    def number_of(self, source: int, count: int) -> int:
        """The running number by which it has `count` more of a source, at least one."""
        whole, rest = divmod(count - 1, int(self.period.counts[source]))
        places = np.flatnonzero(self.period.sources == source)
        return self.first + whole * PERIOD + int(places[rest]) + 1


@dataclass(frozen=True)
class MixtureOrder:
    """Which sample of which source comes when.

    Sources are numbered as they are listed, and their samples from `offsets` on: the first source
    has the ids 0 .. num_samples - 1, and so on.
    """

    seed: int
    sources: tuple[MixedSource, ...]
    stages: tuple[WeightsFrom, ...]
    """By `first`, that of the first is 0."""
    _seeds: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seeds = tuple(source_seed(self.seed, source.name) for source in self.sources)
        object.__setattr__(self, "_seeds", seeds)

    @cached_property
    def offsets(self) -> Ids:
        """The id of each source's first sample, and the number of all: (sources + 1,)."""
        return np.cumsum([0, *(source.num_samples for source in self.sources)])

    def ids(self, first: int, count: int) -> Ids:
        """The samples with the running numbers first .. first + count - 1.

        Returns:
            ids, (count,); fewer where the mixture ends before.
        """
        last = first + count if self.length is None else min(first + count, self.length)
        parts = []
        for stretch, end in zip(self._stretches, [*self._starts[1:], last], strict=True):
            begin, end = max(first, stretch.first), min(end, last)
            if begin < end:
                parts.append(self._ids_of(stretch, np.arange(begin, end)))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def counts(self, number: int) -> Ids:
        """Samples of each source before a running number: (sources,)."""
        at = int(np.searchsorted(self._starts, number, "right")) - 1
        return self._stretches[at].counts_at(number)

    @cached_property
    def length(self) -> int | None:
        """Samples until every source has been read as often as it may; None: without end."""
        return self._plan[1]

    def _ids_of(self, stretch: _Stretch, numbers: Ids) -> Ids:
        whole, rest = np.divmod(numbers - stretch.first, PERIOD)
        sources = stretch.period.sources[rest]
        running = stretch.before[sources] + whole * stretch.period.counts[sources]
        running += stretch.period.earlier[rest]
        ids = np.empty(len(numbers), np.int64)
        for source in np.unique(sources):
            # Within a stretch a source's samples follow one another without a gap.
            mine = np.flatnonzero(sources == source)
            size = self.sources[source].num_samples
            own = sample_ids(self._seeds[source], int(running[mine[0]]), len(mine), size)
            ids[mine] = self.offsets[source] + own
        return ids

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        return self._plan[0]

    @cached_property
    def _starts(self) -> list[int]:
        return [stretch.first for stretch in self._stretches]

    @cached_property
    def _plan(self) -> tuple[list[_Stretch], int | None]:
        """The stretches, and where the mixture ends."""
        stretches: list[_Stretch] = []
        before = np.zeros(len(self.sources), np.int64)
        ends = [stage.first for stage in self.stages[1:]]
        for stage, end in zip(self.stages, [*ends, math.inf], strict=True):
            at = stage.first
            while at < end:
                weights = tuple(
                    0.0 if self._left(source, before) == 0 else weight
                    for source, weight in enumerate(stage.weights)
                )
                if not any(weights):
                    return stretches, at
                stretch = _Stretch(at, before, _period(weights, self._seeds))
                stretches.append(stretch)
                until = min(self._emptied_at(stretch), end)
                if until == math.inf:
                    return stretches, None
                at = int(until)
                before = stretch.counts_at(at)
        raise AssertionError("the last stage has no end")

    def _left(self, source: int, before: Ids) -> int | None:
        most = self.sources[source].most
        return None if most is None else most - int(before[source])

    def _emptied_at(self, stretch: _Stretch) -> float:
        """The running number from which on a source of the stretch has nothing left."""
        left = [self._left(source, stretch.before) for source in range(len(self.sources))]
        numbers = [
            stretch.number_of(source, count)
            for source, count in enumerate(left)
            if count and stretch.period.counts[source]
        ]
        return min(numbers, default=math.inf)


def mixture_of(data: Data, sizes: Sequence[int], seed: int, global_batch: int) -> MixtureOrder:
    """The order of a Job's samples.

    Args:
        data: its sources and stages.
        sizes: samples of each source.
        seed: `train.seed`.
        global_batch: samples of a step.
    """
    sources = data.sources
    mixed = tuple(
        MixedSource(
            each.name, size, None if each.max_epochs is None else int(each.max_epochs * size)
        )
        for each, size in zip(sources, sizes, strict=True)
    )
    read = [(each.epochs or 1.0) * size for each, size in zip(sources, sizes, strict=True)]
    # Of the largest: its power is a number at any temperature.
    by_size = tuple((size / max(read)) ** (1 / data.temperature) for size in read)
    given = tuple(each.weight or 0.0 for each in sources)
    stages = [WeightsFrom(0, given if any(given) else by_size)]
    for stage in data.stages:
        weights = tuple(stage.weights.get(each.name, 0.0) for each in sources)
        stages.append(WeightsFrom(stage.from_step * global_batch, weights))
    return MixtureOrder(seed, mixed, tuple(stages))


def source_seed(seed: int, name: str) -> int:
    """The seed of a source's own order: another for each, whatever else is mixed in."""
    digest = hashlib.blake2b(f"paceline source {seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=64)
def _period(weights: tuple[float, ...], seeds: tuple[int, ...]) -> _Period:
    counts = places_of(weights)
    # A source's places are at even distances, from a beginning of its own.
    moments = [
        (np.arange(count) + seed / 2**63) / count for count, seed in zip(counts, seeds, strict=True)
    ]
    numbers = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(np.concatenate(moments), kind="stable")
    earlier = np.concatenate([np.arange(count) for count in counts])
    return _Period(numbers[order], earlier[order], counts)


def places_of(weights: Sequence[float]) -> Ids:
    """How many of PERIOD samples are of each source: at least one where it has a weight."""
    shares = np.array(weights) / sum(weights) * PERIOD
    counts = np.maximum(np.floor(shares), np.array(weights) > 0).astype(np.int64)
    while missing := PERIOD - int(counts.sum()):
        by_need = np.argsort(counts - shares, kind="stable")
        if missing > 0:
            counts[by_need[:missing]] += 1
        else:
            spare = by_need[counts[by_need] > 1][missing:]
            counts[spare] -= 1
    return counts
