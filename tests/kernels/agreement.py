"""What every kernel's tests share: a device to run on, poisoned memory, agreement with fp64.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py asks for it before anything
imports Triton), in fp32, for its bf16 is wrong; at 2 to 5 ms a program, so shapes are small.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels import switch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_reason = switch.why_not(DEVICE)
with_kernels = pytest.mark.skipif(_reason is not None, reason=str(_reason))

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@contextmanager
def kernels() -> Iterator[None]:
    """Kernels run, and memory that nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` returns
    try:
        # A GPU overflows to infinity in silence; the interpreter is numpy, which would warn.
        with switch.using("triton", DEVICE), np.errstate(all="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers in fp32 that ask for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE).requires_grad_()


def check(function: Function, inputs: Sequence[Tensor], within: float = 3e-6) -> None:
    """Assert that results and all gradients are those of the reference in fp64.

    Args:
        function: takes the inputs, and runs kernels or the reference as the switch says.
        inputs: fp32; gradients are compared where they ask for one.
        within: norm of the difference over norm of the reference.
    """
    with kernels():
        ours = _values(function, inputs)
    with switch.using("reference", DEVICE):
        wide = [_wide(each) for each in inputs]
        expected = _values(function, wide)
    assert len(ours) == len(expected)
    for index, (mine, right) in enumerate(zip(ours, expected, strict=True)):
        assert mine.shape == right.shape, f"value {index}"
        apart = relative_error(mine, right)
        assert apart <= within, f"value {index} is {apart:.1e} off"


def relative_error(value: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right; 0 where both are empty or zero."""
    apart, size = (value.double() - right.double()).norm(), right.double().norm()
    return float(apart / size) if size > 0 else float(apart)


def _wide(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def _values(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results, then the gradients of a weighted sum of them."""
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    asking = [each for each in inputs if each.requires_grad]
    total = sum((result * _weights(result)).sum() for result in results if result.requires_grad)
    grads = torch.autograd.grad(total, asking, allow_unused=True) if asking else ()
    assert all(grad is not None for grad in grads), "an input has no gradient"
    return [*(result.detach() for result in results), *grads]


def _weights(like: Tensor) -> Tensor:
    """The same numbers for the same shape, whatever the type."""
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator).to(like)


_COMPILE = """
import importlib, json, sys
from benchmarks.kernels import ahead
found = []
for name in sys.argv[2:]:
    kernel = getattr(importlib.import_module(f"paceline.kernels.{sys.argv[1]}.kernel"), name)
    hopper = [each for each in ahead.compilations(kernel) if each.capability == 90]
    large = [each for each in hopper if each.size > kernel.sizes[0]][-1]
    assert ahead.resources(large).spilled_bytes == 0
    found.append(ahead.compiled(large).asm["ptx"])
print(json.dumps(found))
"""


def code_for_hopper(operator: str, *kernels: str) -> list[str]:
    """The assembly (PTX) of an operator's kernels at a large size, which must not spill.

    Made in a process without the interpreter, whose functions can't be compiled.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE, operator, *kernels]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
