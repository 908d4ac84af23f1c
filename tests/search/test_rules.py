"""Rules on fronts that are known, and the moves of halving."""

import random

import pytest

from paceline.search.halving import Halving, RungResult, Trial
from paceline.search.rules import cheapest, dominates, fronts, hypervolume, knee, ranking

# Loss and cost: the first four are the front, the knee is the third.
FOUND = [(4.0, 1.0), (3.5, 2.0), (2.2, 3.0), (2.0, 9.0), (4.0, 2.0), (2.5, 4.0), (5.0, 5.0)]


def test_the_front_is_what_nothing_dominates():
    first, second, third = fronts(FOUND)
    assert sorted(first) == [0, 1, 2, 3]
    assert sorted(second) == [4, 5]
    assert third == [6]
    for at in first:
        assert not any(dominates(other, FOUND[at]) for other in FOUND)


def test_a_ranking_begins_with_the_ends_of_the_front():
    assert set(ranking(FOUND)[:2]) == {0, 3}
    assert ranking([(3.0,), (1.0,), (2.0,)]) == [1, 2, 0]
    assert ranking([]) == []


def test_equal_trials_share_a_front():
    assert fronts([(1.0, 2.0), (1.0, 2.0)]) == [[0, 1]]


def test_the_knee_gives_up_least():
    assert knee(FOUND[:4]) == 2
    assert knee([(1.0, 1.0)]) == 0
    assert knee([(1.0, 2.0, 9.0), (1.1, 2.1, 1.0), (3.0, 1.0, 5.0)]) == 1


def test_the_cheapest_within_a_limit():
    assert cheapest(FOUND, 0, 2.6, 1) == 2
    assert cheapest(FOUND, 0, 4.0, 1) == 0
    assert cheapest(FOUND, 0, 1.0, 1) is None


def test_the_hypervolume_is_the_area_that_is_dominated():
    assert hypervolume([(1.0, 1.0)], (3.0, 2.0)) == pytest.approx(2.0)
    assert hypervolume([(1.0, 2.0), (2.0, 1.0), (2.5, 2.5)], (3.0, 3.0)) == pytest.approx(3.0)
    assert hypervolume([(4.0, 0.0)], (3.0, 3.0)) == 0.0


# ---- halving -------------------------------------------------------------------------------------

HALVING = Halving((1, 3, 9), 3, ("loss",))


def trial(number: int, *losses: float | None, cost_s: float = 1.0) -> Trial:
    return Trial(number, {}, {}, cost_s, tuple(map(RungResult, losses)))


def test_the_best_goes_on_and_one_trial_in_three():
    trials = [trial(1, 3.0)]
    assert HALVING.promotion(trials, 1e9) == trials[0]  # the only one is the best
    trials = [trial(1, 3.0, 2.9), trial(2, 1.0)]
    assert HALVING.promotion(trials, 20.0) == trials[0]
    assert HALVING.promotion(trials, 2.0) == trials[1]
    trials = [trial(1, 1.0, 0.9, 0.8), trial(2, 3.0), trial(3, 2.0)]
    assert HALVING.promotion(trials, 1e9) is None
    trials += [trial(at, 3.0 + at) for at in range(4, 7)]
    assert HALVING.promotion(trials, 1e9) == trials[2]  # two of six


def test_a_higher_rung_goes_first():
    trials = [trial(at, 1.0 + at, 0.5 + at) for at in range(1, 4)]
    trials += [trial(at, 0.1 * at) for at in range(4, 10)]
    assert HALVING.promotion(trials, 1e9).number == 1
    assert HALVING.promotion(trials, 5.0).number == 4  # six steps more are too dear


def test_a_failed_trial_never_goes_on():
    trials = [trial(1, None), trial(2, 2.0), trial(3, 3.0), trial(4, 4.0)]
    assert HALVING.promotion(trials, 1e9).number == 2
    assert HALVING.promotion([trial(1, None)], 1e9) is None
    assert HALVING.promotion([trial(1, None), trial(2, 2.0, None)], 1e9) is None


def test_what_is_left_finishes_the_best():
    trials = [trial(1, 3.0), trial(2, 1.0)]
    assert HALVING.reserve(trials) == 8.0
    assert HALVING.last_promotion(trials, 7.9) is None
    assert HALVING.last_promotion(trials, 8.0).number == 2
    assert HALVING.reserve([trial(1, 3.0, 2.0, 1.0)]) == 0.0


def test_budgets_are_kept_and_spent():
    """Any costs: what is spent stays within, and where one trial fits one is finished."""
    for seed in range(50):
        pick = random.Random(seed)
        left, trials = pick.uniform(10, 300), []
        while True:
            one = HALVING.promotion(trials, left)
            new = trial(len(trials) + 1, cost_s=pick.uniform(0.2, 1.0))
            if one is None and HALVING.cost(new, 0) + HALVING.reserve(trials) <= left:
                one = new
                trials.append(new)
            one = one or HALVING.last_promotion(trials, left)
            if one is None:
                break
            left -= HALVING.cost(one, len(one.results))
            trials[one.number - 1] = one.with_result(RungResult(pick.random()))
        assert left >= -1e-9
        assert HALVING.finished(trials)
