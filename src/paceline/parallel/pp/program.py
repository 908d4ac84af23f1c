"""Lowering: from the lists of all ranks to the program that one rank executes. Pure functions.

A program is the rank's own actions, with transfers (SEND, RECV) where neighbouring stages live on
different ranks, and with FSDP's work: gather the parameters first (UNSHARD), reduce the gradients
of a stage behind its last backward pass (REDUCE_GRAD), free the parameters last (RESHARD). At
ZeRO-3 passes gather and free for themselves: UNSHARD and RESHARD are left out.

The rule that keeps ranks from waiting in circles: all actions and transfers of all ranks have one
common order, and each rank executes its own in that order. Doing them one after the other would be
a valid execution, so at any time the earliest one that isn't done can be. The common order is that
of the times at which the actions would end. So a receive is posted about when its tensor is ready,
and no other transfer between the two ranks has to wait behind it.

Each action is written as torch.distributed.pipelining does: stage, kind, micro-batch ("2SEND_F0").
"""

from collections import defaultdict, deque
from collections.abc import Iterable

from torch.distributed.pipelining.schedules import _Action as Op

from paceline.config.schedule import Action, Schedule

_DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Relative times for the common order; the times of a real run change no result."""


def lower(schedule: Schedule, rank: int, *, keeps_gathered: bool = True) -> list[Op]:
    """This rank's program of a training step."""
    return _program(schedule, common_order(schedule), rank, keeps_gathered)


def lower_forward(
    schedule: Schedule, num_micro_batches: int, rank: int, *, keeps_gathered: bool = True
) -> list[Op]:
    """This rank's program of forward passes alone, for any number of micro-batches.

    At tick t, stage s does micro-batch t - s of its direction: every stage is busy as soon as the
    first micro-batch has reached it.
    """
    schedule = schedule._replace(num_micro_batches=num_micro_batches)
    entered: dict[int, int] = defaultdict(int)
    ticks: list[tuple[int, Action]] = []
    for micro_batch in range(num_micro_batches):
        direction = schedule.direction(micro_batch)
        tick = entered[direction]
        entered[direction] += 1
        ticks += [
            (tick + stage, Action("F", stage, micro_batch)) for stage in range(schedule.num_stages)
        ]
    return _program(schedule, [action for _, action in sorted(ticks)], rank, keeps_gathered)


def common_order(schedule: Schedule) -> list[Action]:
    """The actions of all ranks in the order in which they would end, each after what it needs.

    Raises:
        ValueError: the lists wait for each other.
    """
    ends: dict[Action, float] = {}
    clocks = [0.0] * schedule.num_ranks
    todo = [deque(actions) for actions in schedule.actions]
    while any(todo):
        num_done = len(ends)
        for rank, actions in enumerate(todo):
            while actions and all(need in ends for need in _needs(schedule, actions[0])):
                action = actions.popleft()
                ready = [ends[need] for need in _needs(schedule, action)]
                clocks[rank] = max([clocks[rank], *ready]) + _DURATIONS[action.kind]
                ends[action] = ends[_as_input_gradient(action)] = clocks[rank]
        if len(ends) == num_done:
            heads = ", ".join(str(actions[0]) for actions in todo if actions)
            raise ValueError(f"the schedule {schedule.name} can't run: {heads} wait for each other")
    every = [action for actions in schedule.actions for action in actions]
    return sorted(every, key=lambda action: (ends[action], action))


def _needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """What another stage must have done before."""
    kind, stage, micro_batch = action
    if kind == "F" and stage > 0:
        return (Action("F", stage - 1, micro_batch),)
    if kind in ("B", "I") and stage + 1 < schedule.num_stages:
        return (Action("I", stage + 1, micro_batch),)
    return ()


def _as_input_gradient(action: Action) -> Action:
    """To the stage before, a whole backward pass is as good as I."""
    return action._replace(kind="I") if action.kind == "B" else action


def _program(
    schedule: Schedule, order: Iterable[Action], rank: int, keeps_gathered: bool
) -> list[Op]:
    """This rank's part of the common order, with transfers and FSDP's work."""
    ops: list[str] = []
    reduce_at: dict[int, int] = {}
    for kind, stage, micro_batch in order:
        owner, index = _locate(schedule, stage, micro_batch)
        if owner == rank:
            ops.append(f"{index}{kind}{micro_batch}")
        target = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= target < schedule.num_stages:
            receiver, its_index = _locate(schedule, target, micro_batch)
            wire = "F" if kind == "F" else "B"
            if owner == rank != receiver:
                ops.append(f"{index}SEND_{wire}{micro_batch}")
            if owner != rank == receiver:
                ops.append(f"{its_index}RECV_{wire}{micro_batch}")
        if owner == rank and kind in ("B", "W"):
            reduce_at[index] = len(ops)  # behind the last one, and behind what it sends
    for index, place in sorted(reduce_at.items(), key=lambda item: -item[1]):
        ops.insert(place, f"{index}REDUCE_GRAD")
    here = dict.fromkeys(Op.from_str(op).stage_index for op in ops if keeps_gathered)
    gather, free = [f"{index}UNSHARD" for index in here], [f"{index}RESHARD" for index in here]
    return [Op.from_str(op) for op in (*gather, *ops, *free)]


def _locate(schedule: Schedule, stage: int, micro_batch: int) -> tuple[int, int]:
    """The rank of a stage for a micro-batch, and its index there."""
    index = index_of(schedule, schedule.direction(micro_batch), stage)
    return schedule.rank_of(stage, micro_batch), index


def index_of(schedule: Schedule, direction: int, stage: int) -> int:
    """A stage's number for torch's runtime, which takes neighbours on one rank for connected.

    The second direction counts on, backwards, so that a rank's two stages are never neighbours.
    """
    return stage if direction == 0 else 2 * schedule.num_stages - 1 - stage
