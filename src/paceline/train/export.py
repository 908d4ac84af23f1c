"""Export: the weights of a Run as a folder that others open; or into a module of one's own.

What the folder holds is the family's to say (`TrainFamily.export`).
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from paceline.config.errors import InputError
from paceline.config.layout import ParamDtype
from paceline.observe.run import Run
from paceline.parallel.apply import DTYPES
from paceline.train.checkpoint import FoundCheckpoint, newest_good, parameter_names
from paceline.train.checkpoint import load as read_checkpoint
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.ema import EMA_SECTION
from paceline.train.families import family_of
from paceline.train.family import Trained


def export(run: Run, folder: Path, dtype: ParamDtype = "fp32") -> int:
    """Write the weights of a Run's newest good checkpoint, and what others need beside them.

    Where the Run keeps a running mean of the weights, that is written.

    Args:
        run: on any layout.
        folder: must not exist yet, or be empty.
        dtype: of the written weights.

    Returns:
        the step the weights are of.

    Raises:
        InputError: no Run, no checkpoint, a network that the family has no form for, or a folder
            that holds files or can't be written.
    """
    found = _newest(run)
    weights = _room_for(found, "model")
    read_checkpoint(found, {"model": weights}, LockstepRanks.alone())
    if means := _room_for(found, EMA_SECTION):
        read_checkpoint(found, {EMA_SECTION: means}, LockstepRanks.alone())
        weights |= means
    job = run.job()
    trained = Trained(run, job, found.step, weights)
    family_of(job.model).export(job.model, trained, folder, DTYPES[dtype])
    return found.step


def load(run: Run | Path | str, model: nn.Module) -> int:
    """Put the weights of a Run's newest good checkpoint into a module.

    Where the Run keeps a running mean of the weights, that is taken.

    Args:
        run: a Run or its directory; of this very module, on any layout.
        model: on any device; changed in place.

    Returns:
        the step the weights are of.

    Raises:
        InputError: no Run, no checkpoint, or parameters of other names or shapes.
    """
    found = _newest(run if isinstance(run, Run) else Run(Path(run)))
    names, aliases = parameter_names(model)
    state = get_model_state_dict(model)
    own = {name: value for name, value in state.items() if name not in aliases}
    read_checkpoint(found, {"model": own}, LockstepRanks.alone())
    if means := _room_for(found, EMA_SECTION):
        read_checkpoint(found, {EMA_SECTION: means}, LockstepRanks.alone())
        with torch.no_grad():
            for parameter, name in names.items():
                parameter.copy_(means[name])
    return found.step


def _newest(run: Run) -> FoundCheckpoint:
    if not run.exists:
        raise InputError(f"{run.path} is not a run: give the directory of one, such as runs/demo.")
    found, _ = newest_good(run.checkpoint_folder, LockstepRanks.alone(), print)
    if found is None:
        raise InputError(f"{run.path} has no checkpoint yet: train it first.")
    return found


def _room_for(found: FoundCheckpoint, section: str) -> dict[str, Tensor]:
    """Whole tensors of the saved types, however they were cut when they were saved."""
    return {
        name: torch.empty(entry.size, dtype=entry.torch_dtype)
        for name, entry in found.section(section).items()
    }
