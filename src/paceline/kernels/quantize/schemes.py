"""Quantize, in few passes over memory, in place.

A block's scale makes its largest magnitude the largest level; each value becomes the nearest level
(ties to even), and is read as level times scale. The scale is rounded to fp32, which travels, and
no smaller than fp32's smallest normal number.

NaN and infinity survive: a block that has NaN is NaN throughout, one that has an infinity is
infinite there (with its sign) and NaN elsewhere; of signs, which know no zero, infinite throughout.

How it works: a kernel that quantises waits for memory, and an eager operator is a pass over it. The
caller hands in chunks that stay in a core's cache (`comm/compress/blockwise`), so a pass costs a
few hundred microseconds per million values, and each scheme is written with the operators that
torch has vectorised: measured on one Xeon core, `linalg.vector_norm(inf)`, `aminmax`, comparisons
into bool and conversions from fp8 take 10 to 40 times the pass that stands here in their place.

Rounding is to nearest (ties to even), or stochastic: `noise` is 16 random bits per value that are
added before rounding, so that the mean over draws is the value, to a 2^-15 of a step, and a value
that is a level stays as it is.

Not here: scales of blocks that are cut short, payloads, chunks, errors (`comm/compress`).

Papers: https://arxiv.org/abs/1610.02132 (integers), https://arxiv.org/abs/2209.05433 (fp8, e4m3),
https://arxiv.org/abs/1901.09847 (signs times the mean magnitude).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
"""The smallest scale."""
LEAST = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
"""The smallest reciprocal of a scale: an infinity times it is one, times nothing it isn't."""
_NOISE_BITS = 16
_FLOAT8_MOST = torch.finfo(torch.float8_e4m3fn).max
# e4m3's bits, put where fp16 has exponent and mantissa, are fp16 numbers this much smaller.
_FLOAT8_BIAS = 256.0
_FLOAT16_SIGN_AND_LOW = ~0x4000
# e4m3's numbers, made so much smaller, have fp32's exponent field and subnormals.
_FLOAT8_TO_BITS = 2.0**-120
_FLOAT8_MANTISSA_SHIFT = 20


@dataclass(frozen=True)
class Scheme:
    """How levels are made, rounded, written and read. A chunk is of m blocks."""

    largest: ClassVar[float]
    """Magnitude of the largest level."""
    is_stochastic: ClassVar[bool] = True
    """Whether it can round stochastically."""

    def num_bytes(self, block: int) -> int:
        """Bytes of a block's levels."""
        return block

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """A scale per block: (m, <= block) to (m, 1); scratch is of x's shape."""
        return torch.abs(x, out=scratch).amax(dim=1, keepdim=True).div_(self.largest)

    def write(self, levels: Tensor, codes: Tensor, noise: Tensor | None) -> None:
        """Round levels (m, block) in place, and write them: (m, num_bytes) uint8.

        Args:
            noise: (m, block) int16, random bits; None rounds to nearest.
        """
        raise NotImplementedError

    def read(self, codes: Tensor, levels: Tensor) -> None:
        """The levels (m, block) of codes (m, num_bytes), in place."""
        raise NotImplementedError


def store_scales(scales: Tensor, stored: Tensor) -> Tensor:
    """Round scales (m, 1) to fp32, in place into stored (m, 1); returns them in their own type."""
    stored.copy_(scales).clamp_(min=TINY)
    return stored.to(scales.dtype)


def to_levels(x: Tensor, scales: Tensor, largest: float, levels: Tensor) -> bool:
    """Write x (m, block) in units of its scales (m, 1) into levels (m, block).

    Returns:
        whether all of x may be taken as finite; on an accelerator nobody waits to know it.
    """
    torch.mul(x, scales.reciprocal().clamp_(min=LEAST), out=levels)
    if x.device.type == "cpu" and math.isfinite(scales.sum()):
        return True
    levels.nan_to_num_(0.0, largest, -largest)
    return False


class Integers(Scheme):
    """Integers of a byte."""

    largest = 127

    def write(self, levels: Tensor, codes: Tensor, noise: Tensor | None) -> None:
        """As `Scheme`."""
        _round(levels, self.largest, noise)
        codes.view(torch.int8).copy_(levels)

    def read(self, codes: Tensor, levels: Tensor) -> None:
        """As `Scheme`."""
        levels.copy_(codes.view(torch.int8))


