"""Whether kernels are right in the type that training uses, on the device itself.

The interpreter can't tell: its bf16 is wrong, and its programs run one after the other. So results
and gradients are held against fp64, by torch's own error in the same type, and against themselves
bit for bit, which finds races.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.bench.kernels.cases import Function, KernelCase, case_text
from paceline.bench.kernels.timing import tensors
from paceline.kernels import switch


def faults(
    case: KernelCase, inputs: Sequence[Any], device: torch.device, repetitions: int = 10
) -> list[str]:
    """What is wrong with our results in the inputs' own type: a sentence each."""
    with switch.using("triton", device):
        ours = values(case.function, inputs)
        again = [values(case.function, inputs) for _ in range(repetitions)]
    with switch.using("reference", device):
        torchs = values(case.function, inputs)
        right = values(case.function, [_wide(each) for each in inputs])
    found = []
    for index, (mine, other, exact) in enumerate(zip(ours, torchs, right, strict=True)):
        usual = _error(other, exact)
        allowed = case.within * usual + torch.finfo(mine.dtype).eps / 4
        if not (apart := _error(mine, exact)) <= allowed:  # NaN is wrong too
            found.append(f"value {index} is {apart:.1e} off, torch's {usual:.1e}")
        if any(not torch.equal(mine, each[index]) for each in again):
            found.append(f"value {index} differs between repetitions")
    return [f"{case_text(case, inputs)}: {sentence}." for sentence in found]


def values(function: Function, inputs: Sequence[Any]) -> list[Tensor]:
    """Results, then gradients under weights that are the same for every type."""
    inputs = [_fresh(each) for each in inputs]
    made = tensors(function(*inputs))
    asking = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    asked = [each for each in made if each.requires_grad]
    if not asked:
        return made
    weights = [_weights(each) for each in asked]
    return [*(each.detach() for each in made), *torch.autograd.grad(asked, asking, weights)]


def _weights(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator, device=like.device).to(like)


def _fresh(x: Any) -> Any:
    """A copy: some operators write to their inputs."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _wide(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def _error(value: Tensor, exact: Tensor) -> float:
    apart, size = (value.double() - exact.double()).norm(), exact.double().norm()
    return float(apart / size) if size > 0 else float(apart)
