"""A person's module for each generation of an elastic run.

Sharding changes a module in place and ties it to process groups. So before the first generation
takes the module, its form is kept: everything but the values of its parameters, which come from
the state of the run. That costs the memory of its buffers.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.config.errors import InputError


class TakenModule(NamedTuple):
    """For one generation."""

    module: nn.Module
    has_values: bool
    """Whether its parameters are those that the script made; otherwise of no particular value."""


class FreshModules:
    """Of one process.

    Args:
        module: as the script made it.
        is_elastic: whether there may be several generations.

    Raises:
        InputError: it can't be copied, which an elastic run needs.
    """

    def __init__(self, module: nn.Module, *, is_elastic: bool) -> None:
        self._module: nn.Module | None = module
        self._form: nn.Module | None = None
        if is_elastic:
            self._form = _copied(module, lambda p: torch.empty_like(p, device="meta"))

    def take(self) -> TakenModule:
        """The module itself at first; later one like it, without its values."""
        module, self._module = self._module, None
        if module is not None:
            return TakenModule(module, has_values=True)
        assert self._form is not None, "only an elastic run asks again"
        anew = _copied(self._form, lambda p: torch.empty_like(p, device="cpu"))
        return TakenModule(anew, has_values=False)


def _copied(module: nn.Module, values: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, nn.Parameter] = {}
    for old in module.parameters():
        memo[id(old)] = new = nn.Parameter(values(old.detach()), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)  # what a person marked it with
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise InputError(
            f"an elastic run makes the module anew after a loss, and {type(module).__name__} can't "
            f"be copied ({type(error).__name__}: {error}): make it work with copy.deepcopy, or set "
            "elastic.min_nodes = 0."
        ) from error
