"""When each action of a pipeline schedule runs where ranks share cores.

A rank that waits leaves its cores, its caches and its part of the memory's bandwidth to the others
of its machine. So an action isn't over after fixed seconds: it goes on at a pace that depends on
how many ranks compute at the moment (processor sharing, as queueing theory has it: Kleinrock 1967,
https://doi.org/10.1145/321386.321388). From one start or end of an action to the next the paces
stay as they are; the execution goes from each such event to the next one.

Beyond that the rules are those of `paceline.plan.schedules.timing`, to which this comes down where
the pace is always 1. It is slower by an order, and meant for ranks on CPUs, of which there are few.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.config.schedule import Action, Schedule
from paceline.plan.schedules.timing import Cost, Product, Timed, must_be_whole, needs

_Running = dict[int, float]
"""By rank, what is left of its action: seconds at pace 1."""


class Crowd(NamedTuple):
    """Ranks of a pipeline that share a machine, and how fast they are."""

    num_ranks: int
    """Neighbours in the pipeline that are on one machine."""
    pace: tuple[float, ...]
    """Of each rank while 1, 2, ... of them compute; costs are those at pace 1."""


def shared_timeline(schedule: Schedule, cost: Cost, crowd: Crowd) -> list[list[Timed]]:
    """Per rank, its actions with their times. Raises ValueError where the ranks deadlock."""
    run = _Run(schedule, cost, crowd)
    while run.advance():
        pass
    must_be_whole(schedule, [len(row) for row in run.rows])
    return run.rows


class _Run:
    """An execution under way."""

    def __init__(self, schedule: Schedule, cost: Cost, crowd: Crowd) -> None:
        self._schedule, self._cost, self._crowd = schedule, cost, crowd
        self._now_s = 0.0
        self._made: dict[Product, float] = {}
        """When each product was made."""
        self._running: _Running = {}
        self.rows: list[list[Timed]] = [[] for _ in schedule.actions]

    def advance(self) -> bool:
        """Go to the next event; False where there is none."""
        arrivals = self._start_what_can()
        paces = _paces(self._running, self._crowd)
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
                self._running[rank] = self._cost.of(actions[done])
                self.rows[rank].append(Timed(actions[done], self._now_s, self._now_s))
            else:
                arrivals.append(ready_s)
        return arrivals

    def _ready_s(self, action: Action) -> float | None:
        """When all that an action needs is at its rank; None: not known yet."""
        ranks = self._schedule.stage_ranks[self._schedule.direction(action.micro_batch)]
        arrivals = []
        for product in needs(action, self._schedule.num_stages):
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


def _paces(running: _Running, crowd: Crowd) -> dict[int, float]:
    """The pace of each rank that computes."""
    machines = [rank // crowd.num_ranks for rank in running]
    return {
        rank: crowd.pace[machines.count(machine) - 1]
        for rank, machine in zip(running, machines, strict=True)
    }


def stretches(row: Sequence[Timed], cost: Cost) -> list[float]:
    """Seconds of each action over those at pace 1; 1 where it takes none."""
    return [
        (timed.end_s - timed.start_s) / alone_s if (alone_s := cost.of(timed.action)) else 1.0
        for timed in row
    ]
