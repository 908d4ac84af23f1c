"""Schedule: what every pipeline rank does, in order. One object, priced by the planner and executed
by the runtime.

A stage is a run of consecutive layers. Per micro-batch it does a forward pass (F) and a backward
pass, whole (B) or split into the gradient of its input (I), which the stage before waits for, and
the gradients of its weights (W), which nobody waits for (https://arxiv.org/abs/2401.10241).

A stage lives on one rank, or, where a schedule feeds the pipeline from both ends (DualPipe), on
one rank for each direction.

What each named schedule demands of a layout stands here too, as data, so that an impossible layout
is refused before anything is built; `paceline.plan.schedules` makes the lists.
"""

from typing import Literal, NamedTuple

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


DEMANDS = {
    "gpipe": ScheduleRequirements(1),
    "1f1b": ScheduleRequirements(1),
    "interleaved": ScheduleRequirements(None, multiple_of_ranks=True),
    "zb_h1": ScheduleRequirements(1),
    "interleaved_zb": ScheduleRequirements(None, multiple_of_ranks=True),
    "zbv": ScheduleRequirements(2),
    "dualpipev": ScheduleRequirements(2),
    "dualpipe": ScheduleRequirements(2, num_directions=2),
}
STAGES_PER_RANK = {name: demands.stages_per_rank for name, demands in DEMANDS.items()}
"""Stages that a schedule puts on each rank; None: as many as wished, two or more."""


def smallest_micro_batches(name: str, num_ranks: int) -> int:
    """The fewest micro-batches that a schedule can run; it can run the multiples of them."""
    demands = DEMANDS[name]
    return num_ranks if demands.multiple_of_ranks else demands.num_directions


def refusal(name: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> str | None:
    """Why a schedule can't run on this pipeline, as one sentence; None where it can."""
    demands = DEMANDS[name]
    what = f'layout.schedule = "{name}"'
    if demands.stages_per_rank is None and stages_per_rank < 2:
        plain = "1f1b" if name == "interleaved" else "zb_h1"
        return (
            f"{what} needs layout.stages_per_rank of 2 or more, not {stages_per_rank}: "
            f'raise it or use "{plain}".'
        )
    if demands.stages_per_rank not in (None, stages_per_rank):
        return (
            f"{what} needs layout.stages_per_rank = {demands.stages_per_rank}, "
            f"not {stages_per_rank}: set that."
        )
    if pp % demands.num_directions:
        return f'{what} needs an even layout.pp, not {pp}: change it or use "dualpipev".'
    smallest = smallest_micro_batches(name, pp)
    if num_micro_batches < 1 or num_micro_batches % smallest:
        return (
            f"{what} with layout.pp = {pp} needs {smallest} micro-batches per step or a multiple "
            f"of that, not {num_micro_batches}: change train.global_batch or layout.micro_batch."
        )
    return None
