"""Reference: the network as it was when the run began, beside the one that is trained.

How it works: where adapters are trained, it is the network without them. Else each rank keeps a
copy of its share of the first weights and exchanges it with the trained one for a pass: so it is
cut and sharded like that one, and takes the memory of the parameters once more. A run that goes on
reads the first weights anew, from where it had them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.finetune import Finetune
from paceline.models.adapters import without_adapters
from paceline.parallel.fsdp import free_gathered


class Reference:
    """The first weights of a network.

    Args:
        finetune: what of them is trained.
    """

    def __init__(self, finetune: Finetune) -> None:
        self._is_adapted = finetune.is_adapted
        self._kept: list[Tensor] = []

    def keep(self, module: nn.Module) -> None:
        """Take the weights of a module, or of a part of it, that has its first ones."""
        if not self._is_adapted:
            self._kept += [local_part(each.detach()).clone() for each in module.parameters()]

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """Let a module compute as the first one did, without gradients."""
        if self._is_adapted:
            with torch.no_grad(), without_adapters(module):
                yield
            return
        with torch.no_grad():
            self._exchange(module)
            try:
                yield
            finally:
                self._exchange(module)

    def _exchange(self, module: nn.Module) -> None:
        free_gathered(module)
        for parameter, kept in zip(module.parameters(), self._kept, strict=True):
            own = local_part(parameter.detach())
            before = own.clone()
            own.copy_(kept)
            kept.copy_(before)
