"""Step: seconds of real training steps, many Jobs in one start of ranks.

How it works: every Job becomes a Trainer on samples that nobody has to read, all of them alive at
once, and rounds of a few steps each go over all Jobs in turn, so that a machine that is slower for
a while is so for all of them. A step is timed as the loop times it, from the end of the step before
to the reading of its loss; the figure is the median over all rounds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.kernels import switch
from paceline.train.families import task_without_data
from paceline.train.task import Step, Task
from paceline.train.trainer import Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredStep:
    """A Job and what its step really took."""

    job: Job
    steps_s: tuple[float, ...]
    """Of each timed step; ranks agree on the end of a step, so rank 0's."""

    @property
    def step_s(self) -> float:
        """Median of the steps."""
        return median(self.steps_s)


@dataclass(frozen=True)
class PreparedJob:
    """A Trainer with its batch."""

    job: Job
    trainer: Trainer
    batch: Step


def measure_jobs(
    ranks: Ranks, jobs: Sequence[Job], *, num_rounds: int, steps_per_round: int, say: Say
) -> list[MeasuredStep]:
    """Time steps of these Jobs; every rank must call it.

    Args:
        ranks: this process's place; each Job is for as many.
        jobs: concrete.
        num_rounds: how often each Job has its turn.
        steps_per_round: timed steps of a turn, after an untimed one.
        say: called after each Job's set-up and after each of its turns.
    """
    ready = []
    for job in jobs:
        task = task_without_data(job, ranks)
        ready.append(prepared(job, ranks, task, next(task.steps_from(0))))
        say(f"{job.name}: set up")
    times: dict[int, list[float]] = {index: [] for index in range(len(ready))}
    for _ in range(num_rounds):
        for index, each in enumerate(ready):
            times[index] += _turn(each, steps_per_round)
            say(f"{each.job.name}: {median(times[index]) * 1e3:.1f} ms")
    return [MeasuredStep(each.job, tuple(times[index])) for index, each in enumerate(ready)]


def num_measurements(num_jobs: int, num_rounds: int) -> int:
    """How many times `measure_jobs` will speak."""
    return num_jobs * (1 + num_rounds)


def prepared(job: Job, ranks: Ranks, task: Task, batch: Step) -> PreparedJob:
    """A Trainer that has done its first step, which allocates optimizer state and buffers."""
    torch.manual_seed(job.train.seed)
    trainer = Trainer.of(job, ranks, task)
    trainer.step(0, batch)()
    return PreparedJob(job, trainer, batch)


def _turn(ready: PreparedJob, num_steps: int) -> list[float]:
    switch.use(ready.job.layout.kernels, ready.trainer.ranks.device)  # of the process, not a Job's
    ready.trainer.step(2, ready.batch)()
    times = []
    began = time.perf_counter()
    for _ in range(num_steps):
        ready.trainer.step(2, ready.batch)()
        ended = time.perf_counter()
        times.append(ended - began)
        began = ended
    return times
