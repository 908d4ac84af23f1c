"""benchmarks/sites.py: what its figures are of, from lines made up here."""

import pytest

from benchmarks.sites import EVERY, Ran, figures, page, steps_s

STEP_S, ROUND_S, ALONE_S = 0.2, 0.5, 0.4
LOSE, BACK, LAST = 6 * EVERY, 8 * EVERY, 12 * EVERY


def _lines(generations, step_s, round_s, began=0.0, loss=2.0):
    """Lines of (generation, first step, last step, seconds until its first step)."""
    now, lines = began, []
    for generation, first, last, still in generations:
        now += still
        for step in range(first, last + 1):
            now += step_s[generation] + (round_s[generation] if step % EVERY == 0 else 0.0)
            lines.append({"step": step, "generation": generation, "time": now, "loss": loss})
    lines[-1]["eval_loss"] = loss
    return lines


@pytest.fixture
def found():
    control = Ran(_lines([(1, 1, 4 * EVERY + 1, 0)], {1: STEP_S}, {1: 0.0}), [])
    spans = [(1, 1, LOSE, 0.0), (2, LOSE + 1, BACK, 3.0), (3, BACK + 1, LAST, 2.0)]
    seconds = {1: STEP_S, 2: ALONE_S, 3: STEP_S}
    lines = _lines(spans, seconds, {1: ROUND_S, 2: 0.0, 3: ROUND_S}, loss=2.01)
    events = [
        {"event": "generation", "generation": number, "num_active": 1 + number % 2}
        for number in (1, 2, 3)
    ]
    kill, start = lines[LOSE - 1]["time"] + 1, lines[LOSE + 20]["time"]
    struck = Ran(lines, [*events, {"event": "end"}], (7_000_000, 8_000_000), kill, start)
    return figures(Ran(_lines([(1, 1, 9, 0)], {1: 1.0}, {1: 0.0}), []), struck, [control, control])


def test_a_step_of_both_sites_has_its_share_of_a_round(found):
    assert found["control_s"] == pytest.approx((STEP_S,) * 3)
    assert found["alone_s"] == pytest.approx((ALONE_S,) * 3)
    assert found["together_s"] == pytest.approx((STEP_S + ROUND_S / EVERY,) * 3)
    assert found["kept"] == pytest.approx(STEP_S / (STEP_S + ROUND_S / EVERY))


def test_a_whole_run_counts_rounds_loss_and_return(found):
    num_alone, rounds = BACK - LOSE, (LOSE + LAST - BACK) // EVERY
    computing = num_alone * ALONE_S + (LAST - num_alone - 1) * STEP_S
    took = computing + rounds * ROUND_S + 3 + 2
    assert found["lost_steps"] == num_alone
    assert found["kept_of_the_run"] == pytest.approx(computing / took)
    assert found["until_next_step_s"] == pytest.approx(3 + ALONE_S - 1)
    assert found["stood_still_for_the_return_s"] == pytest.approx(2 + STEP_S)
    assert found["apart"] == pytest.approx(0.005)


def test_the_page_says_them(found):
    about = {
        "rate": "20mbit", "steps": LAST, "cores": 2, "device": "a core", "commit": "abc",
        "load_average_before": (0.5,), "date": "today", "versions": {"torch": "2"}, "command": "x",
    }  # fmt: skip
    text = page(found, about)
    assert "| apart | +0.50% |" in text
    assert "7.0 and 8.0" in text


def test_the_first_round_of_a_generation_is_left_out():
    lines = _lines([(1, 1, 2 * EVERY, 0)], {1: 1.0}, {1: 0.0})
    lines[0] = {**lines[0], "time": -50.0}
    assert steps_s(lines) == {1: pytest.approx([1.0])}
