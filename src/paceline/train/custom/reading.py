"""Reading: samples by index, in this process or ahead of the steps in others.

Which samples come when is decided before anybody reads (`sample_order`), and what reading draws at
random is a function of the sample's number in the run. So who reads changes nothing, and it may
change while a run goes on. Reading begins in this process, timed. Where it holds the steps up,
processes are started that read ahead. Not every dataset bears being read in another process (an
open file has one position for both), so the first batch of the others is compared with the same
one read here.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from paceline.config.errors import InputError
from paceline.train.custom.collate import Collate
from paceline.train.custom.digest import digest
from paceline.train.custom.isolated_rng import IsolatedRng

# Micro-batches that are read before the clock runs, as the first steps compile, and while it does.
_NUM_FIRST, _NUM_TIMED = 4, 12
# Reading is left where it is below this share of the time, and this time of a micro-batch: sending
# it between processes takes about a millisecond.
_LEAST_SHARE, _LEAST_S = 0.1, 5e-3


class CustomMicroBatch(NamedTuple):
    """A micro-batch on this rank's device."""

    batch: Any
    num_samples: int
    """0: it only keeps this rank in step with the others, and doesn't count."""


class SampleIndex(NamedTuple):
    """A sample to read."""

    index: Any
    number: tuple[Any, ...]
    """What its random numbers are a function of."""
    counts: bool = True


class SampleSource:
    """A dataset that is asked for picks, in this process or a worker's."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitems__(self, picks: Sequence[SampleIndex]) -> list[tuple[Any, bool]]:
        if is_of_hf(self._dataset) and hasattr(self._dataset, "__getitems__"):
            IsolatedRng.seed(*picks[0].number)
            samples = self._dataset.__getitems__([pick.index for pick in picks])
        else:
            samples = [self._sample(pick) for pick in picks]
        return [(sample, pick.counts) for sample, pick in zip(samples, picks, strict=True)]

    def _sample(self, pick: SampleIndex) -> Any:
        IsolatedRng.seed(*pick.number)
        return self._dataset[pick.index]

    def part(self, read: Sequence[tuple[Any, bool]]) -> CustomMicroBatch:
        """Samples with whether they count, as a micro-batch on the host."""
        return CustomMicroBatch(
            self._collate([sample for sample, _ in read]), sum(counts for _, counts in read)
        )


@dataclass
class Reader:
    """Who reads the samples of a dataset."""

    source: SampleSource
    workers: int | None
    """Processes that read ahead; 0: none; None: some, once reading is seen to hold up the steps."""
    cores: int
    """The most that are started by that."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of a DataLoader's workers."""
    say: Callable[[str], object] = lambda _sentence: None

    def read(self, micro_batches: Iterator[list[SampleIndex]]) -> Iterator[CustomMicroBatch]:
        """Micro-batches on the host, in their order.

        Raises:
            InputError: a sample can't be read.
        """
        if self.workers:
            yield from self._by_others(micro_batches, self.workers)
            return
        if self.workers is None and (needed := (yield from self._timed(micro_batches))):
            yield from self._by_others_if_alike(micro_batches, needed)
        yield from self._here(micro_batches)

    def _here(self, micro_batches: Iterator[list[SampleIndex]]) -> Iterator[CustomMicroBatch]:
        chance = IsolatedRng()
        for picks in micro_batches:
            with chance:
                part = self.source.part(self.source.__getitems__(picks))
            yield part

    def _by_others(
        self, micro_batches: Iterator[list[SampleIndex]], num_workers: int
    ) -> Generator[CustomMicroBatch, None, None]:
        try:
            yield from DataLoader(
                self.source,  # type: ignore[arg-type]
                batch_sampler=micro_batches,
                collate_fn=self.source.part,
                num_workers=num_workers,
                generator=torch.Generator(),  # else it would draw from the one of training
                **self.options,
            )
        except InputError as error:  # torch puts the worker's traceback before it
            raise InputError(str(error).rstrip().rpartition("InputError: ")[2]) from None

    def _timed(
        self, micro_batches: Iterator[list[SampleIndex]]
    ) -> Generator[CustomMicroBatch, None, int]:
        """The first ones, read here; returns how many processes are to read the others."""
        parts = self._here(itertools.islice(micro_batches, _NUM_FIRST + _NUM_TIMED))
        began = reading = 0.0
        for number in range(_NUM_FIRST + _NUM_TIMED):
            asked = time.perf_counter()
            if number == _NUM_FIRST:
                began, reading = asked, 0.0
            if (part := next(parts, None)) is None:
                return 0
            reading += time.perf_counter() - asked
            yield part
        whole = time.perf_counter() - began
        needed = min(workers_for(reading / _NUM_TIMED, whole / _NUM_TIMED), self.cores)
        if needed:
            self.say(
                f"reading samples takes {reading / whole:.0%} of the time: from now on {needed} "
                "processes of each rank read ahead, if they read the same."
            )
        return needed

    def _by_others_if_alike(
        self, micro_batches: Iterator[list[SampleIndex]], num_workers: int
    ) -> Iterator[CustomMicroBatch]:
        here, ahead = itertools.tee(micro_batches)
        first = list(self._here(itertools.islice(here, 1)))
        if not first:
            return
        theirs = self._by_others(ahead, num_workers)
        is_alike = _is_next(first[0], theirs)
        yield first.pop()
        if is_alike:
            del here  # else it would keep all that is read
            yield from theirs
            return
        theirs.close()
        self.say(
            "samples that another process reads differ from these, or can't be read there: they "
            "are read between steps, as before."
        )
        yield from self._here(here)


def workers_for(reading_s: float, whole_s: float) -> int:
    """Processes that read as fast as the rest goes; 0: reading hardly holds it up.

    Args:
        reading_s: seconds that one process takes for a micro-batch.
        whole_s: seconds of a micro-batch, its reading included.
    """
    if reading_s < max(_LEAST_S, _LEAST_SHARE * whole_s):
        return 0
    return math.ceil(reading_s / max(whole_s - reading_s, 1e-3 * whole_s))


def is_of_hf(data: Any) -> bool:
    """Whether it is a dataset of Hugging Face's `datasets`, which need not be installed."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _is_next(part: CustomMicroBatch, theirs: Iterator[CustomMicroBatch]) -> bool:
    """Whether the next one of other processes is the same."""
    try:
        return digest(part) == digest(next(theirs))
    except Exception:  # whatever a dataset, or the system, has against other processes
        return False
