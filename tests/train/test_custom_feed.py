"""Data that a person brings: every sample once in an epoch on any number of ranks, and the same
samples after a resume, whatever form it comes in."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.custom.feed import BatchPartition, feed_of
from tests.ranks import run_ranks

NUM, BATCH, MICRO = 24, 8, 2
NUM_STEPS = 7  # into the third epoch


class Numbered(Dataset):
    """Sample i holds i, and a number drawn at random as an augmentation would."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.rand(()) + random.random() + float(np.random.rand())
        return {"id": torch.tensor(index), "drawn": drawn.double()}


class Shuffling(Sampler[int]):
    """A person's own sampler, which draws from the global generators."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(NUM), NUM))

    def __len__(self) -> int:
        return NUM


class Forgetful(Shuffling):
    """Has a generator of its own that nobody can seed."""

    def __init__(self) -> None:
        self._chance = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self._chance.permutation(NUM).tolist())


class Streamed(IterableDataset):
    """Samples as they come, shuffled as they are read."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in np.random.permutation(NUM).tolist():
            yield Numbered()[index]


class ByRank(IterableDataset):
    """As a person splits a stream who knows of ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Numbered()[index] for index in range(self.rank, 2 * NUM, 2))


def _data(kind: str) -> Any:
    weights = torch.arange(1.0, NUM + 1)
    return {
        "dataset": Numbered,
        "loader": lambda: DataLoader(Numbered(), BATCH, shuffle=True),
        "loader with workers": lambda: DataLoader(Numbered(), BATCH, shuffle=True, num_workers=2),
        "loader in order": lambda: DataLoader(Numbered(), BATCH),
        "loader of a subset": lambda: DataLoader(Subset(Numbered(), range(NUM)), BATCH, True),
        "seeded loader": lambda: DataLoader(
            Numbered(), BATCH, shuffle=True, generator=torch.Generator()
        ),
        "sampler": lambda: DataLoader(Numbered(), BATCH, sampler=Shuffling()),
        "batch sampler": lambda: DataLoader(
            Numbered(), batch_sampler=_Whole(RandomSampler(range(NUM)), BATCH, False)
        ),
        "weighted": lambda: DataLoader(
            Numbered(), BATCH, sampler=WeightedRandomSampler(weights, NUM)
        ),
        "stream": Streamed,
        "loader of a stream": lambda: DataLoader(Streamed(), BATCH),
        "own loader": lambda: _OwnLoader(Numbered(), BATCH, shuffle=True),
    }[kind]()


class _Whole(BatchSampler):
    """Not torch's own, so it is run and not read."""


class _OwnLoader(DataLoader):
    """One whose batches are its own business."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


ONCE_IN_AN_EPOCH = [
    "dataset",
    "loader",
    "loader with workers",
    "loader in order",
    "loader of a subset",
    "seeded loader",
    "sampler",
    "batch sampler",
    "stream",
    "loader of a stream",
    "own loader",
]


def _seen(rank: int, world_size: int, kinds: list[str], first: int = 0) -> list[list[Any]]:
    """(id, drawn) of this rank's samples, step by step, of each kind of data."""
    return [_steps(_data(kind), Ranks(rank, world_size, rank, world_size), first) for kind in kinds]


