"""Quantize, the specification: what a receiver reads, in plain torch, in any floating type.

A block's scale makes its largest magnitude the largest level; each value becomes the nearest level
(ties to even), and is read as level times scale. The scale is rounded to fp32, which travels, and
no smaller than fp32's smallest normal number.

NaN and infinity survive: a block that has NaN is NaN throughout, one that has an infinity is
infinite there (with its sign) and NaN elsewhere; of signs, which know no zero, infinite throughout.

Papers: https://arxiv.org/abs/1610.02132 (integers), https://arxiv.org/abs/2209.05433 (fp8, e4m3),
https://arxiv.org/abs/1901.09847 (signs times the mean magnitude).
"""

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
"""The smallest scale."""
LEAST = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
"""The smallest reciprocal of a scale: an infinity times it is one, times nothing it isn't."""


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


def _stored(scales: Tensor) -> Tensor:
    return scales.float().clamp(min=TINY).to(scales.dtype)


def _bounded(blocks: Tensor, scales: Tensor, largest: float) -> Tensor:
    """Values in units of the scale; infinities at the largest level."""
    return (blocks * scales.reciprocal().clamp(min=LEAST)).nan_to_num(0.0, largest, -largest)
