"""Quantize in blocks of 256, in Triton: payloads of `comm/compress/blockwise` in one pass.

Coding reads values (and the error so far) and writes scales, codes and the new error: 13 bytes a
value for int8 with its error, all that must move. Decoding adds what any number of ranks sent.

The arithmetic is the schemes', operator by operator, so that payloads have the same bits, but for
the mean that is the scale of signs: its sum has another order. Rounding to nearest is arithmetic
on integers or with a large addend, for no device older than Hopper converts to e4m3.

A block is seen as 64 words of 4 values: a thread reads 16 bytes of fp32. Whatever the scheme, codes
are written as words of 4 bytes, for that is how payloads are aligned. Of the schemes that put a
block's parts (halves, eighths) side by side into a byte, words of all parts are added.

Not here: stochastic rounding and quinary words, which stay with torch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.config.comm import BLOCK
from paceline.kernels.launch import Kernel, Launch
from paceline.kernels.operator import Operator

_SIGNS: tl.constexpr = tl.constexpr(1)
_NIBBLES: tl.constexpr = tl.constexpr(4)
_INTEGERS: tl.constexpr = tl.constexpr(8)
_FLOAT8: tl.constexpr = tl.constexpr(9)


class _Scheme(NamedTuple):
    """A scheme as the kernels' compile-time constants."""

    SCHEME: int
    LARGEST: float
    """The largest level."""
    PARTS: int
    """How many parts of a block share its bytes."""

    @property
    def constants(self) -> dict[str, Any]:
        """By argument."""
        return self._asdict()


SCHEMES: Mapping[str, _Scheme] = {
    "int8": _Scheme(_INTEGERS.value, 127.0, 1),
    "fp8": _Scheme(_FLOAT8.value, 448 / 256, 1),
    "int4": _Scheme(_NIBBLES.value, 7.0, 2),
    "onebit": _Scheme(_SIGNS.value, 1.0, 8),
}
"""By the names of a Job."""


@triton.jit
def _to_nearest(x):
    """Integers, ties to even, of magnitudes below 2^22: adding 1.5 x 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _float8(x):
    """The bits of e4m3, ties to even, of numbers from -448 to 448; and what they stand for."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    is_normal = size >= 0x3C800000  # 2^-6
    steps = _to_nearest(size.to(tl.float32, bitcast=True) * 512.0)
    code = tl.where(is_normal, (rounded >> 20) - 960, steps.to(tl.int32))
    normal = (rounded & 0x7FF00000).to(tl.float32, bitcast=True)
    value = tl.where(is_normal, normal, steps * 0.001953125)
    return code | ((bits >> 24) & 0x80), tl.where(bits < 0, -value, value)


@triton.jit
def _places(blocks, n, IS_EVEN: tl.constexpr):
    """Where the values (blocks, 64, 4) of blocks stand, and which of them are inside."""
    groups = tl.arange(0, 64)
    lanes = tl.arange(0, 4)
    begins = blocks[:, None] * 256 + (groups * 4)[None, :]
    where = begins[:, :, None] + lanes[None, None, :]
    # If even, the same for four neighbours: they are read at once.
    inside = tl.broadcast_to((begins < n)[:, :, None], where.shape) if IS_EVEN else where < n
    return where, inside


@triton.jit
def _shifts(SCHEME: tl.constexpr, PARTS: tl.constexpr):
    """At which bit of its word each value's code begins: (1, 64, 4)."""
    part = tl.arange(0, 64) // (64 // PARTS)
    return (8 * tl.arange(0, 4))[None, None, :] + (SCHEME * part)[None, :, None]