class Nibbles(Scheme):
    """Integers of four bits: a block's first half in the low nibbles, its second in the high."""

    largest = 7

    def num_bytes(self, block: int) -> int:
        """One per two values."""
        return block // 2

    def write(self, levels: Tensor, codes: Tensor, noise: Tensor | None) -> None:
        """As `Scheme`."""
        _round(levels, self.largest, noise)
        low, high = levels.to(torch.int8).chunk(2, dim=1)
        torch.add(low & 15, high, alpha=16, out=codes.view(torch.int8))

    def read(self, codes: Tensor, levels: Tensor) -> None:
        """Shifting right keeps the sign."""
        low, high = levels.chunk(2, dim=1)
        signed = codes.view(torch.int8)
        low.copy_((signed << 4) >> 4)
        high.copy_(signed >> 4)


class Float8(Scheme):
    """e4m3: three bits of mantissa, whatever the magnitude, over four orders of magnitude.

    Levels are e4m3's numbers divided by 256, so that fp16 can read them.
    """

    largest = _FLOAT8_MOST / _FLOAT8_BIAS

    def write(self, levels: Tensor, codes: Tensor, noise: Tensor | None) -> None:
        """Noise is added to the mantissa that is cut off."""
        levels.mul_(_FLOAT8_BIAS)
        if noise is None:
            codes.view(torch.float8_e4m3fn).copy_(levels)
        else:
            small = levels.float() * _FLOAT8_TO_BITS
            bits = cut_mantissa(small, _FLOAT8_MANTISSA_SHIFT, noise)
            codes.copy_((bits >> 8).bitwise_and_(0x80).bitwise_or_(bits & 0x7F))
        self.read(codes, levels)

    def read(self, codes: Tensor, levels: Tensor) -> None:
        """Sign, exponent and mantissa move to where fp16 has them."""
        bits = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(_FLOAT16_SIGN_AND_LOW)
        levels.copy_(bits.view(torch.float16))


class Signs(Scheme):
    """One bit per value, times the mean magnitude; zero counts as positive.

    Bit j of a block's byte i is of value j x block / 8 + i.
    """

    largest = 1
    is_stochastic = False

    def num_bytes(self, block: int) -> int:
        """One per eight values."""
        return block // 8

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """The mean magnitude."""
        return torch.abs(x, out=scratch).mean(dim=1, keepdim=True)

    def write(self, levels: Tensor, codes: Tensor, noise: Tensor | None) -> None:
        """Take the signs and write them."""
        assert noise is None, "signs are not drawn"
        positive = torch.ge(levels, 0.0, out=levels).to(torch.uint8)
        bits = positive * _bits(levels.shape[1], levels.device)
        while bits.shape[1] > 2 * codes.shape[1]:
            bits = torch.bitwise_or(*bits.chunk(2, dim=1))
        torch.bitwise_or(*bits.chunk(2, dim=1), out=codes)
        levels.copy_(_plus_minus(positive))

    def read(self, codes: Tensor, levels: Tensor) -> None:
        """As `Scheme`."""
        bits = codes.repeat(1, 8) & _bits(levels.shape[1], levels.device)
        levels.copy_(_plus_minus(bits.clamp_(max=1)))


def _plus_minus(positive: Tensor) -> Tensor:
    """1 where the bytes are 1, -1 where they are 0; in place."""
    return positive.view(torch.int8).mul_(2).sub_(1)


@lru_cache
def _bits(block: int, device: torch.device) -> Tensor:
    """The bit of each value of a block: (block,) uint8."""
    return (1 << (torch.arange(block, device=device) * 8 // block)).to(torch.uint8)


def _round(levels: Tensor, largest: float, noise: Tensor | None) -> None:
    """Round to integers in place; odd noise is as often up as down and never moves an integer."""
    if noise is not None:
        levels.add_(noise.bitwise_or_(1), alpha=2.0**-_NOISE_BITS)
    levels.round_()
    if noise is not None:
        levels.clamp_(-largest, largest)


def cut_mantissa(values: Tensor, shift: int, noise: Tensor) -> Tensor:
    """Bits of fp32 without the last `shift`, which go up as often as what is cut off asks for.

    Args:
        values: (m, block) fp32, finite, with exponent fields that leave room for the sign.
        shift: bits that are cut off, 13 at least.
        noise: (m, block) int16, random bits.

    Returns:
        (m, block) int16: the sign at the top, exponent and what is left of the mantissa at the
        bottom; what lies between repeats the sign.
    """
    spread = noise.to(torch.int32)
    if shift != _NOISE_BITS:
        spread = spread << (shift - 16) if shift > 16 else spread >> (16 - shift)
    bits = spread.add_(1 << (shift - 1)).add_(values.view(torch.int32))
    high = (bits >> 16).to(torch.int16)
    if shift == 16:
        return high
    return (bits >> shift).to(torch.int16).bitwise_and_(0x7FFF).bitwise_or_(high & -0x8000)
