"""What tuning says of its result: no gain inside its own noise is called one. Pure."""

import math
from pathlib import Path

import pytest

from paceline.tune.loop import decision
from paceline.tune.narrative import paragraph
from paceline.tune.page import render
from paceline.tune.show import outcome_text, row
from paceline.tune.trial import Trial, TuningState
from tests.tune.jobs import job

GIVEN = job()


def known(share: float, half: float) -> TuningState:
    """Two trials: the Job as it was given, and one that takes so much of its step, ± half."""
    first = trial(0, {}, 0.0, 0.0)
    other = trial(1, {"layout.bucket_mib": 3.0}, math.log(share), half)
    return TuningState(GIVEN, (first, other))


def trial(number: int, changes: dict[str, float], relative: float, half: float) -> Trial:
    return Trial(
        number=number,
        heat=0,
        changes=changes,
        why="a test",
        predicted_s=0.1,
        expected_s=0.1,
        peak_bytes=1.0,
        outcome="measured",
        step_s=0.1,
        relative=relative,
        uncertainty=half,
    )


@pytest.mark.parametrize(("share", "half"), [(0.86, 0.17), (0.99, 0.02), (0.5, math.inf)])
def test_a_gain_inside_its_noise_is_no_gain(share: float, half: float, tmp_path: Path) -> None:
    found = known(share, half)
    text = paragraph(found)
    assert "times as fast" not in text
    assert "what it gave" not in text
    assert "No trial is faster than the Job as it was given beyond the noise" in text
    assert outcome_text(found, found.trials[1]) == "fastest, within the noise"
    assert "best" not in row(found, found.trials[1])
    assert "within the noise" in render(found, tmp_path)


def test_a_gain_beyond_its_noise_is_one(tmp_path: Path) -> None:
    found = known(0.86, 0.05)
    assert "1.16 times as fast" in paragraph(found)
    assert outcome_text(found, found.trials[1]) == "best"


def test_the_decision_after_a_heat_says_so_too() -> None:
    for half, word in ((0.17, "within the noise"), (0.05, "14.0% less")):
        after = known(0.86, half)
        before = TuningState(GIVEN, after.trials[:1])
        assert word in decision(before, after).text


def test_the_page_gives_no_gain_inside_its_noise(tmp_path: Path) -> None:
    assert "-14.0%" not in render(known(0.86, 0.17), tmp_path)
    assert "-14.0%" in render(known(0.86, 0.05), tmp_path)