@triton.jit
def _encode(
    values, error, scales, codes,
    n,
    HAS_ERROR: tl.constexpr, IS_EVEN: tl.constexpr, SCHEME: tl.constexpr, LARGEST: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    where, inside = _places(blocks, n, IS_EVEN)
    x = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
    if HAS_ERROR:
        x = tl.load(error + where, mask=inside, other=0.0) + x
    # As integers magnitudes have the same order, and NaN is the largest.
    sizes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if SCHEME == _SIGNS:
        total = tl.sum(tl.sum(sizes.to(tl.float32, bitcast=True), axis=2), axis=1)
        scale = tl.div_rn(total, tl.minimum(n - blocks * 256, 256).to(tl.float32))
    else:
        most = tl.max(tl.max(sizes, axis=2), axis=1).to(tl.float32, bitcast=True)
        scale = tl.div_rn(most, tl.full((BLOCKS,), LARGEST, tl.float32))
    scale = tl.maximum(scale, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    known = blocks * 256 < n
    tl.store(scales + blocks, scale, mask=known)

    inverse = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), scale)
    least = tl.full((BLOCKS,), 1, tl.int32).to(tl.float32, bitcast=True)
    inverse = tl.maximum(inverse, least, propagate_nan=tl.PropagateNan.ALL)
    level = x * inverse[:, None, None]
    level = tl.where(level == level, tl.minimum(tl.maximum(level, -LARGEST), LARGEST), 0.0)
    if SCHEME == _SIGNS:
        code = (level >= 0).to(tl.int32)
        level = tl.where(level >= 0, 1.0, -1.0)
    elif SCHEME == _FLOAT8:
        code, level = _float8(level * 256.0)
        level = level * 0.00390625
    else:
        level = _to_nearest(level)
        code = level.to(tl.int32) & ((1 << SCHEME) - 1)

    WORDS: tl.constexpr = 64 // PARTS
    words = tl.sum(code << _shifts(SCHEME, PARTS), axis=2)
    if PARTS > 1:
        words = tl.sum(tl.reshape(words, (BLOCKS, PARTS, WORDS)), axis=1)
    to_words = codes + blocks[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(to_words, words, mask=known[:, None])
    if HAS_ERROR:
        left = x - level * scale[:, None, None]
        # What isn't finite leaves no trace in later steps.
        is_finite = (left.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        tl.store(error + where, tl.where(is_finite, left, 0.0), mask=inside)


@triton.jit
def _decode(
    scales, codes, values,
    n, num_ranks, stride,
    IS_ADDED: tl.constexpr, IS_EVEN: tl.constexpr, SCHEME: tl.constexpr, LARGEST: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    where, inside = _places(blocks, n, IS_EVEN)
    known = blocks * 256 < n
    WORDS: tl.constexpr = 64 // PARTS
    own_words = blocks[:, None] * WORDS + (tl.arange(0, 64) % WORDS)[None, :]
    shifts = _shifts(SCHEME, PARTS)
    total = tl.zeros((BLOCKS, 64, 4), tl.float32)
    if IS_ADDED:
        total = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
    for rank in range(num_ranks):
        begin = tl.cast(rank, tl.int64) * stride
        scale = tl.load(scales + begin + blocks, mask=known, other=0.0)
        word = tl.load(codes + begin + own_words, mask=known[:, None], other=0)
        code = word[:, :, None] >> shifts
        if SCHEME == _SIGNS:
            level = ((code & 1) * 2 - 1).to(tl.float32)
        elif SCHEME == _FLOAT8:
            # Exponent and mantissa at fp32's place: e4m3's number, but 2^120 times smaller.
            size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 5.192296858534828e33
            level = tl.where((code & 0x80) != 0, -size, size)
        else:
            level = ((code << (32 - SCHEME)) >> (32 - SCHEME)).to(tl.float32)
        total += level * scale[:, None, None]
    tl.store(values + where, total.to(values.dtype.element_ty), mask=inside)


def _rule(n: int) -> Launch:
    """8 blocks for 4 warps: 16 values of each thread are in flight."""
    return Launch({"BLOCKS": 8}, num_warps=4)


def _others(n: int) -> list[Launch]:
    return [Launch({"BLOCKS": blocks}, warps) for blocks in (4, 8, 16, 32) for warps in (2, 4, 8)]


_SIZES = (2**24,)
ENCODE = Kernel(
    "quantize.encode", _encode,
    "values: *T; error scales: *fp32; codes: *i32; n: i64",
    _rule, _SIZES,
    [
        {"HAS_ERROR": has_error, "IS_EVEN": True, **scheme.constants}
        for scheme in SCHEMES.values()
        for has_error in (False, True)
    ],
    _others, dtypes=("bf16", "fp32"),
)  # fmt: skip
DECODE = Kernel(
    "quantize.decode", _decode,
    "scales: *fp32; codes: *i32; values: *T; n: i64; num_ranks stride: i32",
    _rule, _SIZES,
    [
        {"IS_ADDED": is_added, "IS_EVEN": True, **scheme.constants}
        for scheme in SCHEMES.values()
        for is_added in (False, True)
    ],
    _others, dtypes=("bf16", "fp32"),
)  # fmt: skip
KERNELS = (ENCODE, DECODE)


def _run_encode(codec: str, values: Tensor, payload: Tensor, error: Tensor | None) -> None:
    n = len(values)
    if not n:
        return
    scheme = SCHEMES[codec]
    scales, codes = _fields(payload.view(1, -1), n)
    given = scales if error is None else error
    constants = {"HAS_ERROR": error is not None, "IS_EVEN": n % 4 == 0, **scheme.constants}
    ENCODE(_grid(n), n, values, values, given, scales, codes, n, **constants)


def _run_decode(codec: str, payloads: Tensor, values: Tensor, add: bool) -> None:
    n = len(values)
    if not n:
        return
    scheme = SCHEMES[codec]
    scales, codes = _fields(payloads, n)
    constants = {"IS_ADDED": add, "IS_EVEN": n % 4 == 0, **scheme.constants}
    ranks, stride = len(payloads), payloads.stride(0) // 4
    DECODE(_grid(n), n, values, scales, codes, values, n, ranks, stride, **constants)


def _fields(payloads: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """From where scales (fp32) and codes (int32) of the first of payloads (ranks, bytes) lie."""
    words = payloads.view(dtype=torch.int32)
    num_blocks = triton.cdiv(n, BLOCK)
    return words[:, :num_blocks].view(dtype=torch.float32), words[:, num_blocks:]


def _grid(n: int) -> Any:
    return lambda blocks: (triton.cdiv(n, BLOCK * blocks["BLOCKS"]),)


encode = Operator(
    "quantize_encode",
    _run_encode,
    lambda codec, values, payload, error: None,
    mutates=("payload", "error"),
)
decode = Operator(
    "quantize_decode", _run_decode, lambda codec, payloads, values, add: None, mutates=("values",)
)
