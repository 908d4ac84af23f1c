"""Clocks of ranks, matching collectives and the critical path, on made-up ranks (pure)."""

import numpy as np
import pytest

from paceline.observe.account import COLLECTIVE
from paceline.observe.accounting import Owners
from paceline.observe.clocks import SAME, UNKNOWN, ClockOffset, align
from paceline.observe.critical_path import critical_path
from paceline.observe.meetings import MEETING, arrivals, match
from paceline.observe.terms import TERM_ID, TERMS
from paceline.observe.timeline import STEP

MS = 1_000_000
NAMES = ("all_reduce", "[0, 1]", "broadcast", "[0, 1, 2]", "[1, 2]")


def meetings_of(shifts_ns, count=40, seed=0, drift=0.0):
    """Collectives of ranks whose clocks are late by `shifts_ns`: they come when they can, and
    leave together but for some scheduling."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in range(count):
        began = n * 50 * MS + rng.integers(0, 20 * MS, len(shifts_ns))
        end = began.max() + rng.integers(1 * MS, 3 * MS)
        for rank, shift in enumerate(shifts_ns):
            clock = 1 + drift * rank
            left = end + rng.integers(0, MS // 2)
            times = int(began[rank] * clock) - shift, int(left * clock) - shift
            rows.append((n * len(shifts_ns) + rank, rank, 0, n, *times))
    return np.array(rows, MEETING)


@pytest.mark.parametrize("shift", [0, 3 * MS, -800 * MS, 5_000 * MS])
@pytest.mark.parametrize("drift", [0.0, 1e-5])
def test_clocks_are_brought_together_by_what_ranks_did_together(shift, drift):
    shifts = [0, shift, 2 * shift]
    clocks = align(meetings_of(shifts, drift=drift), dict.fromkeys(range(3)))
    for rank, truth in enumerate(shifts):
        found = clocks[rank]
        assert found.offset_ns == pytest.approx(truth, abs=MS // 4)
        assert abs(found.offset_ns - truth) <= found.uncertainty_ns < 5 * MS or rank == 0


def test_collectives_that_were_taken_for_one_another_are_outvoted():
    meetings = meetings_of([0, 30 * MS])
    wrong = meetings["rank"] == 1
    wrong &= meetings["meeting"] % 8 == 0
    meetings["start_ns"][wrong] += 400 * MS
    meetings["end_ns"][wrong] += 400 * MS
    found = align(meetings, {0: "a", 1: "b"})[1]
    assert found.offset_ns == pytest.approx(30 * MS, abs=MS // 4)


def test_ranks_of_one_host_share_a_clock_unless_that_cannot_be():
    assert align(meetings_of([0, 0]), {0: "a", 1: "a"}) == {0: SAME, 1: SAME}
    # Two containers may have the same name, and clocks of their own.
    found = align(meetings_of([0, 900 * MS]), {0: "a", 1: "a"})[1]
    assert found.offset_ns == pytest.approx(900 * MS, abs=MS // 4)


def test_a_rank_that_met_nobody_keeps_its_clock():
    none = np.empty(0, MEETING)
    assert align(none, {2: None, 5: None}) == {2: SAME, 5: UNKNOWN}
    assert align(none, {4: None}) == {4: ClockOffset(0, 0)}


def test_a_rank_is_reached_through_another():
    meetings = meetings_of([0, 7 * MS, 9 * MS])
    odd = meetings["meeting"] % 2 == 1
    kept = np.where(odd, meetings["rank"] != 0, meetings["rank"] != 2)
    clocks = align(meetings[kept], dict.fromkeys(range(3)))
    assert clocks[2].offset_ns == pytest.approx(9 * MS, abs=MS // 2)
    assert clocks[2].uncertainty_ns > clocks[1].uncertainty_ns


def collective(rank, start, end, members=1, name=0, step=0):
    row = np.zeros(1, COLLECTIVE)
    row["rank"], row["step"], row["name"], row["members"] = rank, step, name, members
    row["start_ns"], row["duration_ns"] = start, end - start
    return row


def test_the_nth_collective_of_a_group_is_one_for_all_of_its_ranks():
    table = np.concatenate(
        [
            collective(0, 0, 10),
            collective(0, 20, 30),
            collective(0, 40, 50, members=-1),  # whose?
            collective(0, 60, 70, name=2),  # one rank may leave a broadcast before another comes
            collective(1, 25, 30),
            collective(1, 5, 10),
            collective(1, 60, 70, name=2),
            collective(1, 80, 90, members=4),
            collective(2, 85, 95, members=4),
            collective(2, 85, 95, members=3),  # the others of this group weren't recorded
            collective(1, 5, 10, step=1),
        ]
    )
    found = match(table, NAMES)
    pairs = {}
    for row in found:
        pairs.setdefault(int(row["meeting"]), []).append((int(row["rank"]), int(row["start_ns"])))
    assert sorted(sorted(pair) for pair in pairs.values()) == [
        [(0, 0), (1, 5)],
        [(0, 20), (1, 25)],
        [(1, 80), (2, 85)],
    ]
    when, who = arrivals(found)
    assert [when[found["row"] == row][0] for row in (0, 1, 4, 5, 7)] == [5, 25, 25, 5, 85]
    assert [who[found["row"] == row][0] for row in (0, 1, 4, 5, 7)] == [1, 1, 1, 1, 2]


def test_the_critical_path_changes_ranks_where_one_waited_for_another():
    # Rank 0 computes 30 and waits until 70 for rank 1, which computes all the time. Both send
    # until 80. Then rank 1 waits until 95 for rank 0, which computes; both send until 100.
    matmul, wait = TERM_ID["matmul"], TERM_ID["straggler_wait"]
    send = TERM_ID["exposed_comm.dp"]
    lines = {
        0: Owners(
            np.array([0, 30, 70, 80, 95, 100]), np.array([matmul, wait, send, matmul, send, 17])
        ),
        1: Owners(np.array([0, 70, 80, 95, 100]), np.array([matmul, send, wait, send, 17])),
    }
    steps = np.array([(0, 3, 0, 100), (1, 3, 0, 100)], STEP)
    waits = np.array([(0, 0, 3, 0, 30, 70), (1, 1, 3, 1, 80, 95)], MEETING)
    path = critical_path(steps, lines, waits, np.array([1, 0]))
    found = {(int(row["rank"]), TERMS[row["term"]]): int(row["duration_ns"]) for row in path}
    # The first rank of the two that end last stands for the end.
    assert found == {
        (0, "exposed_comm.dp"): 10 + 5,
        (0, "matmul"): 15,
        (1, "matmul"): 70,
    }
    assert set(path["step"]) == {3}
