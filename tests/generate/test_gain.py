"""Gain: as many tokens are guessed as pay, by made-up times."""

import pytest

from paceline.generate.gain import Acceptance, PassTimes, best_plan


def _plan(offers, num_texts=1, rows=None, room=100, row_s=0.0, guess_s=0.0):
    return best_plan(
        offers,
        num_texts,
        rows or num_texts,
        room,
        lambda rows: 1.0 + row_s * rows,
        lambda by_depth: guess_s * sum(by_depth),
    )


def test_where_rows_are_free_all_are_guessed():
    plan = _plan({"a": (0.5, 3), "b": (0.1, 2)}, num_texts=2)
    assert plan.counts == {"a": 3, "b": 2}
    assert plan.tokens_per_s == pytest.approx(2 + 0.5 + 0.25 + 0.125 + 0.1 + 0.01)


def test_a_guess_has_to_give_more_than_it_takes():
    # One text: a pass of 1.1 s gives a token. Guess k gives 0.8^k and takes 0.1 + 0.2 s.
    plan = _plan({"a": (0.8, 9)}, row_s=0.1, guess_s=0.2)

    def rate(num):
        return sum(0.8**k for k in range(num + 1)) / (1.1 + 0.3 * num)

    best = max(range(10), key=rate)
    assert plan.counts == {"a": best}
    assert 0 < best < 9
    assert plan.tokens_per_s == pytest.approx(rate(best))


def test_nothing_is_guessed_where_a_row_costs_as_much_as_a_token():
    offers = dict.fromkeys(range(64), (0.9, 4))
    full = best_plan(offers, 64, 64, 448, lambda rows: 0.01 * rows, lambda _: 0.0)
    assert full.counts == {}
    assert full.tokens_per_s == pytest.approx(100)
    assert _plan({"a": (0.9, 4)}, guess_s=1.0).counts == {}
    assert _plan({}).counts == {}


def test_the_likeliest_guesses_come_first_and_fit_into_the_room():
    offers = {"a": (0.9, 6), "b": (0.5, 6), "c": (0.01, 6)}
    assert _plan(offers, num_texts=3, room=4).counts == {"a": 4}
    assert _plan(offers, num_texts=3, room=0).counts == {}
    assert _plan(offers, num_texts=3, row_s=0.01).counts.keys() == {"a", "b"}


def test_acceptance_follows_what_was_seen():
    seen = Acceptance(0.5)
    assert seen.rate == 0.5
    for _ in range(50):
        seen.saw(4, 4)
    assert seen.rate > 0.99
    for _ in range(50):
        seen.saw(4, 1)  # right, wrong, and two that nobody asked about
    assert seen.rate == pytest.approx(0.5, abs=0.01)


def test_times_lie_on_a_line_between_those_that_were_measured():
    times = PassTimes({1: 1.0, 2: 1.0, 4: 3.0})
    assert [times(rows) for rows in (1, 2, 3, 4, 6)] == pytest.approx([1, 1, 2, 3, 5])
    flat = PassTimes({1: 2.0})
    assert flat(50) == pytest.approx(2.0)


def test_times_follow_the_machine():
    times = PassTimes({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7})
    for _ in range(100):
        times.took(4, 2.6)  # twice as slow by now, for any number of rows
    assert times(4) == pytest.approx(2.6, rel=0.01)
    assert 1.3 < times(1) < 2.6
    assert times(8) > times(4)
