"""The bubble benchmark: its arithmetic, then one short run. No time is asserted."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.pipeline_bubbles import (
    EQUAL,
    MICRO_BATCHES,
    PP,
    Case,
    Measured,
    SleepingStage,
    Sleeps,
    all_cases,
    rows,
    speedups,
    titles,
    verdict,
)
from benchmarks.tables import markdown
from paceline.config.schedule import DEMANDS
from tests.command_line import python

ROOT = Path(__file__).parents[1]
PROGRAM = ("-m", "benchmarks.pipeline_bubbles")


def _measured(name: str, step_s: float, micro_batches: int = 8) -> Measured:
    return Measured.of(Case(name, 4, micro_batches, EQUAL), [step_s, 9.0, 0.5])


def test_a_ranks_share_takes_the_same_in_every_schedule():
    for name in DEMANDS:
        case = Case(name, 4, 8, EQUAL)
        schedule = case.schedule()
        of_stage = case.of_stage(schedule)
        assert case.ideal_s() == pytest.approx(8 * 0.12)
        for actions in schedule.actions:
            times = dict(zip("FIW", of_stage, strict=True))
            times["B"] = times["I"] + times["W"]
            assert sum(times[action.kind] for action in actions) == pytest.approx(8 * 0.12)


def test_every_schedule_is_run_on_every_pipeline_that_takes_it():
    cases = all_cases(PP, MICRO_BATCHES, EQUAL)
    assert {(case.name, case.pp) for case in cases} == {(name, pp) for name in DEMANDS for pp in PP}
    refused = [
        case for case in cases if case.name == "interleaved" and case.micro_batches < case.pp
    ]
    assert not refused


def test_no_sleep_is_shorter_than_20_ms():
    for case in all_cases(PP, MICRO_BATCHES, EQUAL):
        assert min(case.of_stage(case.schedule())) >= 0.02


def test_a_cell_has_three_bubbles():
    assert _measured("1f1b", 1.4).cell() == "45.8 / 37.5 / 37.5"


def test_the_table_has_a_row_per_schedule_and_a_column_per_number_of_micro_batches():
    measured = [_measured("1f1b", 1.4), _measured("1f1b", 1.9, 12), _measured("zb_h1", 1.1)]
    lines = markdown(titles(measured), rows(measured), ["schedule"]).splitlines()
    assert lines[0] == "| pp | schedule | 8 micro-batches | 12 micro-batches |"
    assert lines[2].startswith("| 4 | 1f1b | 45.8 / 37.5 / 37.5 | 31.9 / ")
    assert lines[3] == "| 4 | zb_h1 | 14.6 / 12.5 / 12.5 |  |"


def test_zero_bubble_schedules_are_compared_with_1f1b_of_the_same_size():
    measured = [_measured("1f1b", 1.4), _measured("zb_h1", 1.12), _measured("zb_h1", 2.0, 16)]
    ((of, ratio, theory),) = speedups(measured)
    assert of is measured[1]
    assert ratio == pytest.approx(1.25)
    assert theory == pytest.approx(33 / 27)


def test_the_verdict_counts_what_is_far_from_theory():
    text = verdict([_measured("1f1b", 1.33), _measured("zb_h1", 1.2)])
    assert text[0].startswith("1 of 2 steps are within 5% ")
    assert "zb_h1 on 4 ranks with 8 micro-batches: +11.1%" in text[0]
    assert "fitted to the 1 steps of 1f1b alone: " in text[1]
    assert text[2].startswith("Of the 1 cases in which")
    assert "it is in 1: " in text[2]


def test_a_sleeping_stage_sleeps_for_each_of_its_gradients(monkeypatch):
    naps: list[float] = []
    monkeypatch.setattr("benchmarks.pipeline_bubbles.time.sleep", naps.append)
    stage = SleepingStage()
    stage.sleeps = Sleeps(1, 2, 3)
    x = torch.zeros(8, requires_grad=True)
    output = stage(x).sum()
    assert sum(naps) == 1
    torch.autograd.grad(output, [x], retain_graph=True)
    assert sum(naps) == 1 + 2
    torch.autograd.grad(output, [stage.weight])
    assert sum(naps) == 1 + 2 + 3


def test_a_quick_run_writes_its_results(tmp_path):
    done = python(*PROGRAM, "--quick", "--results", str(tmp_path), folder=ROOT)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*/pipeline_bubbles.json")
    result = json.loads(file.read_text())
    assert result["facts"]["versions"]["torch"] == torch.__version__
    ((title, figures),) = result["figures"].items()
    assert {figure["case"]["name"] for figure in figures} == set(DEMANDS)
    assert all(figure["step_s"] > figure["ideal_s"] for figure in figures)
    page = file.with_suffix(".md").read_text()
    assert title in page
    assert "| 2 | zbv |" in page
