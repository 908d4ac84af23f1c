"""How the cores of a host are shared out: the arithmetic, then ranks bound to a core."""

import os

import pytest

from paceline.comm.core_share import CoreShare, core_share_of, share_cores
from paceline.comm.rendezvous import Ranks
from tests.ranks import run_ranks

TWO = frozenset({0, 1})
ALL = frozenset(range(64))


@pytest.mark.parametrize(
    ("mine", "neighbours", "quota", "of_host", "wanted"),
    [
        (TWO, [TWO], None, 2, CoreShare(1, 2, 2, 2)),
        (TWO, [TWO] * 2, None, 2, CoreShare(2, 2, 1, 2)),
        (TWO, [TWO] * 4, None, 2, CoreShare(4, 2, 1, 2)),  # never less than a thread
        (frozenset({0}), [frozenset({0})] * 2, None, 8, CoreShare(2, 1, 1, 8)),
        (frozenset(range(8)), [frozenset(range(8)), frozenset(range(8, 16))], None, 16,
         CoreShare(2, 16, 8, 16)),
        (ALL, [ALL] * 8, 16, 64, CoreShare(8, 16, 2, 16)),  # a container's limit
        (ALL, [ALL] * 2, None, 32, CoreShare(2, 64, 32, 64)),  # hot-plugged since
    ],
)  # fmt: skip
def test_a_core_that_several_ranks_may_use_counts_in_part(mine, neighbours, quota, of_host, wanted):
    assert share_cores(mine, neighbours, quota, of_host) == wanted


def test_a_rank_that_is_not_connected_supposes_that_its_neighbours_are_bound_as_it_is():
    alone = core_share_of(Ranks())
    beside = core_share_of(Ranks(0, 2, 0, 2))
    assert beside.together == alone.together
    assert beside.own == max(1, alone.own // 2)


def bound(rank, world_size):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return core_share_of(Ranks(rank, world_size, rank, world_size))


def test_ranks_bound_to_the_same_core_know_it():
    for cores in run_ranks(bound, 2):
        assert cores == CoreShare(2, 1, 1, len(os.sched_getaffinity(1)))
