"""Lines of steps whose results are read late, with the terms of profiled windows. Pure."""

from typing import Any

import pytest

from paceline.train.metrics_buffer import MetricsBuffer
from paceline.train.results import StepResult


def result_of_step() -> StepResult:
    return StepResult(
        loss=1.0,
        grad_norm=1.0,
        is_bad=False,
        stop_wanted=False,
        spike=0.0,
        comm={},
        ranks={},
        figures={},
    )


def written(lag: int) -> list[dict[str, Any]]:
    """The lines of six steps, of which 3 and 4 were profiled, where results come late by `lag`."""
    lines: list[dict[str, Any]] = []
    metrics_buffer = MetricsBuffer(lines.append, lag, most_bad_steps=3)
    for step in range(1, 7):
        result = result_of_step()
        line = {"step": step, "step_time_s": 9.0, "profiled": False, "terms": {}}
        metrics_buffer.add(line, lambda result=result: result)
        if step not in (2, 3):  # while a window is open, lines wait
            window = {3: {"matmul": 1.0}, 4: {"matmul": 2.0}}
            metrics_buffer.release(window if step == 4 else None)
    metrics_buffer.settle()
    return lines


@pytest.mark.parametrize("lag", [0, 1, 6])
def test_profiled_steps_keep_their_terms_however_late_they_are_read(lag: int) -> None:
    lines = written(lag)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line["profiled"]] == [3, 4]
    assert [line["step_time_s"] for line in lines][2:4] == [1.0, 2.0]


def test_a_rank_that_lost_the_one_that_writes_has_the_lines_that_waited_for_their_window() -> None:
    lost: list[dict[str, Any]] = []
    first = MetricsBuffer(lost.append, 0, most_bad_steps=3)
    for step in range(1, 10):
        first.add({"step": step}, result_of_step)
        if step < 4:  # then a window opens, or an evaluation begins
            first.release()
    lines: list[dict[str, Any]] = []
    second = MetricsBuffer(lines.append, 0, most_bad_steps=3)
    second.recent.extend(first.newest())
    second.write_missing(lambda: 3)
    assert [line["step"] for line in lines] == [4, 5, 6, 7, 8, 9]
