"""Checkpoints that are written beside training, complete or absent, and load on any layout.

    checkpointer = Checkpointer(run / "checkpoints", keep_last=2, say=print)
    if found := checkpointer.latest_good():
        state = training_state(module, optimizer, found)
        facts = checkpointer.load(found, state)
        restore_training_state(module, optimizer, state)
    ...
    waited_s = checkpointer.save(step, training_state(module, optimizer), facts)

`state` names what makes up a training state, `plan` divides it over the ranks, `files` is the
format on disk, `lockstep` makes ranks fail together, `loading` reads, and `checkpointer` puts the
writing in order.
"""

from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.files import FoundCheckpoint
from paceline.train.checkpoint.loading import load, newest_good
from paceline.train.checkpoint.state import (
    parameter_names,
    restore_rng_state,
    restore_training_state,
    rng_state,
    training_state,
)

__all__ = [
    "Checkpointer",
    "FoundCheckpoint",
    "load",
    "newest_good",
    "parameter_names",
    "restore_rng_state",
    "restore_training_state",
    "rng_state",
    "training_state",
]
