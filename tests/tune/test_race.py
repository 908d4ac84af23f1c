"""Who has another turn: pure."""

import random

import pytest

from paceline.tune.race import gap, leader, remaining_jobs, turn_seconds


def test_rounds_pair_what_is_compared():
    """A machine that is slow for a round is slow for all: the interval is that of the ratio."""
    slow_rounds = [1.0, 3.0, 1.1, 2.0]
    found = gap([1.1 * s for s in slow_rounds], slow_rounds)
    assert found.mean == pytest.approx(0.0953, abs=1e-3)
    assert found.half < 0.02
    assert found.is_slower
    assert not gap([1.0], [0.5]).is_slower  # one round proves nothing


def test_what_is_clearly_slower_leaves_and_what_is_not_stays():
    rounds = {0: [1.0, 1.01, 1.0], 1: [1.2, 1.22, 1.19], 2: [1.01, 0.99, 1.03]}
    assert leader(rounds) == 0
    assert remaining_jobs(rounds) == [0, 2]


def test_before_the_third_round_only_what_takes_twice_as_long_leaves():
    assert remaining_jobs({0: [1.0], 1: [1.8], 2: [2.3]}) == [0, 1]


def test_what_the_others_are_held_against_stays_for_three_rounds():
    assert remaining_jobs({0: [5.0], 1: [1.0]}) == [0, 1]
    assert remaining_jobs({0: [5.0, 5.1, 5.0], 1: [1.0, 1.0, 1.0]}) == []


def test_a_race_ends_when_nothing_is_left_to_decide():
    alike = {0: [1.0] * 3, 1: [1.0] * 3}
    assert remaining_jobs(alike) == [0, 1]  # within 1 %: not yet known that well
    noisy = {0: [1.0, 1.3, 0.9], 1: [1.1, 1.0, 1.2]}
    assert remaining_jobs(noisy) == [0, 1]
    assert remaining_jobs({job: times * 3 for job, times in noisy.items()}) == []


def test_a_turn_is_what_most_of_its_steps_took_undisturbed():
    assert turn_seconds([1.0, 1.1, 1.2, 9.0]) == 1.0
    assert turn_seconds([1.0, 1.1, 1.2, 1.3, 9.0, 9.0, 9.0, 9.0]) == 1.1
    assert turn_seconds([2.0]) == 2.0


def test_the_faster_of_two_wins_most_races_on_a_noisy_machine():
    draw, wins = random.Random(1), 0
    for _ in range(200):
        rounds: dict[int, list[float]] = {0: [], 1: []}
        live = [0, 1]
        while live:
            busy = draw.lognormvariate(0, 0.3)
            for job in live:
                rounds[job].append(busy * (1.0, 0.93)[job] * draw.lognormvariate(0, 0.03))
            live = remaining_jobs(rounds)
        wins += leader(rounds) == 1
    assert wins >= 190
