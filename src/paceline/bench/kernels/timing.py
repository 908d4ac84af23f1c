"""Time variants of an operator on a CUDA device, in turns.

A slow moment hits all variants, for they alternate; each turn has inputs of its own, more of them
than the L2 cache holds; the queue is kept full by a wait on the device, so that the host's launches
don't count. Medians with their quartiles.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.bench.kernels.cases import Function, KernelCase, normal
from paceline.config.layout import Kernels
from paceline.kernels import switch

_L2_BYTES = 64 * 2**20
_MOST_COPIES = 8
_COPY_BYTES = 2**31
_MATMUL = 8192
_WAIT_CYCLES = 2_000_000
"""About a millisecond, in which the host queues a turn's launches."""
_WARM_UPS = 2

Call = Callable[[], Any]


class Variant(NamedTuple):
    """One way to do the same work."""

    kernels: Kernels
    """What the switch says while it is timed."""
    calls: Sequence[Call]
    """On different inputs."""


class Timing(NamedTuple):
    """Milliseconds: the median, and the quartiles around it."""

    ms: float
    low: float
    high: float


class Ceilings(NamedTuple):
    """What this device does at best, measured beside the kernels."""

    copy_gb_s: float
    """Read and written."""
    matmul_tflop_s: float
    """In bf16, on random numbers."""


def ceilings(device: torch.device) -> Ceilings:
    """Time a large copy and a large product."""
    source = torch.randn(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (normal(generator, _MATMUL, _MATMUL, dtype=torch.bfloat16, grad=False) for _ in range(2))
    (copy,) = alternate([Variant("reference", [lambda: target.copy_(source)])], 20, device)
    (product,) = alternate([Variant("reference", [lambda: a @ b])], 20, device)
    return Ceilings(2 * _COPY_BYTES / copy.ms / 1e6, 2 * _MATMUL**3 / product.ms / 1e9)


def copies(case: KernelCase, device: torch.device) -> list[tuple[Any, ...]]:
    """Inputs enough to fill the L2 cache twice over, so that no turn finds its own there."""
    generator = torch.Generator(device).manual_seed(0)
    first = case.make(generator)
    held = sum(each.nbytes for each in first if isinstance(each, Tensor))
    count = min(max(2, math.ceil(2 * _L2_BYTES / max(held, 1))), _MOST_COPIES)
    return [first, *(case.make(generator) for _ in range(count - 1))]


def variant(
    function: Function,
    inputs: Sequence[Sequence[Any]],
    direction: str,
    kernels: Kernels,
    device: torch.device,
) -> Variant:
    """A function's calls in one direction; each has been made once.

    Args:
        function: of the inputs.
        inputs: of each call.
        direction: "forward", "backward" or "both".
        kernels: what the switch says meanwhile.
        device: of the inputs.
    """
    with switch.using(kernels, device):
        return Variant(kernels, [_call(function, each, direction) for each in inputs])


def _call(function: Function, inputs: Sequence[Any], direction: str) -> Call:
    asking = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    made = tensors(function(*inputs)) if direction != "forward" else []
    grads = [torch.randn_like(each) for each in made]

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    def backward() -> Any:
        return torch.autograd.grad(made, asking, grads, retain_graph=True)

    def both() -> Any:
        return torch.autograd.grad(tensors(function(*inputs)), asking, grads)

    call = {"forward": forward, "backward": backward, "both": both}[direction]
    call()
    return call


def tensors(made: Any) -> list[Tensor]:
    """What a function returned, as a list."""
    return list(made) if isinstance(made, (tuple, list)) else [made]


def alternate(variants: Sequence[Variant], turns: int, device: torch.device) -> list[Timing]:
    """Time each variant so many times, in turns."""
    times: list[list[float]] = [[] for _ in variants]
    for turn in range(turns + _WARM_UPS):
        for place, (kernels, calls) in enumerate(variants):
            with switch.using(kernels, device):
                ms = _timed(calls[turn % len(calls)])
            if turn >= _WARM_UPS:
                times[place].append(ms)
    return [Timing(*np.percentile(each, (50, 25, 75)).tolist()) for each in times]


def _timed(call: Call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
