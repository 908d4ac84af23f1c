"""Quantize, the specification: what a receiver reads, in plain torch, in any floating type.

A block's scale makes its largest magnitude the largest level; each value becomes the nearest level
(ties to even), and is read as level times scale. The scale is rounded to fp32, which travels, and
no smaller than fp32's smallest normal number.

NaN and infinity survive: a block that has NaN is NaN throughout, one that has an infinity is
infinite there (with its sign) and NaN elsewhere; of signs, which know no zero, infinite throughout.

Of five levels ("quinary") the scale is in proportion to the root mean square, and what lies beyond
the last level is cut to it. (Its square must be one that the floating type can hold.)

Papers: https://arxiv.org/abs/1610.02132 (integers), https://arxiv.org/abs/2209.05433 (fp8, e4m3),
https://arxiv.org/abs/1901.09847 (signs times the mean magnitude).
"""

import math

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
"""The smallest scale."""
LEAST = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
"""The smallest reciprocal of a scale: an infinity times it is one, times nothing it isn't."""

QUINARY_LARGEST = 2
_QUINARY_MEAN_SQUARE = 1.25
"""Of a block, in units of its scale. Steps of 0.89 root mean squares were the best for gradients of
a decoder (measured: the rest is 11 % of the squares; of a Gaussian 0.84 would be, with 8 %)."""


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
    scales = _stored(quinary_scales(blocks))
    levels = _bounded(blocks, scales, QUINARY_LARGEST).round()
    return levels.clamp(-QUINARY_LARGEST, QUINARY_LARGEST) * scales


def quinary_scales(blocks: Tensor) -> Tensor:
    """The step between levels of each block, not yet rounded: (m, block) to (m, 1)."""
    norms = torch.linalg.vector_norm(blocks, dim=1, keepdim=True)
    return norms / math.sqrt(_QUINARY_MEAN_SQUARE * blocks.shape[1])


def _stored(scales: Tensor) -> Tensor:
    return scales.float().clamp(min=TINY).to(scales.dtype)


def _bounded(blocks: Tensor, scales: Tensor, largest: float) -> Tensor:
    """Values in units of the scale; infinities at the largest level."""
    return (blocks * scales.reciprocal().clamp(min=LEAST)).nan_to_num(0.0, largest, -largest)
