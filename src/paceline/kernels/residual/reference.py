"""Bias, dropout and residual, the specification: plain torch, in any floating type.

Which values are dropped is a function of the seed and of where a value stands: Philox4x32-10 (a
counter in, four random words of 32 bits out) on the number of its group of eight values. So a mask
needs no memory and no order, and every implementation can have the same one.

Paper: https://doi.org/10.1145/2063384.2063405.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LANES = 8
"""Values that share a counter: each takes 16 of its 128 bits."""
LEVELS = 1 << 16
_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


class Dropping(NamedTuple):
    """How a share of values is dropped, in steps of 2^-16."""

    threshold: int
    """Of 65536 levels, those that are dropped."""
    scale: float
    """What the others are multiplied by, so that the expectation stays."""


def dropping(p: float) -> Dropping:
    """The nearest to a share of p, from 0 to 1."""
    threshold = round(p * LEVELS)
    kept = LEVELS - threshold
    return Dropping(threshold, LEVELS / kept if kept else 0.0)


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor
) -> Tensor:
    """residual + dropout(x + bias), computed in fp32 at least, in x's type."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    if bias is not None:
        value = value + bias.to(wide)
    threshold, scale = dropping(p)
    if threshold:
        value = torch.where(kept(x, threshold, seed), value * scale, 0.0)
    return (residual.to(wide) + value).to(x.dtype)


def kept(x: Tensor, threshold: int, seed: Tensor) -> Tensor:
    """Which values are kept: of x's shape, bool."""
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    groups = -(-width // LANES)
    counters = torch.arange(rows * groups, device=x.device)
    words = torch.stack(philox(seed, counters), dim=-1)  # (rows x groups, 4)
    levels = torch.stack((words & 0xFFFF, words >> 16), dim=-1)  # (rows x groups, 4, 2)
    return (levels.view(rows, groups * LANES)[:, :width] >= threshold).view(x.shape)


def philox(seed: Tensor, counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words (int64, from 0 to 2^32 - 1) of each counter (int64)."""
    key_a, key_b = seed & _WORD, (seed >> 32) & _WORD
    a, b = counters & _WORD, (counters >> 32) & _WORD
    c = d = torch.zeros_like(counters)
    for _ in range(_ROUNDS):
        high_a, low_a = _product(a, _ROUND_A)
        high_c, low_c = _product(c, _ROUND_B)
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = (key_a + _KEY_A) & _WORD, (key_b + _KEY_B) & _WORD
    return a, b, c, d


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of words, in int64 without overflow."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD
