"""When each action of a pipeline schedule runs where ranks share cores.

A rank that waits leaves its cores, its caches and its part of the memory's bandwidth to the others
of its machine. So an action isn't over after fixed seconds: it goes on at a pace that depends on
how many ranks compute at the moment (processor sharing, as queueing theory has it: Kleinrock 1967,
https://doi.org/10.1145/321386.321388). From one start or end of an action to the next the paces
stay as they are; the execution goes from each such event to the next one.

Passes of one length scatter on such a machine: a rank that is a little late is waited for by those
after it, and what it saves by being early is lost. `scatter_wait_s` says what that adds: it goes
through the list with passes drawn at random.

Beyond that the rules are those of `paceline.plan.schedules.timing`, to which this comes down where
the pace is always 1. It is slower by an order, and meant for ranks on CPUs, of which there are few.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from paceline.config.schedule import Action, Schedule
from paceline.plan.schedules.timing import (
    Product,
    StageCost,
    Timed,
    check_complete,
    dependencies,
    schedule_end_s,
)

Stretches = Sequence[Sequence[float]]
"""By rank and action, in their order: by what the action's cost is multiplied."""
_Running = dict[int, float]
"""By rank, what is left of its action: seconds at pace 1."""

# As many executions as have about so many actions, within bounds.
_ACTIONS_DRAWN = 400
_LEAST_PAIRS, _MOST_PAIRS = 1, 6


class CoreContention(NamedTuple):
    """Ranks of a pipeline that share a machine, and how fast they are."""

    num_ranks: int
    """Neighbours in the pipeline that are on one machine."""
    pace: tuple[float, ...]
    """Of each rank while 1, 2, ... of them compute; costs are those at pace 1."""
    spread: float = 0.0
    """Of equal passes: standard deviation over the mean."""


def shared_timeline(
    schedule: Schedule,
    cost: StageCost,
    contention: CoreContention,
    stretches: Stretches | None = None,
) -> list[list[Timed]]:
    """Per rank, its actions with their times. Raises ValueError where the ranks deadlock."""
    run = _ContendedExecution(schedule, cost, contention, stretches)
    while run.advance():
        pass
    check_complete(schedule, [len(row) for row in run.rows])
    return run.rows


def scatter_wait_s(schedule: Schedule, cost: StageCost, contention: CoreContention) -> float:
    """Seconds that the scatter of passes adds to the execution, on average; 0 where they don't.

    Draws come in pairs, of which one is late where the other one is early, so that few are enough;
    they are the same at every call.
    """
    if not contention.spread:
        return 0.0
    sizes = [len(actions) for actions in schedule.actions]
    pairs = max(_LEAST_PAIRS, min(_MOST_PAIRS, _ACTIONS_DRAWN // (2 * sum(sizes))))
    generator = np.random.default_rng(0)
    sigma = float(np.sqrt(np.log1p(contention.spread**2)))  # of logarithms, which scatter normally
    ends = []
    for _ in range(pairs):
        normal = [generator.standard_normal(size) for size in sizes]
        for sign in (1, -1):
            stretches = [np.exp(sign * sigma * z - sigma**2 / 2).tolist() for z in normal]
            ends.append(schedule_end_s(shared_timeline(schedule, cost, contention, stretches)))
    return max(0.0, fmean(ends) - schedule_end_s(shared_timeline(schedule, cost, contention)))


class _ContendedExecution:
    """An execution under way."""

    def __init__(
        self,
        schedule: Schedule,
        cost: StageCost,
        contention: CoreContention,
        stretches: Stretches | None,
    ) -> None:
        self._schedule, self._cost, self._contention = schedule, cost, contention
        self._stretches = stretches
        self._now_s = 0.0
        self._made: dict[Product, float] = {}
        """When each product was made."""
        self._running: _Running = {}
        self.rows: list[list[Timed]] = [[] for _ in schedule.actions]

    def advance(self) -> bool:
        """Go to the next event; False where there is none."""
        arrivals = self._start_what_can()
        paces = _paces(self._running, self._contention)
        ends = [left / paces[rank] for rank, left in self._running.items()]
        waits = [arrival - self._now_s for arrival in arrivals]
        if not ends and not waits:
            return False
        passed_s = min(ends + waits)
        self._now_s += passed_s
        for rank in list(self._running):
            left = self._running[rank]
            # The event's own action is over, whatever the rounding says.
            if left / paces[rank] <= passed_s:
                self._end(rank)
            else:
                self._running[rank] = left - passed_s * paces[rank]
        return True

    def _start_what_can(self) -> list[float]:
        """Start the next action of each rank that has what it needs, and say when more arrives."""
        arrivals = []
        for rank, actions in enumerate(self._schedule.actions):
            done = len(self.rows[rank])
            if rank in self._running or done == len(actions):
                continue
            ready_s = self._ready_s(actions[done])
            if ready_s is None:
                continue
            if ready_s <= self._now_s:
                stretch = 1.0 if self._stretches is None else self._stretches[rank][done]
                self._running[rank] = stretch * self._cost.of(actions[done])
                self.rows[rank].append(Timed(actions[done], self._now_s, self._now_s))
            else:
                arrivals.append(ready_s)
        return arrivals

    def _ready_s(self, action: Action) -> float | None:
        """When all that an action needs is at its rank; None: not known yet."""
        ranks = self._schedule.stage_ranks[self._schedule.direction(action.micro_batch)]
        arrivals = []
        for product in dependencies(action, self._schedule.num_stages):
            if product not in self._made:
                return None
            travels = ranks[product[1]] != ranks[action.stage]
            arrivals.append(self._made[product] + travels * self._cost.p2p_s)
        return max(arrivals, default=0.0)

    def _end(self, rank: int) -> None:
        del self._running[rank]
        kind, stage, micro_batch = self.rows[rank][-1].action
        self.rows[rank][-1] = self.rows[rank][-1]._replace(end_s=self._now_s)
        if kind != "W":
            self._made["F" if kind == "F" else "I", stage, micro_batch] = self._now_s


def _paces(running: _Running, contention: CoreContention) -> dict[int, float]:
    """The pace of each rank that computes."""
    machines = [rank // contention.num_ranks for rank in running]
    return {
        rank: contention.pace[machines.count(machine) - 1]
        for rank, machine in zip(running, machines, strict=True)
    }


def stretch_factors(row: Sequence[Timed], cost: StageCost) -> list[float]:
    """Seconds of each action over those at pace 1; 1 where it takes none."""
    return [
        (timed.end_s - timed.start_s) / alone_s if (alone_s := cost.of(timed.action)) else 1.0
        for timed in row
    ]
