"""Copies of the state in other nodes' memory: what is sent, what is left after a loss, regions."""

import itertools

import pytest
import torch

from paceline.train.checkpoint.buddies import buddy_of, rows_to_send
from paceline.train.checkpoint.held import Row
from paceline.train.checkpoint.regions import Region
from tests.ranks import run_ranks
from tests.train import memory_cases as cases


@pytest.fixture(scope="module")
def seen():
    return run_ranks(cases.copy_and_lose, 3)


def test_the_last_two_copies_are_kept_on_both_sides(seen):
    for rank in seen:
        assert rank["held"] == [("buddy", 2), ("buddy", 3), ("own", 2), ("own", 3)]
        assert rank["whole"] == 3


def test_only_what_no_other_node_holds_is_sent(seen):
    assert [rank["sent"] for rank in seen] == [2 * 2 * 4] * 3  # its rows of w, nothing of b


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one lost", (3, "buddy")),
        ("its copy is damaged", (2, "buddy")),
        ("its own copy is damaged", (3, "buddy")),
        ("two lost", None),
        ("one step apart", (3, "own")),
        ("parted", (2, "own")),
        ("nothing", None),
        ("interrupted", (3, "buddy")),
        ("stays broken", 0.0),
    ],
)
def test_the_newest_whole_step_is_found(case, expected, seen):
    assert [rank[case] for rank in seen] == [expected] * 3


def test_the_interval_counts_all_that_a_copy_takes():
    chosen = run_ranks(cases.choose_intervals, 2)
    for what in ("preparing", "the thread"):
        (every, _), (other, _) = (rank[what] for rank in chosen)
        assert every == other
        # At most 1 % of a step, which here is no longer than from one copy to the one after next.
        assert every >= cases.COPY_S / (0.01 * 2 * max(rank[what][1] for rank in chosen))


def test_a_buddy_is_on_another_node():
    assert [buddy_of([0, 0, 1, 1], rank) for rank in range(4)] == [2, 3, 0, 1]
    assert [buddy_of([0, 0, 0], rank) for rank in range(3)] == [1, 2, 0]
    nodes = [0, 0, 0, 1, 2, 2]
    buddies = [buddy_of(nodes, rank) for rank in range(6)]
    assert buddies == [3, 3, 3, 4, 0, 1]
    assert all(nodes[rank] != nodes[buddy] for rank, buddy in enumerate(buddies))


def test_replicas_on_another_node_need_no_copy():
    halves = [Region((0,), (2,)), Region((2,), (2,))]
    rows = [
        [Row("w", "F32", (4,), half), Row("rng.0", "U8", (1,), Region.whole((1,)))]
        for half in halves
    ]
    assert rows_to_send([*rows, *rows], [0, 0, 1, 1], 0) == []
    assert rows_to_send([*rows, *rows], [0, 0, 0, 0], 0) == []  # one node: another rank has it
    assert rows_to_send(rows, [0, 1], 0) == [0]
    assert rows_to_send([*rows, *rows], [0, 1, 0, 1], 1) == [0]  # both replicas on one node


@pytest.mark.parametrize("seed", range(20))
def test_regions_are_taken_apart_without_loss(seed):
    generator = torch.Generator().manual_seed(seed)

    def drawn(shape):
        starts = [int(torch.randint(0, n, (), generator=generator)) for n in shape]
        sizes = [
            int(torch.randint(1, n - at + 1, (), generator=generator))
            for n, at in zip(shape, starts, strict=True)
        ]
        return Region(tuple(starts), tuple(sizes))

    shape = (5, 4, 3)
    whole, one, other = Region.whole(shape), drawn(shape), drawn(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for part in one.without(other):
        count[part.within(whole)] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[one.within(whole)] = 1
    expected[other.within(whole)] = 0
    assert torch.equal(count, expected)
    assert one.is_covered([*one.without(other), other])
    assert one.is_covered([other]) == (not one.without(other))
    parts = list(one.rows(4))
    assert sum(part.numel for part in parts) == one.numel
    assert all(a.overlap(b) is None for a, b in itertools.combinations(parts, 2))
