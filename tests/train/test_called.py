"""A person's functions are given each step once, however often lost ranks' steps are done again."""

import pytest
from torch import nn

from paceline.comm.rendezvous import Ranks
from paceline.observe.run import Run
from paceline.train import session
from paceline.train.session import RunReporter
from paceline.train.task import LoopOptions, Task
from tests.elastic.cluster import job_of
from tests.train.own_elastic_script import loss


class _Called:
    """What a script's functions were given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []


@pytest.fixture
def called() -> _Called:
    return _Called()


@pytest.fixture
def first_rank(tmp_path, called, monkeypatch):
    """Makes the first rank of a new generation."""
    monkeypatch.setattr(session, "facts_of", lambda *_arguments: {})
    job = job_of(2, 40, 1)
    job = job.replace(observe=job.observe.replace(tensorboard=False))
    options = LoopOptions(
        on_step=lambda line: called.steps.append(line["step"]),
        on_eval=lambda line: called.evaluations.append(line["step"]),
    )
    task = Task(
        nn.Linear(1, 1), loss, lambda _first: iter(()), None, "samples", loop_options=options
    )
    (tmp_path / "run").mkdir()
    return lambda: RunReporter(job, Run(tmp_path / "run"), Ranks(), task, None)


def _line(step: int, *, evaluated: bool | None = None) -> dict:
    evaluated = step % 4 == 0 if evaluated is None else evaluated
    return {"step": step, "loss": 1.0} | ({"eval_loss": 1.0} if evaluated else {})


def test_steps_that_are_done_again_are_given_once(first_rank, called):
    # Each is lost after its last step; the next one goes on from an earlier state.
    for first, last in ((1, 10), (7, 8), (5, 6), (7, 13)):
        with first_rank() as reporter:
            for step in range(first, last + 1):
                reporter.record(_line(step))
    assert called.steps == [*range(1, 14)]
    assert called.evaluations == [4, 8, 12]


def test_an_evaluation_that_was_cut_is_given_when_it_is_made(first_rank, called):
    with first_rank() as reporter:
        for step in (1, 2, 3, 4):
            reporter.record(_line(step, evaluated=False))
    with first_rank() as reporter:
        reporter.record(_line(4))
        reporter.record(_line(5))
    assert (called.steps, called.evaluations) == ([1, 2, 3, 4, 5], [4])


def test_after_a_spike_the_steps_of_the_state_that_came_back_are_given(first_rank, called):
    with first_rank() as reporter:
        for step in (1, 2, 3, 4, 5, 3, 4):
            reporter.record(_line(step))
    with first_rank() as reporter:
        reporter.record(_line(5))
    assert called.steps == [1, 2, 3, 4, 5, 3, 4, 5]
    assert called.evaluations == [4, 4]


def test_a_damaged_mark_says_nothing(first_rank, called, tmp_path):
    (tmp_path / "run/called.json").write_text('{"step": -1}')
    with first_rank() as reporter:
        reporter.record(_line(1))
    assert called.steps == [1]
