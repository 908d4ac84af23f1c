"""How the cores of a host are shared out: the arithmetic, then ranks bound to a core."""

import os

import pytest

from paceline.comm.cores import Cores, cores_of, shared
from paceline.comm.ranks import Ranks
from tests.ranks import run_ranks

TWO = frozenset({0, 1})
ALL = frozenset(range(64))


@pytest.mark.parametrize(
    ("mine", "neighbours", "quota", "of_host", "wanted"),
    [
        (TWO, [TWO], None, 2, Cores(1, 2, 2, 2)),
        (TWO, [TWO] * 2, None, 2, Cores(2, 2, 1, 2)),
        (TWO, [TWO] * 4, None, 2, Cores(4, 2, 1, 2)),  # never less than a thread
        (frozenset({0}), [frozenset({0})] * 2, None, 8, Cores(2, 1, 1, 8)),
        (frozenset(range(8)), [frozenset(range(8)), frozenset(range(8, 16))], None, 16,
         Cores(2, 16, 8, 16)),
        (ALL, [ALL] * 8, 16, 64, Cores(8, 16, 2, 16)),  # a container's limit is nobody's mistake
        (ALL, [ALL] * 2, None, 32, Cores(2, 64, 32, 64)),  # hot-plugged since
    ],
)  # fmt: skip
def test_a_core_that_several_ranks_may_use_counts_in_part(mine, neighbours, quota, of_host, wanted):
    assert shared(mine, neighbours, quota, of_host) == wanted


def test_a_rank_that_is_not_connected_supposes_that_its_neighbours_are_bound_as_it_is():
    alone = cores_of(Ranks())
    beside = cores_of(Ranks(0, 2, 0, 2))
    assert beside.together == alone.together
    assert beside.own == max(1, alone.own // 2)


def bound(rank, world_size):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return cores_of(Ranks(rank, world_size, rank, world_size))


def test_ranks_bound_to_the_same_core_know_it():
    for cores in run_ranks(bound, 2):
        assert cores == Cores(2, 1, 1, len(os.sched_getaffinity(1)))
