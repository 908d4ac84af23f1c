"""When each action of a pipeline schedule runs, given what each costs.

A rank does its actions in order, each as soon as what it needs is there: F needs the output of the
stage before, B and I the rank's own F and the gradient from the stage behind, W the I. What comes
from another rank arrives p2p_s after it was made; transfers run beside the computing and never
wait for each other. Nothing else is modelled: no memory, no contention, no host.
"""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from paceline.config.schedule import Action, Schedule

Product = tuple[str, int, int]
"""What an action makes for others: ("F" or "I", stage, micro-batch); a B makes an "I" too."""


class StageCost(NamedTuple):
    """Seconds that the work of each stage takes, per micro-batch; B takes what I and W take."""

    forward_s: Sequence[float]
    input_grad_s: Sequence[float]
    weight_grad_s: Sequence[float]
    p2p_s: float = 0.0
    """From the end of an action to when another rank has its result."""

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        stage = action.stage
        if action.kind == "F":
            return self.forward_s[stage]
        split = {"I": self.input_grad_s[stage], "W": self.weight_grad_s[stage]}
        return split.get(action.kind, sum(split.values()))


class Timed(NamedTuple):
    """An action and when it runs."""

    action: Action
    start_s: float
    end_s: float


def equal_cost(
    num_stages: int,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
    p2p_s: float = 0.0,
) -> StageCost:
    """The cost of stages that all weigh the same."""
    forward, input_grad, weight_grad = (
        (seconds,) * num_stages for seconds in (forward_s, input_grad_s, weight_grad_s)
    )
    return StageCost(forward, input_grad, weight_grad, p2p_s)


def dependencies(action: Action, num_stages: int) -> list[Product]:
    """What must have been made before an action can start."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    behind = [("I", stage + 1, micro_batch)] if stage + 1 < num_stages else []
    return [("F", stage, micro_batch), *behind]


def execute(schedule: Schedule, cost: StageCost) -> list[list[Timed]]:
    """Run the ranks' lists as far as they go; what is stuck is missing from the result."""
    return [
        [Timed(*timed) for timed in zip(actions, starts, ends, strict=False)]
        for actions, (starts, ends) in zip(schedule.actions, _run(schedule, cost), strict=True)
    ]


def _run(schedule: Schedule, cost: StageCost) -> list[tuple[list[float], list[float]]]:
    """When each rank's actions start and end, as far as they go.

    Each rank goes on until it has to wait, in turn, until none moves: about one look per action.
    """
    run = _Execution(schedule, cost)
    moving = True
    while moving:
        moved = [run.advance(rank) for rank in range(schedule.num_ranks)]
        moving = any(moved)
    return list(zip(run.starts, run.ends, strict=True))


class _Execution:
    """An execution under way: what is there, in tables by stage and micro-batch."""

    def __init__(self, schedule: Schedule, cost: StageCost) -> None:
        num_stages, batches = schedule.num_stages, schedule.num_micro_batches
        self.schedule, self.last = schedule, num_stages - 1
        whole = [i + w for i, w in zip(cost.input_grad_s, cost.weight_grad_s, strict=True)]
        self.seconds: dict[str, Sequence[float]] = {
            "F": cost.forward_s,
            "B": whole,
            "I": cost.input_grad_s,
            "W": cost.weight_grad_s,
        }
        # Ends of forward passes and of gradients of inputs; not there yet: -1.
        self.forward = [[-1.0] * batches for _ in range(num_stages)]
        self.gradient = [[-1.0] * batches for _ in range(num_stages)]
        self.starts: list[list[float]] = [[] for _ in schedule.actions]
        self.ends: list[list[float]] = [[] for _ in schedule.actions]
        # Seconds from each stage to the next, and back: none where they share a rank.
        hops = [
            [0.0 if one == other else cost.p2p_s for one, other in pairwise(ranks)]
            for ranks in schedule.stage_ranks
        ]
        self.hops = [hops[schedule.direction(batch)] for batch in range(batches)]

    def advance(self, rank: int) -> bool:
        """Do the actions of a rank until what the next one needs is not there."""
        starts, ends, forward, gradient = (
            self.starts[rank],
            self.ends[rank],
            self.forward,
            self.gradient,
        )
        first = len(ends)
        clock = ends[-1] if ends else 0.0
        for kind, stage, batch in islice(self.schedule.actions[rank], first, None):
            # One function for all kinds: a call for each of 30,000 actions would double the time.
            if kind == "F":
                ready = forward[stage - 1][batch] if stage else 0.0
                if stage and ready >= 0:
                    ready += self.hops[batch][stage - 1]
            elif kind == "W":
                ready = gradient[stage][batch]
            else:
                ready = forward[stage][batch]
                if ready >= 0 and stage < self.last:
                    behind = gradient[stage + 1][batch]
                    arrival = behind + self.hops[batch][stage]
                    ready = behind if behind < 0 else max(ready, arrival)
            if ready < 0:
                break
            if ready > clock:
                clock = ready
            starts.append(clock)
            clock += self.seconds[kind][stage]
            ends.append(clock)
            if kind == "F":
                forward[stage][batch] = clock
            elif kind != "W":
                gradient[stage][batch] = clock
        return len(ends) > first


def timeline(schedule: Schedule, cost: StageCost) -> list[list[Timed]]:
    """Per rank, its actions with their times. Raises ValueError where the ranks deadlock."""
    timed = execute(schedule, cost)
    check_complete(schedule, [len(row) for row in timed])
    return timed


def schedule_end_s(rows: Sequence[Sequence[Timed]]) -> float:
    """When the last rank is done."""
    return max(row[-1].end_s for row in rows)


def check_complete(schedule: Schedule, done: list[int]) -> None:
    """Raise ValueError unless every rank did all of its actions."""
    if done != [len(actions) for actions in schedule.actions]:
        raise ValueError(
            f"the ranks of schedule {schedule.name!r} deadlock: see what `check` says."
        )


def makespan(schedule: Schedule, cost: StageCost) -> float:
    """Seconds from the start of the first action to the end of the last, over all ranks."""
    ran = _run(schedule, cost)
    check_complete(schedule, [len(ends) for _, ends in ran])
    return max(ends[-1] for _, ends in ran if ends)
