"""Ranks that share cores: what the curve says with a clock that knows (pure), then on two ranks."""

import numpy as np
import pytest

from paceline.bench.clock import Call, RankTimer
from paceline.bench.core_contention import measure_sharing, successive_spread
from paceline.comm.rendezvous import Ranks
from paceline.config.curves import SharingCurve
from tests.ranks import run_ranks


class Sharing(RankTimer):
    """Calls once, and says that four ranks take twice as long as one or two."""

    asked = 0

    def seconds(self, *calls: Call) -> float:
        for call in calls:
            call()
        of_round = type(self).asked % 3
        type(self).asked += 1
        machine = 1 + (type(self).asked - 1) // 3  # slower from round to round
        return machine * (2e-3 if of_round == 2 else 1e-3)

    def mean(self, value: float) -> float:
        return value

    most = mean


def test_the_pace_is_that_of_some_ranks_over_that_of_all_in_each_round():
    curve = measure_sharing(Sharing(Ranks(0, 4, 0, 4)), "a test")
    assert curve.num_ranks == (1, 2, 4)
    assert curve.pace == (pytest.approx(2.0), pytest.approx(2.0), 1.0)
    assert 0 < curve.spread <= 1


def test_the_spread_is_that_between_neighbours():
    drawn = 1 + 0.1 * np.random.default_rng(1).standard_normal(4000)
    assert successive_spread(drawn) == pytest.approx(0.1, rel=0.05)
    slower = np.repeat([1.0, 2.0, 1.5, 3.0], 1000)  # a machine that is slow for a while
    assert successive_spread(slower * drawn) == pytest.approx(0.1, rel=0.2)
    assert np.std(slower * drawn) / np.mean(slower) > 0.3
    assert successive_spread([2.0, 2.0, 2.0]) == 0


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(0, 4, 0, 2), Ranks(0, 2, 0, 2, "cuda")])
def test_nothing_is_measured_where_nothing_is_shared_or_several_machines_are(ranks: Ranks):
    assert measure_sharing(RankTimer(ranks), "a test") is None


def _measured(rank: int, world_size: int) -> SharingCurve | None:
    ranks = Ranks(rank, world_size, rank, world_size)
    return measure_sharing(RankTimer(ranks, block_s=1e-3, num_blocks=3), "a test")


def test_ranks_agree_on_what_they_measured():
    first, second = run_ranks(_measured, 2)
    assert first is not None
    assert first == second
    assert first.num_ranks == (1, 2)
    assert first.pace[-1] == 1
    assert 0.1 < first.pace[0] < 20
