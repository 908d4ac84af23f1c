"""Quantize, the specification: what a receiver reads, in plain torch, in any floating type.

`paceline.kernels.quantize.schemes` says what a scale is, and what becomes of NaN and infinity.
"""

import torch
from torch import Tensor

from paceline.kernels.quantize.schemes import LEAST, TINY
from paceline.kernels.quantize.words import Quinary


def integers(blocks: Tensor, largest: int) -> Tensor:
    """Blocks (m, block) as the receiver of integers from -largest to largest reads them."""
    scales = _stored(blocks.abs().amax(dim=1, keepdim=True) / largest)
    return _bounded(blocks, scales, largest).round() * scales


def float8(blocks: Tensor) -> Tensor:
    """Blocks (m, block) as the receiver of e4m3 reads them."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = _stored(blocks.abs().amax(dim=1, keepdim=True) / largest)
    levels = _bounded(blocks, scales, largest).to(torch.float8_e4m3fn)
    return levels.to(blocks.dtype) * scales


def signs(blocks: Tensor) -> Tensor:
    """Blocks (m, block) as the receiver of signs reads them."""
    scales = _stored(blocks.abs().mean(dim=1, keepdim=True))
    return torch.where(_bounded(blocks, scales, 1) >= 0, scales, -scales)


def quinary(blocks: Tensor) -> Tensor:
    """Blocks (m, block) as the receiver of integers from -2 to 2 reads them."""
    scales = _stored(Quinary().scales(blocks, blocks))
    levels = _bounded(blocks, scales, 2).round()
    return levels.clamp(-2, 2) * scales


def _stored(scales: Tensor) -> Tensor:
    return scales.float().clamp(min=TINY).to(scales.dtype)


def _bounded(blocks: Tensor, scales: Tensor, largest: float) -> Tensor:
    """Values in units of the scale; infinities at the largest level."""
    return (blocks * scales.reciprocal().clamp(min=LEAST)).nan_to_num(0.0, largest, -largest)