def _steps(data: Any, ranks: Ranks, first: int = 0, **settings: Any) -> list[Any]:
    torch.manual_seed(100 + ranks.rank)
    random.seed(100 + ranks.rank)
    np.random.seed(100 + ranks.rank)
    feed = feed_of(data, BatchPartition(BATCH, MICRO, 0, ranks), None, None, **settings)
    got = []
    for step in islice(feed.steps(first), NUM_STEPS - first // BATCH):
        assert [part.num_samples for part in step] == [MICRO] * len(step)
        parts = [part.batch for part in step]
        ids, drawn = (torch.cat([part[key] for part in parts]) for key in ("id", "drawn"))
        got.append(list(zip(ids.tolist(), drawn.tolist(), strict=True)))
    return got


def test_two_ranks_see_every_sample_once_in_an_epoch_and_what_one_rank_sees():
    # Ranks of these tests may have no processes of their own.
    kinds = [kind for kind in (*ONCE_IN_AN_EPOCH, "weighted") if "workers" not in kind]
    of_ranks = run_ranks(_seen, 2, kinds)
    for kind, first, second, alone in zip(kinds, *of_ranks, _seen(0, 1, kinds), strict=True):
        both = [mine + other for mine, other in zip(first, second, strict=True)]
        assert both == alone, kind
        if kind != "weighted":
            for epoch in range(2):
                steps = both[epoch * NUM // BATCH : (epoch + 1) * NUM // BATCH]
                counts = Counter(number for step in steps for number, _ in step)
                assert counts == Counter(range(NUM)), kind


@pytest.mark.parametrize("kind", [*ONCE_IN_AN_EPOCH, "weighted"])
def test_from_any_step_on_the_samples_are_those_of_an_undisturbed_run(kind):
    """And what was drawn while they were read, as augmentations draw."""
    (whole,) = _seen(0, 1, [kind])
    for step in (1, 4):
        assert _seen(0, 1, [kind], step * BATCH) == [whole[step:]]


def test_epochs_are_shuffled_differently_where_a_loader_shuffles_and_not_where_it_does_not():
    shuffled, in_order = _seen(0, 1, ["loader", "loader in order"])
    ids = [[number for number, _ in step] for step in shuffled]
    assert ids[0] != ids[3]
    assert [number for step in in_order[:3] for number, _ in step] == list(range(NUM))


def test_workers_change_nothing():
    alone, helped = _seen(0, 1, ["loader", "loader with workers"])
    assert alone == helped


def test_what_reading_draws_leaves_the_generators_of_training_alone():
    feed = feed_of(Numbered(), BatchPartition(BATCH, MICRO, 0, Ranks()), None, None)
    for generate in (lambda: torch.rand(()).item(), random.random, np.random.rand):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        undisturbed = generate()
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        list(islice(feed.steps(0), 2))
        assert generate() == undisturbed


def _refusal(rank: int, world_size: int, kind: str) -> str:
    ranks = Ranks(rank, world_size, rank, world_size)
    data = {
        "by rank": lambda: DataLoader(ByRank(rank), BATCH),
        "another sampler": lambda: DataLoader(
            Numbered(), BATCH, sampler=[*range(rank, NUM), *range(rank)]
        ),
    }[kind]()
    try:
        _steps(data, ranks)
    except InputError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("kind", ["by rank", "another sampler"])
def test_data_that_differs_from_rank_to_rank_is_refused(kind):
    for sentence in run_ranks(_refusal, 2, kind):
        assert "differs from rank to rank" in sentence


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (DataLoader(Numbered(), BATCH, sampler=Forgetful()), "another order each time"),
        (
            DataLoader(Numbered(), BATCH, sampler=DistributedSampler(Numbered(), 2, 0)),
            "DistributedSampler deals samples out",
        ),
        (
            DataLoader(Numbered(), batch_sampler=_Whole(SequentialSampler(range(NUM)), 5, False)),
            "a batch of 5 samples but train.global_batch = 8",
        ),
        ({"x": torch.zeros(24)}, "data is a dict"),
        (7, "data is a int"),
        ([torch.zeros(index) for index in range(NUM)], "give paceline.train"),
    ],
    ids=["forgetful", "distributed", "batch sampler", "dict", "number", "lengths"],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(data, sentence):
    with pytest.raises(InputError, match=sentence):
        _steps(data, Ranks())


class Pair(NamedTuple):
    id: Any
    drawn: Any


@dataclass
class Record:
    id: Any
    drawn: Any


@pytest.mark.parametrize("make", [Pair, Record, lambda *both: both])
def test_samples_of_any_form_are_stacked_in_it(make):
    data = [make(index, {"text": str(index), "x": torch.full((2,), index)}) for index in range(NUM)]
    feed = feed_of(data, BatchPartition(BATCH, MICRO, 0, Ranks()), None, None)
    batch = next(feed.steps(0))[0].batch
    ids, rest = (batch.id, batch.drawn) if hasattr(batch, "id") else batch
    if make in (Pair, Record):
        assert type(batch) is make
    assert torch.equal(rest["x"], torch.stack([ids, ids], dim=1))
    assert rest["text"] == [str(number) for number in ids.tolist()]


def test_lengths_may_differ_with_a_collate_function():
    data = [torch.ones(1 + index % 5) for index in range(NUM)]
    deal = BatchPartition(BATCH, BATCH, 0, Ranks())
    (part,) = next(feed_of(data, deal, lambda some: pad_sequence(some, True), None).steps(0))
    assert part.batch.shape == (BATCH, 5)


def test_columns_of_a_global_batch_are_cut_with_its_tensors():
    batch = {"x": np.arange(BATCH), "text": [str(n) for n in range(BATCH)], "scale": torch.ones(())}
    feed = feed_of(iter([batch] * 2), BatchPartition(BATCH, 3, 0, Ranks()), None, None)
    parts = [part.batch for part in next(feed.steps(0))]
    assert [part["text"] for part in parts] == [list("012"), list("345"), list("67")]
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_tensor_that_is_no_column_is_refused():
    batch = {"x": torch.zeros(BATCH, 2), "positions": torch.arange(5)}
    with pytest.raises(InputError, match=r"a tensor of shape \(5,\)"):
        next(feed_of(iter([batch]), BatchPartition(BATCH, 3, 0, Ranks()), None, None).steps(0))


def test_a_hugging_face_dataset_works_as_it_is():
    datasets = pytest.importorskip("datasets")
    columns = {"id": list(range(NUM)), "x": [[i, i + 1] for i in range(NUM)], "text": ["t"] * NUM}
    data = datasets.Dataset.from_dict(columns)
    for given in (data, DataLoader(data, BATCH, shuffle=True), data.to_iterable_dataset()):
        feed = feed_of(given, BatchPartition(BATCH, MICRO, 0, Ranks()), None, None)
        got = [part.batch for step in islice(feed.steps(0), 3) for part in step]
        assert sorted(number for part in got for number in part["id"].tolist()) == list(range(NUM))
        assert got[0]["x"].shape == (MICRO, 2)
        assert got[0]["text"] == ["t"] * MICRO


def _held_out(rank: int, world_size: int, count: int) -> list[Any]:
    deal = BatchPartition(BATCH, MICRO, 0, Ranks(rank, world_size, rank, world_size))
    data = [torch.tensor(index) for index in range(count)]
    forms = [data, DataLoader(data, 5), _batches_of(data)]
    return [
        [
            [(part.batch.tolist()[: part.num_samples], len(part.batch)) for part in step]
            for step in feed_of(each, deal, None, None).once()
        ]
        for each in forms
    ]


def _batches_of(data: list[Tensor]) -> Any:
    return [torch.stack(data[at : at + BATCH]) for at in range(0, len(data), BATCH)].__iter__()


@pytest.mark.parametrize("count", [1, 3, 8, 13])
def test_an_evaluation_reads_every_sample_once_and_as_many_parts_on_every_rank(count):
    for first, second in zip(*run_ranks(_held_out, 2, count), strict=True):
        assert [len(step) for step in first] == [len(step) for step in second]
        parts = [part for step in (*first, *second) for part in step]
        assert sorted(number for ids, _ in parts for number in ids) == list(range(count))
        assert all(num_rows for _, num_rows in parts)
