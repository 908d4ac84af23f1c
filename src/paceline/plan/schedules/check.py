"""Proof that a list of actions is a pipeline schedule: complete, in order, without deadlock.

A list that fails is a bug of whoever made it, so the error is a ValueError that names the action.
"""

from collections import Counter
from itertools import chain
from typing import NamedTuple

from paceline.config.schedule import Action, Schedule
from paceline.plan.schedules.timing import Product, dependencies, equal_cost, execute


class ScheduleError(ValueError):
    """A list of actions that can't be executed as a pipeline."""


class Checked(NamedTuple):
    """What a sound schedule holds in memory at worst, in micro-batches of one stage, per rank."""

    peak_activations: tuple[int, ...]
    """Forward passes whose backward pass (B, or W where it is split) is not done."""
    peak_weight_grads_pending: tuple[int, ...]
    """Of those, the ones whose I is done: for these the gradients of outputs are held too."""


def check(schedule: Schedule) -> Checked:
    """Raise ScheduleError where the lists can't run; else say what they hold in memory.

    Every stage must do every micro-batch's F once and then its B, or its I and then its W, once,
    on the rank it lives on; and no ranks may wait for each other in a circle.
    """
    _check_places(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_rank(schedule, rank, actions)
    _check_progress(schedule)
    peaks = [_peaks(actions) for actions in schedule.actions]
    return Checked(tuple(held for held, _ in peaks), tuple(pending for _, pending in peaks))


def _check_places(schedule: Schedule) -> None:
    num_directions = len(schedule.stage_ranks)
    if schedule.num_micro_batches % num_directions:
        raise ScheduleError(
            f"{schedule.num_micro_batches} micro-batches can't be shared by {num_directions} "
            "directions."
        )
    owners = set(chain(*schedule.stage_ranks))
    if owners != set(range(schedule.num_ranks)):
        raise ScheduleError(
            f"stages live on ranks {sorted(owners)}, but there are lists for "
            f"{schedule.num_ranks} ranks."
        )


def _check_rank(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    """Kinds per stage and micro-batch, in the order met, must be "FB" or "FIW"."""
    met: dict[tuple[int, int], str] = {
        (stage, micro_batch): ""
        for direction, stage in schedule.stages_of(rank)
        for micro_batch in range(schedule.num_micro_batches)
        if schedule.direction(micro_batch) == direction
    }
    for action in actions:
        if action[1:] not in met:
            raise ScheduleError(f"rank {rank} does {action}, which is not its own to do.")
        met[action[1:]] += action.kind
    for (stage, micro_batch), kinds in met.items():
        if kinds not in ("FB", "FIW"):
            raise ScheduleError(
                f"rank {rank}, stage {stage}, micro-batch {micro_batch}: {_fault(kinds)}."
            )


def _fault(kinds: str) -> str:
    """What is wrong with the actions of a stage on a micro-batch."""
    counts = Counter(kinds)
    twice = [kind for kind, count in counts.items() if count > 1]
    if twice:
        return f"{twice[0]} stands more than once"
    if "B" in kinds and ("I" in kinds or "W" in kinds):
        return "the backward pass stands both whole (B) and split (I, W)"
    wanted = "FIW" if "I" in kinds or "W" in kinds else "FB"
    missing = [kind for kind in wanted if kind not in kinds]
    if missing:
        return f"{missing[0]} is missing"
    return f"{', '.join(kinds)} must be in the order {', '.join(wanted)}"


def _check_progress(schedule: Schedule) -> None:
    """Execute, each rank waiting for what its next action needs."""
    done = [len(row) for row in execute(schedule, equal_cost(schedule.num_stages))]
    stuck = [rank for rank in range(schedule.num_ranks) if done[rank] < len(schedule.actions[rank])]
    if stuck:
        raise ScheduleError(f"deadlock: {_circle(schedule, done, stuck[0])}.")


def _circle(schedule: Schedule, done: list[int], rank: int) -> str:
    """Follow who waits for whom from a stuck rank until a rank comes up again."""
    made = {
        _product(action)
        for actions, count in zip(schedule.actions, done, strict=True)
        for action in actions[:count]
    }
    links: list[tuple[int, str]] = []
    while rank not in [seen for seen, _ in links]:
        action = schedule.actions[rank][done[rank]]
        kind, stage, micro_batch = next(
            product for product in dependencies(action, schedule.num_stages) if product not in made
        )
        maker = schedule.rank_of(stage, micro_batch)
        what = "output" if kind == "F" else "input gradient"
        links.append(
            (
                rank,
                f"rank {rank} at {action} waits for the {what} of stage {stage}, "
                f"micro-batch {micro_batch}, from rank {maker}",
            )
        )
        rank = maker
    first = [seen for seen, _ in links].index(rank)
    return "; ".join(text for _, text in links[first:])


def _product(action: Action) -> Product:
    return ("I" if action.kind == "B" else action.kind, action.stage, action.micro_batch)


def _peaks(actions: tuple[Action, ...]) -> tuple[int, int]:
    held = pending = 0
    peaks = (0, 0)
    for action in actions:
        held += action.kind == "F"
        pending += action.kind == "I"
        peaks = max(peaks[0], held), max(peaks[1], pending)
        held -= action.kind in "BW"
        pending -= action.kind == "W"
    return peaks
