"""An operator at one shape: what is timed, checked and tuned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]
Make = Callable[[torch.Generator], tuple[Any, ...]]


class KernelCost(NamedTuple):
    """Of one call: the least that any implementation must do."""

    bytes: int
    """Read and written in the device's memory, each tensor once."""
    flops: int = 0
    """Of matrix products; 0 where memory alone counts."""


@dataclass(frozen=True)
class KernelCase:
    """An operator at one shape."""

    operator: str
    """Package of `paceline.kernels`."""
    name: str
    """What people call it; an operator may have several."""
    shape: str
    make: Make
    """Inputs on the generator's device; tensors that ask for a gradient get one."""
    function: Function
    """Runs kernels, or the reference, as the switch says."""
    forward: KernelCost
    backward: KernelCost | None = None
    """None where there is nothing to differentiate."""
    within: float = 2.0
    """How many times torch's own error in the same type ours may have."""
    is_used_once: bool = False
    """Whether backward gives up what forward kept, so that only both together can be timed."""

    def cost(self, direction: str) -> KernelCost:
        """Of "forward", "backward" or "both"."""
        if direction == "forward" or self.backward is None:
            return self.forward
        if direction == "backward":
            return self.backward
        both = zip(self.forward, self.backward, strict=True)
        return KernelCost(*(first + second for first, second in both))

    @property
    def directions(self) -> tuple[str, ...]:
        """What can be timed."""
        if self.is_used_once:
            return ("both",)
        return ("forward",) if self.backward is None else ("forward", "backward", "both")


def normal(
    generator: torch.Generator, *shape: int, dtype: torch.dtype, grad: bool = True
) -> Tensor:
    """Random numbers: clocks depend on data, and zeros are fast."""
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return made.to(dtype).requires_grad_(grad)


def whole_numbers(generator: torch.Generator, below: int, *shape: int) -> Tensor:
    """Random numbers from 0 on, int64."""
    return torch.randint(below, shape, generator=generator, device=generator.device)


def case_text(case: KernelCase, inputs: Sequence[Any]) -> str:
    """A case and its inputs, for messages."""
    shown = [tuple(each.shape) if isinstance(each, Tensor) else each for each in inputs]
    return f"{case.name} {shown}"
