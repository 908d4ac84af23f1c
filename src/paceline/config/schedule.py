"""Schedule: what every pipeline rank does, in order. One object, priced by the planner and executed
by the runtime.

A stage is a run of consecutive layers. Per micro-batch it does a forward pass (F) and a backward
pass, whole (B) or split (https://arxiv.org/abs/2401.10241). The parts are the gradient of its input
(I), which the stage before waits for, and the gradients of its weights (W), which nobody waits for.

A stage lives on one rank, or, where a schedule feeds the pipeline from both ends (DualPipe), on
one rank for each direction.

What each named schedule demands of a layout stands here too, as data, so that an impossible layout
is refused before anything is built; `paceline.plan.schedules` makes the lists.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.config.errors import Refusal, first_sentence

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work of a rank."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """As torch.distributed.pipelining writes it: stage, kind, micro-batch ("2F0")."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Schedule(NamedTuple):
    """The actions of all ranks of a pipeline."""

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """Per rank, in the order of execution."""
    stage_ranks: tuple[tuple[int, ...], ...]
    """Per direction and stage, the rank that the stage lives on: one direction, or two (DualPipe),
    of which the first takes the first half of the micro-batches."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages that a micro-batch passes."""
        return len(self.stage_ranks[0])

    def direction(self, micro_batch: int) -> int:
        """Index into stage_ranks that this micro-batch follows."""
        return micro_batch * len(self.stage_ranks) // self.num_micro_batches

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that computes this stage for this micro-batch."""
        return self.stage_ranks[self.direction(micro_batch)][stage]

    def stages_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (direction, stage) pairs that live on a rank, in that order."""
        return tuple(
            (direction, stage)
            for direction, ranks in enumerate(self.stage_ranks)
            for stage, owner in enumerate(ranks)
            if owner == rank
        )


class ScheduleRequirements(NamedTuple):
    """What a named schedule asks of the layout."""

    stages_per_rank: int | None
    """Stages that a rank holds; None: as many as wished, two or more."""
    num_directions: int = 1
    """Ends that micro-batches enter at; with two, a rank holds a stage of each direction."""
    multiple_of_ranks: bool = False
    """Whether the micro-batches go in rounds of as many as there are ranks."""
    splits_backward: bool = False
    """Whether backward passes are split into I and W."""


DEMANDS = {
    "gpipe": ScheduleRequirements(1),
    "1f1b": ScheduleRequirements(1),
    "interleaved": ScheduleRequirements(None, multiple_of_ranks=True),
    "zb_h1": ScheduleRequirements(1, splits_backward=True),
    "interleaved_zb": ScheduleRequirements(None, multiple_of_ranks=True, splits_backward=True),
    "zbv": ScheduleRequirements(2, splits_backward=True),
    "dualpipev": ScheduleRequirements(2, splits_backward=True),
    "dualpipe": ScheduleRequirements(2, num_directions=2, splits_backward=True),
}
STAGES_PER_RANK = {name: each.stages_per_rank for name, each in DEMANDS.items()}
"""Stages that a schedule puts on each rank; None: as many as wished, two or more."""
SCHEDULES = ("none", *DEMANDS)
"""In columns of many layouts a schedule is its index here."""
DUALPIPE = SCHEDULES.index("dualpipe")
# What each schedule demands, by its index (stages per rank 0: two or more).
_STAGES_PER_RANK = np.array([1, *(each.stages_per_rank or 0 for each in DEMANDS.values())])
NUM_DIRECTIONS = np.array([1, *(each.num_directions for each in DEMANDS.values())])
SPLITS_BACKWARD = np.array([False, *(each.splits_backward for each in DEMANDS.values())])
_IN_ROUNDS = np.array([False, *(each.multiple_of_ranks for each in DEMANDS.values())])


def smallest_micro_batches(name: str, num_ranks: int) -> int:
    """The fewest micro-batches that a schedule can run; it can run the multiples of them."""
    each = DEMANDS[name]
    return num_ranks if each.multiple_of_ranks else each.num_directions


def num_stages(pp: Any, schedule: Any, stages_per_rank: Any) -> Any:
    """Stages that a micro-batch passes; DualPipe's two per rank are one of each direction.

    Arguments as of `demands`.
    """
    return pp * np.where(schedule == DUALPIPE, 1, stages_per_rank)


def demands(
    schedule: Any, pp: Any, stages_per_rank: Any, num_micro_batches: Any
) -> Iterator[Refusal]:
    """What a schedule demands of its pipeline, for one or for columns of them.

    Args:
        schedule: index into SCHEDULES.
        pp: ranks of the pipeline.
        stages_per_rank: stages that each holds.
        num_micro_batches: of a step.
    """
    wanted, ends = _STAGES_PER_RANK[schedule], NUM_DIRECTIONS[schedule]
    smallest = np.where(_IN_ROUNDS[schedule], pp, ends)

    def what() -> str:
        return f'layout.schedule = "{SCHEDULES[schedule]}"'

    yield (
        (wanted == 0) & (stages_per_rank < 2),
        lambda: (
            f"{what()} needs layout.stages_per_rank of 2 or more, not {stages_per_rank}: raise it "
            f'or use "{"1f1b" if SCHEDULES[schedule] == "interleaved" else "zb_h1"}".'
        ),
    )
    yield (
        (wanted != 0) & (stages_per_rank != wanted),
        lambda: (
            f"{what()} needs layout.stages_per_rank = {wanted}, not {stages_per_rank}: set that."
        ),
    )
    yield (
        pp % ends != 0,
        lambda: f'{what()} needs an even layout.pp, not {pp}: change it or use "dualpipev".',
    )
    yield (
        (num_micro_batches < 1) | (num_micro_batches % smallest != 0),
        lambda: (
            f"{what()} with layout.pp = {pp} needs {smallest} micro-batches per step or a multiple "
            f"of that, not {num_micro_batches}: change train.global_batch or layout.micro_batch."
        ),
    )


def refusal(name: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> str | None:
    """Why a schedule can't run on this pipeline, as one sentence; None where it can."""
    return first_sentence(demands(SCHEDULES.index(name), pp, stages_per_rank, num_micro_batches))
