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
writing in order. `copies` copies what is complete to a `store`. Without the disk: `held` is what a
rank has of a state, in `regions`, `buddies` copies it into another node's memory, and `memory` puts
it together again.
"""

from paceline.train.checkpoint.buddies import Buddies
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.copies import CheckpointCopies
from paceline.train.checkpoint.files import FoundState
from paceline.train.checkpoint.held import HeldState, History
from paceline.train.checkpoint.loading import load, newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.memory import Recovered, recover
from paceline.train.checkpoint.plan import FoundCheckpoint
from paceline.train.checkpoint.state import (
    parameter_names,
    restore_rng_state,
    restore_training_state,
    rng_state,
    training_state,
)
from paceline.train.checkpoint.store import CheckpointStore, fetch_newer

__all__ = [
    "Buddies",
    "CheckpointCopies",
    "CheckpointStore",
    "Checkpointer",
    "FoundCheckpoint",
    "FoundState",
    "HeldState",
    "History",
    "LockstepRanks",
    "Recovered",
    "fetch_newer",
    "load",
    "newest_good",
    "parameter_names",
    "recover",
    "restore_rng_state",
    "restore_training_state",
    "rng_state",
    "training_state",
]
