"""The weights that a Run keeps: those of one of its checkpoints, read whole.

Adapters are a part of the matrices that they belong to, unless these are asked for as they are.
"""

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.models.adapters import merged
from paceline.observe.run import Run
from paceline.train.checkpoint.found import FoundCheckpoint
from paceline.train.checkpoint.loading import good_at, newest_good
from paceline.train.checkpoint.loading import load as read_checkpoint
from paceline.train.checkpoint.lockstep import LockstepRanks

EMA_SECTION = "ema"
"""Of a checkpoint: the mean of the weights."""


def weights_of(run: Run, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """The weights of a checkpoint of a Run by the network's names, in the run's types and on the
    CPU; adapters are merged into their matrices.

    Where the Run keeps a running mean of the weights, that is taken.

    Args:
        run: on any layout.
        step: of the checkpoint; None: the newest good one.

    Returns:
        the step they are of, and the weights.

    Raises:
        InputError: no Run, or no such checkpoint.
    """
    step, weights = weights_as_trained(run, step)
    finetune = run.job().finetune
    return step, merged(weights, finetune) if finetune.is_adapted else weights


def weights_as_trained(run: Run, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """As `weights_of`, by the run's own names: adapters apart."""
    found = checkpoint_of(run, step)
    weights = room_for(found, "model")
    read_checkpoint(found, {"model": weights}, LockstepRanks.alone())
    if means := room_for(found, EMA_SECTION):
        read_checkpoint(found, {EMA_SECTION: means}, LockstepRanks.alone())
        weights |= means
    return found.step, weights


def checkpoint_of(run: Run, step: int | None = None) -> FoundCheckpoint:
    """A checkpoint of a Run, which is good; without a step the newest one.

    Raises:
        InputError: no Run, or no such checkpoint.
    """
    if not run.exists:
        raise InputError(f"{run.path} is not a run: give the directory of one, such as runs/demo.")
    if step is not None:
        return good_at(run.checkpoint_folder, step, LockstepRanks.alone())
    found, _ = newest_good(run.checkpoint_folder, LockstepRanks.alone(), print)
    if found is None:
        raise InputError(f"{run.path} has no checkpoint yet: train it first.")
    return found


def room_for(found: FoundCheckpoint, section: str) -> dict[str, Tensor]:
    """Whole tensors of the saved types, however they were cut when they were saved."""
    return {
        name: torch.empty(entry.size, dtype=entry.torch_dtype)
        for name, entry in found.section(section).items()
    }
