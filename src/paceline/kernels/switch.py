"""Which implementation of an operator runs: plain torch, or a Triton kernel.

`layout.kernels` says it for a run, and `use` sets it in a process:

- "reference": plain torch, everywhere.
- "triton": kernels on every CUDA tensor (of 16 or 32 bits). Where that can't be, it is refused.
- "auto": kernels on a CUDA tensor where the table of launches (`kernels/launch.py`) has rows of the
  operator for this device and type that were measured to beat torch, plain or compiled. What nobody
  has measured on a device isn't used on it unasked.

The interpreter (TRITON_INTERPRET=1, set before Triton is imported) runs kernels on CPU tensors, a
few milliseconds for each program: tests use it.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.layout import Kernels
from paceline.kernels import launch

_LEAST_CAPABILITY = (8, 0)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_chosen: Kernels = "reference"
_faster_than_torch: frozenset[tuple[str, torch.dtype]] = frozenset()
"""Operators and types that "auto" takes kernels for."""


def use(kernels: Kernels, device: torch.device) -> None:
    """Choose what runs in this process from now on.

    Raises:
        InputError: kernels are asked for that can't run on this device.
    """
    global _chosen, _faster_than_torch
    reason = why_not(device) if kernels == "triton" else None
    if reason is not None:
        raise InputError(
            f'layout.kernels = "triton" was given, but {reason}; use "auto" or "reference".'
        )
    _chosen, _faster_than_torch = kernels, launch.faster_than_torch(device)


@contextmanager
def using(kernels: Kernels, device: torch.device) -> Iterator[None]:
    """Choose for the length of a block."""
    global _chosen, _faster_than_torch
    before = _chosen, _faster_than_torch
    use(kernels, device)
    try:
        yield
    finally:
        _chosen, _faster_than_torch = before


def why_not(device: torch.device) -> str | None:
    """Why kernels can't run on a device, as the end of a sentence; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if is_interpreted():
        return None
    if device.type != "cuda":
        return f"this run is on the {device.type.upper()} and the kernels need a CUDA device"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return None


def is_interpreted() -> bool:
    """Whether kernels run on CPU tensors, one program after the other."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes(operator: str, x: Tensor) -> bool:
    """Whether the kernels of an operator work on such a tensor, as things are chosen.

    Args:
        operator: its name in the table, before the dot.
        x: decides by its device and type.
    """
    return takes_on(operator, x.device.type, x.dtype)


def takes_on(operator: str, device_type: str, dtype: torch.dtype) -> bool:
    """As `takes`, where there is no tensor yet."""
    is_cuda = device_type == "cuda"
    if _chosen == "triton":
        return dtype in _TYPES and (is_cuda or is_interpreted())
    return _chosen == "auto" and is_cuda and (operator, dtype) in _faster_than_torch
