"""Another forward pass for a module that stands where it stands, with the same parameters."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Call something else where the module is called; its hooks stay."""
    module.forward = forward


def compute_with(module: nn.Module, seen_as: Callable[[Tensor], Tensor]) -> None:
    """Let a module's forward find something else where its own parameters are, in place.

    Args:
        module: without its children.
        seen_as: maps a parameter to what is found.
    """
    forward = module.forward

    def forward_so(*inputs: Any) -> Any:
        given = module._parameters
        seen = {name: None if p is None else seen_as(p) for name, p in given.items()}
        module._parameters = seen  # type: ignore[assignment]
        try:
            return forward(*inputs)
        finally:
            module._parameters = given

    replace_forward(module, forward_so)
