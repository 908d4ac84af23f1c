"""Functions that launch kernels, as torch sees them.

A function that launches a kernel needs real memory. Tracers (torch.compile, fake tensors) have none
to give, so they meet a custom operator instead: it is opaque and says the shapes of its results.
Everybody else calls the function itself, for the operator's boundary costs about 60 us (published
for an H100), more than a small kernel.

`torch.library.triton_op` would let a compiler look inside, but fails on a machine without a driver.

Not here: gradients of a function of gradients (second derivatives); rules for DTensors (networks
hand over a rank's own part; DTensor refuses an operator without rules).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[..., Any]
_PLAIN = (Tensor, nn.Parameter)


class Operator:
    """A function of tensors that launches kernels, and its custom operator.

    Args:
        name: "paceline::" is put before it.
        function: has annotations; returns new tensors that are no views of its arguments.
        fake: the same arguments; returns tensors of the results' shapes, types and strides.
        mutates: names of arguments that are written to.
    """

    def __init__(
        self, name: str, function: Function, fake: Function, mutates: Sequence[str] = ()
    ) -> None:
        self.name, self.function = name, function
        self.custom = torch.library.custom_op(
            f"paceline::{name}", function, mutates_args=tuple(mutates)
        )
        self.custom.register_fake(fake)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or its operator where something looks on."""
        return self.custom(*arguments) if _is_watched(arguments) else self.function(*arguments)


class Differentiable:
    """An operator with a gradient.

    Args:
        forward: the operator.
        save: (ctx, inputs, output), keeps what the gradient needs; None: all inputs, tensors each.
        gradient: (ctx, *gradients of the results), returns those of the arguments.
    """

    def __init__(self, forward: Operator, save: Function | None, gradient: Function) -> None:
        self.forward, save = forward, save or _save_inputs
        forward.custom.register_autograd(gradient, setup_context=save)
        members = {
            "forward": staticmethod(forward.function),
            "setup_context": staticmethod(save),
            "backward": staticmethod(torch.autograd.function.once_differentiable(gradient)),
        }
        self._eager: Any = type(forward.name, (torch.autograd.Function,), members)

    def __call__(self, *arguments: Any) -> Any:
        """Call it; autograd records the call."""
        if _is_watched(arguments):
            return self.forward.custom(*arguments)
        return self._eager.apply(*arguments)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _is_watched(arguments: Sequence[Any]) -> bool:
    """Whether a compiler traces this call, or an argument is a tensor of another kind."""
    return torch.compiler.is_compiling() or any(
        isinstance(each, Tensor) and type(each) not in _PLAIN for each in arguments
    )
