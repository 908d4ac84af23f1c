"""Rising positions in few bits (Elias 1974, https://doi.org/10.1145/321812.321820).

How it works: the low 8 or 16 bits of each position as they are; the high ones in unary, as a bitmap
in which the i-th one stands at (high bits of position i) + i. That is about a tenth more than the
least possible, and its length depends only on how many positions there are among how many: k among
n take k x (1 + 1/8) + n / 2048 bytes with 8 low bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# 16 low bits take less room than 8 where fewer than one of so many is chosen.
_SPARSE = 2048


class PositionLayout(NamedTuple):
    """Sizes of k positions among n."""

    k: int
    num_low_bytes: int
    """Per position."""
    num_high_bytes: int
    """In all."""


def position_layout(k: int, n: int) -> PositionLayout:
    """The sizes of k positions below n."""
    num_low_bytes = 1 if k * _SPARSE >= n else 2
    num_bits = k + (n >> 8 * num_low_bytes)
    return PositionLayout(k, num_low_bytes, -(-num_bits // 8))


def write(positions: Tensor, sizes: PositionLayout, low: Tensor, high: Tensor) -> None:
    """Write rising positions (k,).

    Args:
        low: (k x num_low_bytes,) uint8, in place.
        high: (num_high_bytes,) uint8, in place.
    """
    shift = 8 * sizes.num_low_bytes
    least = positions.to(torch.int32).view(torch.uint8).view(-1, 4)[:, : sizes.num_low_bytes]
    low.copy_(least.reshape(-1))
    ones = (positions >> shift) + torch.arange(len(positions), device=positions.device)
    bitmap = torch.zeros(len(high) * 8, dtype=torch.uint8, device=high.device)
    bitmap[ones] = 1
    torch.sum(bitmap.view(-1, 8) * _bits(high.device), dim=1, dtype=torch.uint8, out=high)


def read(sizes: PositionLayout, low: Tensor, high: Tensor) -> Tensor:
    """The positions that were written: (k,) int64."""
    shift = 8 * sizes.num_low_bytes
    ones = (high.view(-1, 1) & _bits(high.device)).view(-1).nonzero().view(-1)
    highs = ones - torch.arange(sizes.k, device=high.device)
    lows = low.view(-1, sizes.num_low_bytes).long()
    if sizes.num_low_bytes == 2:
        lows = lows[:, :1] + (lows[:, 1:] << 8)
    return (highs << shift) + lows.view(-1)


def _bits(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
