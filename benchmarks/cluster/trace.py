"""The trace: which jobs come when, and when machines are taken away; the same for everybody."""

import random
from dataclasses import dataclass
from typing import Literal

NODES = 4
GRACE_S = 10
"""From the notice of a preemption to its end."""
STEP_S = 1.6
"""A step on one node; on n nodes it takes an n-th."""
GLOBAL_BATCH = 16
CHECKPOINT_S = 5.0
"""Between checkpoints: the time of their steps at the size that was asked for."""
_SHAPES = (4, 2, 1, 4, 2, 1, 2, 1)
_ARRIVE_WITHIN_S = 60.0
_MOST_TIMES = 4
"""Losses go on for who takes so many times as long."""


@dataclass(frozen=True)
class TracedJob:
    """A job of the trace."""

    name: str
    arrives_s: float
    num_nodes: int
    steps: int
    priority: int
    """0, or below: later than others."""

    @property
    def every(self) -> int:
        """Steps between checkpoints."""
        return max(1, round(CHECKPOINT_S * self.num_nodes / STEP_S))


@dataclass(frozen=True)
class Loss:
    """A machine is taken away: one that trains or is free. If all are away or start a job, the next
    that isn't."""

    at_s: float
    kind: Literal["preempted", "lost"]
    pick: float
    """Which of those: a share of their list."""
    holds_s: float
    """How long it is away."""


@dataclass(frozen=True)
class Trace:
    """What is drawn."""

    jobs: tuple[TracedJob, ...]
    losses: tuple[Loss, ...]


def draw(
    seed: int,
    num_losses: int,
    gap_s: float,
    away_s: tuple[float, float],
    node_seconds: float,
    lost_share: float,
) -> Trace:
    """A trace.

    Args:
        num_losses: that Paceline's jobs have to meet. They go on at the same rate until the work
            is done.
        gap_s: between losses, in the mean.
        away_s: for how long a node is taken away, from and to.
        node_seconds: of work, over all jobs, if nothing were lost.
        lost_share: of the losses, from 0 to 1, are lost nodes; the others are preemptions.
    """
    pick = random.Random(seed)
    shares = [pick.uniform(0.5, 1.5) for _ in _SHAPES]
    jobs = []
    for number, (num_nodes, share) in enumerate(zip(_SHAPES, shares, strict=True)):
        work_s = node_seconds * share / sum(shares)
        jobs.append(
            TracedJob(
                name=f"job-{number}",
                arrives_s=0.0 if number == 0 else pick.uniform(0, _ARRIVE_WITHIN_S),
                num_nodes=num_nodes,
                steps=max(1, round(work_s / STEP_S)),
                priority=pick.choice([0, 0, -1, -2]),
            )
        )
    at, losses = 0.0, []
    for _ in range(_MOST_TIMES * num_losses):
        at += pick.uniform(0.5, 1.5) * gap_s
        kind: Literal["preempted", "lost"] = "lost" if pick.random() < lost_share else "preempted"
        losses.append(Loss(at, kind, pick.random(), pick.uniform(*away_s)))
    return Trace(tuple(sorted(jobs, key=lambda job: job.arrives_s)), tuple(losses))
