"""The weights that a Run keeps: those of one of its checkpoints, read whole.

Adapters are a part of the matrices that they belong to, unless these are asked for as they are, and
matrices in 4 bits are numbers again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.models.adapters import DOWN, is_of_adapter, merged
from paceline.observe.run import Run
from paceline.train.checkpoint.found import FoundCheckpoint
from paceline.train.checkpoint.loading import good_at, newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks

EMA_SECTION = "ema"
"""Of a checkpoint: the mean of the weights."""


class KeptWeights:
    """The weights of a checkpoint of a Run by the network's names; they are read as they are asked
    for. Adapters are merged into their matrices.

    Where the Run keeps a running mean of the weights, that is taken.

    Args:
        run: on any layout.
        step: of the checkpoint; None: the newest good one.

    Raises:
        InputError: no Run, or no such checkpoint.
    """

    def __init__(self, run: Run, step: int | None = None) -> None:
        self._found, self._finetune = checkpoint_of(run, step), run.job().finetune
        self.step = self._found.step
        self._entries = {
            name: (f"{section}.{name}", entry)
            for section in ("model", EMA_SECTION)
            for name, entry in self._found.section(section).items()
        }

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the context they can be read even after the run has removed the checkpoint.

        Raises:
            OSError: it has been removed already.
        """
        with self._found.held() as self._found:
            yield

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor."""
        if not self._finetune.is_adapted:
            return {name: tuple(entry.size) for name, (_, entry) in self._entries.items()}
        found = {}
        for name, (_, entry) in self._entries.items():
            if not is_of_adapter(name):
                _, down = self._entries.get(f"{name.removesuffix('weight')}{DOWN}", (None, None))
                # Of a matrix in 4 bits the entry counts bytes.
                found[name] = tuple(entry.size) if down is None else (entry.size[0], down.size[1])
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of some modules, in the run's types and on the CPU.

        Args:
            names: of all tensors of these modules.

        Raises:
            InputError: a file is not what the checkpoint says.
        """
        wanted = [*names]
        if not self._finetune.is_adapted:
            return self.read_as_trained(wanted)
        modules = tuple({f"{name.rpartition('.')[0]}." for name in wanted})
        beside = [n for n in self._entries if is_of_adapter(n) and n.startswith(modules)]
        return merged(self.read_as_trained(wanted + beside), self._finetune)

    def read_as_trained(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Some tensors, or all of them, by the run's own names: adapters apart.

        Raises:
            InputError: as `read`.
        """
        wanted = self._entries.keys() if names is None else names
        entries = {name: self._entries[name][1] for name in wanted}
        tensors = {n: torch.empty(e.size, dtype=e.torch_dtype) for n, e in entries.items()}
        self._found.fill({self._entries[name][0]: each for name, each in tensors.items()})
        return tensors


def weights_of(run: Run, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """All of `KeptWeights`.

    Returns:
        the step they are of, and the weights.

    Raises:
        InputError: as `KeptWeights`.
    """
    kept = KeptWeights(run, step)
    return kept.step, kept.read(kept.shapes)


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
