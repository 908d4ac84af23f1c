"""8-bit codes for tensors that are read, changed a little and written again: Adam's moments.

How it works: blocks of 256 numbers share a scale, their largest magnitude, and each number becomes
one of 255 levels between -1 and 1 (or 0 and 1). The levels are dense where most numbers are and
still reach seven orders of magnitude down ("dynamic" codes): 64 of them in (0.1, 1], 32 in
(0.01, 0.1], and so on. The largest number of a block is exact, and coding what was decoded gives
the same codes, so that a checkpoint of decoded numbers loses nothing.

A block lies within a row (the last dimension; the last few, where it is short), so cutting a tensor
between rows cuts no block: shards have the codes of the whole. A row cut in the middle of a block
(tensor parallel, row-wise) is coded a little differently.

Paper: https://arxiv.org/abs/2110.02861, whose levels are the same but for their offset.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
_DECADES = 7
_NUM_NEGATIVE = 127
_SMALLEST = torch.finfo(torch.float32).tiny


class Coded(NamedTuple):
    """A tensor as codes, uint8, of its shape, and scales (*rows, blocks), fp32."""

    codes: Tensor
    scales: Tensor


def num_row_dims(shape: torch.Size) -> int:
    """How many leading dimensions count rows: all but the last, or fewer where rows are short."""
    for dims in range(len(shape) - 1, 1, -1):
        if math.prod(shape[dims:]) >= BLOCK:
            return dims
    return 1


def encode(x: Tensor, row_dims: int, *, signed: bool) -> Coded:
    """Code a tensor.

    Args:
        x: (*rows, *columns), floating point.
        row_dims: how many of its dimensions are rows.
        signed: whether it may be negative.
    """
    rows = x.flatten(row_dims)
    width = rows.shape[-1]
    blocks = F.pad(rows, (0, -width % BLOCK)).unflatten(-1, (-(-width // BLOCK), BLOCK))
    scales = blocks.abs().amax(dim=-1).float().clamp_(min=_SMALLEST)
    levels = _levels(x.device, signed)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales.unsqueeze(-1), middles, out_int32=True)
    if not signed:
        # A second moment rounded to nothing would let the step explode.
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return Coded(codes.to(torch.uint8).flatten(-2)[..., :width].reshape(x.shape), scales)


def decode(coded: Coded, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """The numbers that codes stand for: contiguous, of the codes' shape."""
    codes, scales = coded
    rows = codes.flatten(scales.ndim - 1)
    width = rows.shape[-1]
    blocks = F.pad(rows, (0, -width % BLOCK)).unflatten(-1, (-(-width // BLOCK), BLOCK))
    numbers = _levels(codes.device, signed)[blocks.int()].to(dtype) * scales.unsqueeze(-1)
    return numbers.flatten(-2)[..., :width].reshape(codes.shape).contiguous()


@lru_cache
def _levels(device: torch.device, signed: bool) -> Tensor:
    """The 255 levels, rising: (255,) fp32."""
    finest = 6 if signed else 7
    decades = [
        10.0**-decade * torch.linspace(0.1, 1, 2 ** (finest - decade) + 1, dtype=torch.float64)[1:]
        for decade in reversed(range(_DECADES))
    ]
    positive = torch.cat(decades)
    negative = -positive.flip(0) if signed else positive[:0]
    return torch.cat([negative, positive.new_zeros(1), positive]).float().to(device)


def zeros(shape: torch.Size, row_dims: int, device: torch.device, *, signed: bool) -> Coded:
    """The codes and scales of a tensor of zeros, made without one."""
    num_blocks = -(-math.prod(shape[row_dims:]) // BLOCK)
    zero = _NUM_NEGATIVE if signed else 0
    codes = torch.full(shape, zero, dtype=torch.uint8, device=device)
    scales = torch.full((*shape[:row_dims], num_blocks), _SMALLEST, device=device)
    return Coded(codes, scales)
