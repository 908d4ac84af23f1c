"""Which samples of a person's dataset come when: a pure function of seed and running number.

A `DataLoader` shuffles by a generator of its process, so that each rank would have an order of its
own, and none could go on in the middle of one. Its dataset is read in our order instead where its
sampler is one of torch's plain ones; any other sampler is run on every rank from the same random
numbers, which are a function of the seed and the epoch.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from paceline.config.errors import InputError
from paceline.train.custom.isolated_rng import IsolatedRng, seed_of
from paceline.train.data.order import Ids, epochs_of, permute


class SampleOrder(Protocol):
    """The order of samples."""

    def batches(self, size: int, first: int) -> Iterator[Ids]:
        """Global batches of `size` samples from running number `first` on, without end."""

    def once(self) -> Ids:
        """Every sample of one pass, the same at each call: for evaluations."""


@dataclass(frozen=True)
class SeededOrder:
    """Ours: shuffled by (seed, epoch), or as the dataset has them."""

    num_samples: int
    seed: int
    shuffled: bool
    drop_last: bool = False
    """Whether an epoch ends with its last whole batch; else the next one fills it up."""

    def batches(self, size: int, first: int) -> Iterator[Ids]:
        """As `SampleOrder` says."""
        length = self.num_samples
        if self.drop_last:
            length -= length % size
        while True:
            parts = list(epochs_of(first, size, length))
            yield np.concatenate([self._ids(*part) for part in parts])
            first += size

    def _ids(self, epoch: int, positions: Ids) -> Ids:
        if not self.shuffled:
            return positions
        return permute(positions, self.num_samples, self.seed, epoch)

    def once(self) -> Ids:
        """As `SampleOrder` says."""
        return np.arange(self.num_samples)


@dataclass(frozen=True)
class SamplerOrder:
    """A person's sampler, or batch sampler, run from random numbers of (seed, epoch)."""

    sampler: Iterable[Any]
    seed: int
    gives_batches: bool = False
    drop_last: bool = False

    def batches(self, size: int, first: int) -> Iterator[Ids]:
        """As `SampleOrder` says; the sampler is run from its first epoch on, since it may be
        any."""
        return itertools.islice(self._batches(size), first // size, None)

    def _batches(self, size: int) -> Iterator[Ids]:
        def epoch(number: int) -> Iterator[list[Any]]:
            if not self.gives_batches:
                return self._drawn(number, size)
            return (self._one_batch(drawn, size) for drawn in self._drawn(number, 1))

        none = f"{_name(self.sampler)} names no samples: it must have some."
        return map(np.array, filled(epoch, size, none, drop_last=self.drop_last))

    def _one_batch(self, drawn: list[Any], size: int) -> list[Any]:
        (batch,) = drawn
        if len(batch) != size:
            raise InputError(
                f"{_name(self.sampler)} gave a batch of {len(batch)} samples but "
                f"train.global_batch = {size}: it must give whole global batches."
            )
        return list(batch)

    def _drawn(self, epoch: int, count: int) -> Iterator[list[Any]]:
        """What the sampler gives in an epoch, some at a time."""
        key = (self.seed, "sampler", epoch)
        for each in (self.sampler, getattr(self.sampler, "sampler", None)):
            begin_epoch(each, epoch, seed_of(*key))
        chance, sampler = IsolatedRng(*key), None
        while True:
            with chance:
                sampler = iter(self.sampler) if sampler is None else sampler
                drawn = list(itertools.islice(sampler, count))
            if not drawn:
                return
            yield drawn

    def once(self) -> Ids:
        """As `SampleOrder` says."""
        drawn = [each for some in self._drawn(0, 1) for each in some]
        return np.array(list(itertools.chain(*drawn)) if self.gives_batches else drawn)

    def first_batch(self, size: int) -> Ids:
        """The first batch of a run.

        Raises:
            InputError: it is another one when the sampler is started again, so that ranks would
                differ, and a resumed run from one that never stopped.
        """
        if isinstance(self.sampler, DistributedSampler):
            raise InputError(
                "the loader's DistributedSampler deals samples out to ranks, which paceline.train "
                "does itself: leave it out and set shuffle=True."
            )
        first, again = (next(self.batches(size, 0)) for _ in range(2))
        if not np.array_equal(first, again):
            raise InputError(
                f"{_name(self.sampler)} gives another order each time it starts, though torch, "
                "numpy and random are seeded for it: let it draw from these, from a "
                "torch.Generator in its attribute `generator`, or from what set_epoch(epoch) told."
            )
        return first


def filled(
    epoch: Callable[[int], Iterable[list[Any]]], size: int, none: str, *, drop_last: bool = False
) -> Iterator[list[Any]]:
    """Lists of `size` items without end; where an epoch ends, the next one fills a list up.

    Args:
        epoch: the items of an epoch, some at a time.
        size: of a list.
        none: says that an epoch has no items: that is an error, not a hang.
        drop_last: leave out what an epoch has beyond whole lists.

    Raises:
        InputError: an epoch has no items.
    """
    rest: list[Any] = []
    for number in itertools.count():
        is_empty = True
        for some in epoch(number):
            is_empty = False
            rest += some
            if len(rest) >= size:
                yield rest[:size]
                del rest[:size]
        if is_empty:
            raise InputError(none)
        if drop_last:
            rest.clear()


def order_of(loader: DataLoader[Any], seed: int) -> SampleOrder:
    """The order of a loader that has a batch sampler: ours where its samplers are torch's plain
    ones."""
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        assert batch_sampler is not None
        return SamplerOrder(batch_sampler, seed, gives_batches=True)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    is_shuffled = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == num_samples
    )
    if is_shuffled or type(sampler) is SequentialSampler:
        return SeededOrder(num_samples, seed, is_shuffled, loader.drop_last)
    return SamplerOrder(sampler, seed, drop_last=loader.drop_last)


def begin_epoch(source: Any, epoch: int, seed: int) -> None:
    """Tell a sampler, a loader or a dataset which epoch begins, in the ways that it may know."""
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)
    if isinstance(generator := getattr(source, "generator", None), torch.Generator):
        generator.manual_seed(seed)


def _name(sampler: object) -> str:
    return f"the loader's {type(sampler).__name__}"
