"""Replicas: how the ranks agree on what they train.

In this form, the base of all others, DDP or FSDP2 sum gradients up within the backward pass and
nothing is left to do. The other forms: gradients compressed or by an algorithm of ours, of whole
networks (`replicate`) and of shards (`hybrid`); workers that step each for itself and meet in
rounds (`elastic.local_rounds`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

COMM_SECTION, ROUNDS_SECTION = "comm", "rounds"
"""Of a checkpoint: what compressed gradients still owe, and what workers share."""
State = dict[str, dict[str, Any]]
"""Of replicas, in a checkpoint: nested dicts of tensors."""


class Replicas:
    """The ranks that train together, as one of them sees them; all of them call alike."""

    section: str | None = None
    """Under this name a checkpoint keeps `state`; None: there is none."""
    steps_alone = False
    """Whether workers step each for itself, and meet in rounds."""
    together: dist.ProcessGroup | None = None
    """The ranks that step together, where these are several; None: all."""
    ordered_from = 3
    """From so many ranks on, sums depend on the buckets in which DDP adds gradients up."""

    def describe(self) -> str:
        """What travels in which form, a sentence for a person."""
        return "Gradients are summed up exactly in every step."

    num_parts: int | None = None
    """What each loss is divided by, so that gradients add up; None: by the micro-batches of a rank,
    and gradients are averaged over ranks."""

    def number(self, micro_batch: int) -> int | None:
        """Of one of this rank's micro-batches among those of all ranks; None: nobody asks."""
        return None

    def take(self, micro_batch: int, part: nn.Module | None = None) -> None:
        """The gradients of one micro-batch are in the parameters.

        Args:
            micro_batch: this rank's, from 0.
            part: the stage of a pipeline; None: the whole module.
        """

    def begin(self, step: int | None) -> None:
        """Say which step's gradients come next, from 0; None: they will not be used."""

    def finish(self) -> None:
        """Wait until the gradients of the last backward pass are the mean of all replicas.

        Raises:
            Exception: what went wrong on another thread, with its traceback.
        """

    def correct(self, is_bad: Tensor, scale: Tensor | None) -> None:
        """Keep a step that was skipped, and a new loss scale, from spoiling the steps after it.

        Args:
            is_bad: () bool, whether loss or gradient was not finite.
            scale: () what the loss scale was multiplied by, None where there is none.
        """

    def after_step(self, done: int) -> None:
        """Exchange what is due after `done` steps of the run."""

    def is_round(self, done: int) -> bool:
        """Whether those who step alone meet after so many steps of the run."""
        return True

    def sum_up(self, values: Tensor) -> tuple[Tensor, int]:
        """Numbers of all ranks.

        Args:
            values: this rank's, any shape, the same on all; may be overwritten.

        Returns:
            their sum, and how many ranks it is of.
        """
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks > 1:
            dist.all_reduce(values)
        return values, num_ranks

    def sum_in_step(self, values: Tensor) -> tuple[Tensor, int]:
        """As `sum_up`, of the ranks that step together."""
        return self.sum_up(values)

    def sum_in_round(self, values: Tensor) -> tuple[Tensor, int]:
        """As `sum_up`, of those who meet in rounds: one rank of each worker."""
        return values, 1

    def sent(self) -> dict[str, float]:
        """What this rank sent in the last step in a form of ours, in bytes, by axis."""
        return {}

    def squared_error(self) -> Tensor | None:
        """This rank's share of what compression owes, squared: () fp64; None: nothing is owed."""
        return None

    def state(self) -> State:
        """What a checkpoint keeps, by paths of one's own."""
        return {}

    def targets(self, saved: Iterable[str], room: Callable[[str], Tensor]) -> State:
        """The part of a saved state that this rank loads, in the form of `state`.

        Args:
            saved: paths of the tensors that were saved.
            room: makes the memory for one of them.
        """
        return {}

    def load(self, state: State) -> None:
        """Go on with what `targets` gave, now filled."""


def kept_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that checkpoints keep: running statistics and the like."""
    kept = module.state_dict(keep_vars=True)
    return [buffer for name, buffer in module.named_buffers() if name in kept]


def correct_errors(
    held: Sequence[Tensor], is_bad: Tensor, scale: Tensor | None, unscaled: Sequence[Tensor] = ()
) -> None:
    """Correct what is owed in place, as `Replicas.correct` says.

    Args:
        held: what is owed, in units of the gradients.
        unscaled: what has to stay finite as well, and has no units.
    """
    if is_bad.device.type != "cpu" or is_bad:
        for tensor in (*held, *unscaled):
            torch.where(is_bad, tensor.nan_to_num(0.0, 0.0, 0.0), tensor, out=tensor)
    if scale is not None:
        for errors in held:
            errors.mul_(scale)


def errors_to_load(
    kind: str,
    saved: Iterable[str],
    takes_over: Callable[[int], bool],
    room: Callable[[str], Tensor],
) -> dict[str, dict[str, Tensor]]:
    """Room for the errors that this rank takes over: {rank: {name: tensor}}.

    Args:
        kind: of the paths "kind.0.layer.weight".
        saved: paths of all tensors that were saved.
        takes_over: whether this rank goes on with what that rank owed.
        room: makes the memory for a path.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for path in saved:
        if path.startswith(f"{kind}."):
            _, rank, name = path.split(".", 2)
            if takes_over(int(rank)):
                state.setdefault(rank, {})[name] = room(path)
    return state


def tensors_to_load(
    kind: str, saved: Iterable[str], room: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Room for what is no rank's own: {name: tensor} of the paths "kind.layer.weight"."""
    start = f"{kind}."
    return {path.removeprefix(start): room(path) for path in saved if path.startswith(start)}
