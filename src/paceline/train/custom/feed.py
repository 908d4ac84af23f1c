"""The steps of one rank from a person's data, whatever form it has.

A dataset with `len` and `[index]` is read sample by sample in an order of ours (`order`), and so is
the dataset of a `DataLoader`. An `IterableDataset` gives samples as they come. Any other iterable
gives whole global batches, of which each rank takes its rows. All ranks must read the same ones:
the first batch is compared.

What reading draws at random is a function of (train.seed, running number of the sample), or of the
pass where samples come as they come. So a resumed run reads what an undisturbed one reads.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from paceline.comm.records import all_gather
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.machine.discovery import usable_cores
from paceline.train.custom.collate import Collate, collate_by_default, num_rows, rows_of, to_device
from paceline.train.custom.digest import digest
from paceline.train.custom.isolated_rng import IsolatedRng, seed_of
from paceline.train.custom.plain import NotPlainError, from_plain, to_plain
from paceline.train.custom.reading import (
    CustomMicroBatch,
    Reader,
    SampleIndex,
    SampleSource,
    is_of_hf,
)
from paceline.train.custom.sample_order import (
    SampleOrder,
    SamplerOrder,
    SeededOrder,
    begin_epoch,
    order_of,
)
from paceline.train.data.order import Ids, micro_batch_numbers

# What else of a DataLoader says how samples are read, and not which or when.
_READING = ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


Step = list[CustomMicroBatch]


@dataclass(frozen=True)
class BatchPartition:
    """How a global batch is dealt out to ranks and micro-batches."""

    global_batch: int
    micro_batch: int
    seed: int
    ranks: Ranks
    interleave: int = 1
    """Neighbouring ranks that take micro-batches in turns."""
    tp: int = 1
    """Neighbouring ranks that have the same samples."""

    @classmethod
    def of(cls, job: Job, ranks: Ranks) -> "BatchPartition":
        """As a concrete Job says."""
        train, sizes = job.train, (job.train.global_batch, job.micro_batch)
        return cls(*sizes, train.seed, ranks, job.interleave, job.layout.tp)

    def parts(self, count: int) -> list[slice]:
        """This rank's micro-batches of a batch of `count` samples: as many as every other rank's,
        so that the last ones of an incomplete batch may be empty. Which samples come together does
        not depend on the ranks."""
        size = self.micro_batch
        share = -(-count // (self.ranks.world_size // self.tp * size))
        numbers = micro_batch_numbers(self.ranks.rank // self.tp, share, self.interleave)
        return [slice(min(n * size, count), min((n + 1) * size, count)) for n in numbers]

    def placed(self, part: CustomMicroBatch) -> CustomMicroBatch:
        """A micro-batch, from the host, on this rank's device."""
        return part._replace(batch=to_device(part.batch, self.ranks.device))

    @property
    def cores(self) -> int:
        """That processes beside this rank may have: its share of the host's but one."""
        return max(1, len(usable_cores()) // self.ranks.local_world_size - 1)

    def compare(self, seen: object, name: str) -> None:
        """Let all ranks say what they read.

        Raises:
            InputError: it isn't the same.
        """
        if self.ranks.world_size == 1:
            return
        if len(set(all_gather(digest(seen)))) > 1:
            raise InputError(
                f"{name} differs from rank to rank, and every rank must read the same to take its "
                "own part of it: seed alike whatever shuffles and don't split by rank, or give a "
                "dataset with len and [index], which paceline.train shuffles itself."
            )


class CustomFeed(Protocol):
    """A person's data as the steps of this rank."""

    def steps(self, first: int) -> Iterator[Step]:
        """Steps without end, from sample number `first` of the run on."""

    def once(self) -> Iterator[Step]:
        """One pass, the same at each call; its last step may be incomplete."""

    def state(self) -> Any:
        """What a checkpoint keeps besides the number of samples, as plain JSON; None: nothing."""

    def load(self, state: Any) -> None:
        """Take what a checkpoint kept, for the next steps."""

    def tell_by(self, say: Callable[[str], object]) -> None:
        """Tell a person by this."""


def feed_of(
    data: Any, deal: BatchPartition, collate: Collate | None, workers: int | None
) -> CustomFeed:
    """What reads a person's data.

    Args:
        collate: of samples; None: the loader's, or else torch's rule.
        workers: processes that read ahead; None: as many as the loader has, or else some once
            reading is seen to hold up the steps.

    Raises:
        InputError: the data can't be used.
    """
    if isinstance(data, DataLoader):
        return _feed_of_loader(data, deal, collate, workers)
    if isinstance(data, Mapping):
        raise InputError(
            "data is a dict: give a dataset of samples, as torch's TensorDataset(*tensors) or "
            "Hugging Face's Dataset.from_dict(columns)."
        )
    if _is_map_style(data):
        order = SeededOrder(len(data), deal.seed, shuffled=True)
        source = SampleSource(_as_tensors(data), collate or collate_by_default)
        return _Samples(deal, order, Reader(source, workers, deal.cores))
    if not isinstance(data, Iterable):
        raise InputError(
            f"data is a {type(data).__name__}: give a dataset with len and [index], or an iterable "
            "of global batches."
        )
    if workers is not None:
        raise InputError(
            f"workers = {workers} reads samples of a dataset ahead and this data is an iterable: "
            "leave it out, or wrap the data in a DataLoader with num_workers."
        )
    if isinstance(data, IterableDataset) or is_of_hf(data):
        return _Stream(_as_tensors(data), deal, collate or collate_by_default)
    return _batches(data, deal, collate)


def _feed_of_loader(
    loader: DataLoader[Any], deal: BatchPartition, collate: Collate | None, workers: int | None
) -> CustomFeed:
    """A loader's dataset in our order where that can be; else its batches as they come."""
    is_plain = type(loader).__iter__ is DataLoader.__iter__
    if not is_plain or loader.batch_sampler is None or not _is_map_style(loader.dataset):
        return _batches(loader, deal, collate)
    order = order_of(loader, deal.seed)
    if isinstance(order, SamplerOrder):
        deal.compare(order.first_batch(deal.global_batch), "the order of the loader's sampler")
    source = SampleSource(_as_tensors(loader.dataset), collate or loader.collate_fn)
    options = {name: value for name in _READING if (value := getattr(loader, name))}
    num_workers = loader.num_workers if workers is None else workers
    return _Samples(deal, order, Reader(source, num_workers, deal.cores, options))


def _batches(data: Iterable[Any], deal: BatchPartition, collate: Collate | None) -> CustomFeed:
    if collate is not None:
        raise InputError(
            "collate= makes batches of samples, and this data yields batches already: leave it out."
        )
    return _Stream(data, deal, None)


def check_enough(data: Any, global_batch: int) -> None:
    """Refuse what can't fill one step.

    Raises:
        InputError: a dataset is smaller than the global batch, or a loader has batches of another
            size.
    """
    if isinstance(data, DataLoader):
        size = data.batch_size
        if size is not None and size != global_batch:
            raise InputError(
                f"data yields a batch of {size} samples but train.global_batch = {global_batch}, "
                "the samples of a step over all ranks: make them equal."
            )
        data = data.dataset
    if _is_map_style(data) and len(data) < global_batch:
        raise InputError(
            f"data has {len(data)} samples, fewer than train.global_batch = {global_batch}: "
            "lower the batch or bring more data."
        )


def samples_of(data: Any, global_batch: int) -> int | None:
    """Samples of one pass over a person's data, None where it has no length."""
    try:
        if isinstance(data, DataLoader) and data.batch_size is not None and not data.drop_last:
            return len(data.sampler)  # type: ignore[arg-type]
        is_by_sample = _is_map_style(data) or isinstance(data, IterableDataset)
        return len(data) * (1 if is_by_sample else global_batch)
    except TypeError:
        return None


# ---- samples by index ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Samples:
    """A dataset with [index], or that of a loader."""

    deal: BatchPartition
    order: SampleOrder
    reader: Reader

    def steps(self, first: int) -> Iterator[Step]:
        size = self.deal.global_batch
        batches = zip(itertools.count(first, size), self.order.batches(size, first), strict=False)
        return self._read(self._picks(ids, number) for number, ids in batches)

    def once(self) -> Iterator[Step]:
        ids, size = self.order.once(), self.deal.global_batch
        firsts = range(0, len(ids), size)
        return self._read(self._picks(ids[first : first + size], -1 - first) for first in firsts)

    def state(self) -> None:
        """The number of samples says all."""

    def load(self, state: Any) -> None:
        """Nothing is kept."""

    def tell_by(self, say: Callable[[str], object]) -> None:
        """Tell when others begin to read."""
        self.reader.say = say

    def _picks(self, ids: Ids, first: int) -> list[list[SampleIndex]]:
        """This rank's micro-batches of a global batch that begins with running number `first`."""
        picks = [
            SampleIndex(index, (self.deal.seed, "sample", first + number))
            for number, index in enumerate(ids.tolist())
        ]
        idle = [picks[0]._replace(counts=False)]
        return [picks[part] or idle for part in self.deal.parts(len(picks))]

    def _read(self, steps: Iterator[list[list[SampleIndex]]]) -> Iterator[Step]:
        """Steps; workers read micro-batches of later ones meanwhile."""
        steps, ahead = itertools.tee(steps)
        parts = self.reader.read(itertools.chain.from_iterable(ahead))
        for step in steps:
            yield [self.deal.placed(part) for part in itertools.islice(parts, len(step))]


# ---- samples and batches as they come ------------------------------------------------------------


class _Pass:
    """One way through an iterable, with random numbers of its own."""

    def __init__(self, data: Iterable[Any], seed: int, number: int) -> None:
        key = (seed, "pass", number)
        begin_epoch(data, number, seed_of(*key))
        if isinstance(data, DataLoader):
            begin_epoch(data.dataset, number, seed_of(*key))
        self.number, self.chance = number, IsolatedRng(*key)
        self._data = data
        self._items: Iterator[Any] = iter(())
        self._has_begun = False

    def take(self, count: int) -> list[Any]:
        """The next items, so many if there are."""
        with self.chance:
            if not self._has_begun:
                self._items, self._has_begun = iter(self._data), True
            return list(itertools.islice(self._items, count))


@dataclass
class _Stream:
    """Samples of an IterableDataset, or whole global batches, of which all ranks read all and each
    keeps its part.

    Where the iterable has `state_dict` and `load_state_dict` (torchdata's protocol), checkpoints
    keep its state, and a resumed run goes on from there. Any other one is read again up to its
    place.
    """

    data: Iterable[Any]
    deal: BatchPartition
    collate: Collate | None
    """Of samples; None: it yields batches."""
    _pass: _Pass | None = None
    """The one that the newest steps are in."""
    _num_batches: int = 0
    """That these have read."""
    _kept: dict[str, Any] | None = None
    """What a checkpoint had."""
    _say: Callable[[str], object] = lambda _sentence: None
    _has_said: bool = False

    def steps(self, first: int) -> Iterator[Step]:
        batches = self._batches(first // self.deal.global_batch)
        return (self._step(items, must_be_whole=True) for items in self._compared(batches))

    def once(self) -> Iterator[Step]:
        one = _Pass(self.data, self.deal.seed, 0)
        items = iter(lambda: one.take(self._size), [])
        return (self._step(some) for some in self._compared(items))

    def state(self) -> Any:
        """What a checkpoint keeps, as plain JSON; None: nothing, it is read again."""
        if not self._is_stateful or self._pass is None or not self._num_batches:
            return None
        try:
            return to_plain(
                {
                    "batches": self._num_batches,
                    "pass": self._pass.number,
                    "chance": self._pass.chance.state(),
                    "data": self.data.state_dict(),  # type: ignore[attr-defined]
                }
            )
        except NotPlainError as error:
            if not self._has_said:
                self._has_said = True
                self._say(
                    f"the state of the data has a {error} in it, which no checkpoint keeps: a "
                    "resumed run reads the data again from its beginning."
                )
            return None

    def load(self, state: Any) -> None:
        """Let the next steps begin where a checkpoint's did."""
        self._kept = None if state is None or not self._is_stateful else from_plain(state)

    def tell_by(self, say: Callable[[str], object]) -> None:
        """Tell a person by this."""
        self._say = say

    @property
    def _is_stateful(self) -> bool:
        names = ("state_dict", "load_state_dict")
        return all(callable(getattr(self.data, name, None)) for name in names)

    @property
    def _size(self) -> int:
        """Items that make a global batch."""
        return 1 if self.collate is None else self.deal.global_batch

    def _batches(self, first: int) -> Iterator[list[Any]]:
        """Items of global batches from number `first` on; where a pass ends within one, the next
        pass fills it up."""
        self._begin(first)
        assert self._pass is not None
        while True:
            items = self._pass.take(self._size)
            while len(items) < self._size:
                self._pass = _Pass(self.data, self.deal.seed, self._pass.number + 1)
                more = self._pass.take(self._size - len(items))
                if not more:
                    raise InputError(
                        "data yields no batches (any more): give a dataset, or an iterable that "
                        "starts anew each time it is iterated, not a generator."
                    )
                items += more
            self._num_batches += 1
            if self._num_batches > first:
                yield items

    def _begin(self, first: int) -> None:
        """At the first batch, or at one before number `first` that a checkpoint knows."""
        kept = self._kept
        if kept is None or kept["batches"] > first:
            self._num_batches, self._pass = 0, _Pass(self.data, self.deal.seed, 0)
            return
        self._num_batches = kept["batches"]
        self._pass = _Pass(self.data, self.deal.seed, kept["pass"])
        self._pass.chance.load(kept["chance"])
        self.data.load_state_dict(kept["data"])  # type: ignore[attr-defined]

    def _compared(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """The batches, once all ranks have the same first one."""
        for number, items in enumerate(batches):
            if number == 0:
                self.deal.compare(items, "data")
            yield items

    def _step(self, items: list[Any], *, must_be_whole: bool = False) -> Step:
        count = num_rows(items[0]) if self.collate is None else len(items)
        size = self.deal.global_batch
        if must_be_whole and count != size:
            raise InputError(
                f"data yielded a batch of {count} samples but train.global_batch = {size}: an "
                "iterable must yield whole global batches (a DataLoader with drop_last=True)."
            )
        return [
            self.deal.placed(CustomMicroBatch(self._rows(items, part), part.stop - part.start))
            for part in self.deal.parts(count)
        ]

    def _rows(self, items: list[Any], part: slice) -> Any:
        """A micro-batch of a global one; of the first sample where it has none of its own."""
        rows = part if part.stop > part.start else slice(0, 1)
        return rows_of(items[0], rows) if self.collate is None else self.collate(items[rows])


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _as_tensors(data: Any) -> Any:
    """The data; one of Hugging Face's gives tensors where it would give Python's lists."""
    if not is_of_hf(data):
        return data
    form = getattr(data, "format", None) or {}  # an IterableDataset says none
    is_plain = form.get("type") is None and getattr(data, "_formatting", None) is None
    return data.with_format("torch") if is_plain else data
