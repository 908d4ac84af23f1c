"""Codecs that treat values one by one or in short blocks, from fp16 to onebit.

How it works: a payload is the blocks' fp32 scales, then their levels (`kernels/quantize`); the last
block is filled up with zeros. A scale in bf16, rounded up, would save 0.8 % of int8's bytes and
raise its error by as much, so scales are fp32. Values are coded in fp32, those of fp64 in fp64;
above fp32's range they count as infinite. On a GPU a kernel does it in one pass, where kernels are
chosen, but for quinary and stochastic rounding.

| codec | bits per value | step of the rounding |
|---|---|---|
| fp16, bf16 | 16 | 2^-11, 2^-8 of the value |
| int8 | 8.125 | 1/127 of the block's largest magnitude |
| fp8 | 8.125 | 2^-3 of the value's power of two |
| int4 | 4.125 | 1/7 of the block's largest magnitude |
| quinary | 2.53 | 0.89 of the block's root mean square; two steps at most |
| onebit | 1.125 | |

Not here: who sends payloads to whom (`means`), and how long errors are kept (`feedback`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.compress.chunks import chunk_values, noise_of
from paceline.comm.compress.codec import BlockCodec, aligned, check, refuse_seed, working_type
from paceline.config.comm import BLOCK
from paceline.kernels import quantize
from paceline.kernels.quantize.floats import write_rounded
from paceline.kernels.quantize.schemes import (
    Float8,
    Integers,
    Nibbles,
    Scheme,
    Signs,
    store_scales,
    to_levels,
)
from paceline.kernels.quantize.words import Quinary

_SCALE_BYTES = torch.float32.itemsize


class _Blocks(NamedTuple):
    """Some whole blocks, or one that is cut short."""

    values: Tensor
    """(n,): of the buffer."""
    error: Tensor | None
    """(n,): of the buffer."""
    scales: Tensor
    """(m, 1) fp32: of the payload."""
    codes: Tensor
    """(m, bytes of a block's levels) uint8: of the payload."""


@dataclass(frozen=True)
class Blockwise:
    """A scale for each BLOCK values."""

    name: str
    scheme: Scheme

    @property
    def is_unbiased(self) -> bool:
        """With a seed, for the schemes that round stochastically."""
        return self.scheme.is_stochastic

    def num_bytes(self, num_values: int) -> int:
        """Scales and levels of whole blocks, and what makes a multiple of ALIGNMENT."""
        total = -(-num_values // BLOCK) * (_SCALE_BYTES + self.scheme.num_bytes(BLOCK))
        return aligned(total)

    def encode(self, values: Tensor, payload: Tensor, *, seed: int | None = None) -> None:
        """See BlockCodec."""
        self._encode(values, None, payload, seed)

    def encode_with_error(
        self, values: Tensor, error: Tensor, payload: Tensor, *, seed: int | None = None
    ) -> None:
        """See BlockCodec."""
        self._encode(values, error, payload, seed)

    def _encode(
        self, values: Tensor, error: Tensor | None, payload: Tensor, seed: int | None
    ) -> None:
        check(self, values, payload, error)
        if not self.is_unbiased:
            refuse_seed(self, seed)
        if seed is None and quantize.takes(self.name, values, error):
            quantize.encode(self.name, values, payload, error)
            return
        chunk = chunk_values(values.device)
        dtype = working_type(values) if error is None else working_type(error)
        scratch = values.new_empty(min(chunk, -(-len(values) // BLOCK) * BLOCK), dtype=dtype)
        noise = noise_of(values.device, seed, len(scratch))
        for blocks, drawn in zip(self._cut(values, error, payload, chunk), noise, strict=False):
            self._encode_blocks(blocks, scratch, drawn)

    def _encode_blocks(self, blocks: _Blocks, scratch: Tensor, noise: Tensor | None) -> None:
        size = len(blocks.scales) * BLOCK
        levels = scratch[:size].view(-1, BLOCK)
        x = _input(blocks, scratch.dtype)
        whole = len(x) == size
        given = x.view(-1, BLOCK if whole else len(x))
        scales = self.scheme.scales(given, levels[:, : given.shape[1]])
        if not whole:
            given = torch.nn.functional.pad(given, (0, size - len(x)))
        scales = store_scales(scales, blocks.scales)
        finite = to_levels(given, scales, self.scheme.largest, levels)
        drawn = None if noise is None else noise[:size].view(-1, BLOCK)
        self.scheme.write(levels, blocks.codes, drawn)
        if blocks.error is not None:
            given.addcmul_(levels, scales, value=-1)
            _keep_error(blocks.error, given, finite)

    def decode(self, payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        """See BlockCodec."""
        check(self, values, payload)
        if quantize.takes(self.name, values):
            quantize.decode(self.name, payload.view(1, -1), values, add=add)
            return
        chunk = chunk_values(values.device)
        dtype = working_type(values)
        scratch = values.new_empty(min(chunk, -(-len(values) // BLOCK) * BLOCK), dtype=dtype)
        for blocks in self._cut(values, None, payload, chunk):
            levels = scratch[: len(blocks.scales) * BLOCK].view(-1, BLOCK)
            self.scheme.read(blocks.codes, levels)
            _put(blocks.values, levels, blocks.scales.to(dtype), add=add)

    def _cut(
        self, values: Tensor, error: Tensor | None, payload: Tensor, chunk: int
    ) -> Iterator[_Blocks]:
        """Chunks of whole blocks, then the block that is cut short."""
        num_blocks = -(-len(values) // BLOCK)
        coded = payload[: num_blocks * (_SCALE_BYTES + self.scheme.num_bytes(BLOCK))]
        scales = coded[: num_blocks * _SCALE_BYTES].view(torch.float32).view(-1, 1)
        codes = coded[num_blocks * _SCALE_BYTES :].view(-1, self.scheme.num_bytes(BLOCK))
        whole = len(values) // BLOCK * BLOCK
        edges = [*range(0, whole, chunk), whole, len(values)]
        for begin, end in pairwise(edges):
            if begin == end:
                continue
            rows = slice(begin // BLOCK, -(-end // BLOCK))
            part = None if error is None else error[begin:end]
            yield _Blocks(values[begin:end], part, scales[rows], codes[rows])


def _input(blocks: _Blocks, dtype: torch.dtype) -> Tensor:
    """What is to be coded: (n,); where there is an error it is written there."""
    if blocks.error is None:
        return blocks.values.to(dtype)
    return blocks.error.add_(blocks.values)


def _keep_error(error: Tensor, left: Tensor, finite: bool) -> None:
    """Write what is left (m, block) into the error (n,), where it isn't that already."""
    if left.data_ptr() != error.data_ptr():
        error.copy_(left.view(-1)[: len(error)])
    if not finite:
        error.nan_to_num_(0.0, 0.0, 0.0)


def _put(values: Tensor, levels: Tensor, scales: Tensor, *, add: bool) -> None:
    """Write or add levels (m, block) times scales (m, 1) to values (n,)."""
    if len(values) == levels.numel() and values.dtype == levels.dtype:
        blocks = values.view(levels.shape)
        if add:
            blocks.addcmul_(levels, scales)
        else:
            torch.mul(levels, scales, out=blocks)
        return
    decoded = levels.mul_(scales).view(-1)[: len(values)]
    values.add_(decoded) if add else values.copy_(decoded)


@dataclass(frozen=True)
class ShortFloats:
    """Values as shorter floats."""

    name: str
    dtype: torch.dtype
    is_unbiased: bool = True

    def num_bytes(self, num_values: int) -> int:
        """Two per value, and what makes a multiple of ALIGNMENT."""
        return aligned(num_values * self.dtype.itemsize)

    def encode(self, values: Tensor, payload: Tensor, *, seed: int | None = None) -> None:
        """See BlockCodec."""
        check(self, values, payload)
        chunk = chunk_values(values.device)
        noise = noise_of(values.device, seed, min(chunk, len(values)))
        parts = zip(values.split(chunk), self._read(payload, values).split(chunk), strict=True)
        for (part, coded), drawn in zip(parts, noise, strict=False):
            _write(part, coded, drawn)

    def encode_with_error(
        self, values: Tensor, error: Tensor, payload: Tensor, *, seed: int | None = None
    ) -> None:
        """See BlockCodec."""
        check(self, values, payload, error)
        chunk = chunk_values(values.device)
        noise = noise_of(values.device, seed, min(chunk, len(values)))
        coded = self._read(payload, values)
        parts = zip(*(each.split(chunk) for each in (values, error, coded)), strict=True)
        for (part, left, short), drawn in zip(parts, noise, strict=False):
            _write(left.add_(part), short, drawn)
            left.sub_(short.to(left.dtype))
            if left.is_cuda or not math.isfinite(left.sum()):
                left.nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        """See BlockCodec."""
        check(self, values, payload)
        coded = self._read(payload, values)
        if not add:
            values.copy_(coded)
            return
        chunk = chunk_values(values.device)
        for part, short in zip(values.split(chunk), coded.split(chunk), strict=True):
            part.add_(short.to(part.dtype))

    def _read(self, payload: Tensor, values: Tensor) -> Tensor:
        return payload.view(self.dtype)[: len(values)]


def _write(values: Tensor, coded: Tensor, noise: Tensor | None) -> None:
    write_rounded(values, coded, None if noise is None else noise[: len(values)])


BLOCKWISE: dict[str, BlockCodec] = {
    "fp16": ShortFloats("fp16", torch.float16),
    "bf16": ShortFloats("bf16", torch.bfloat16),
    "int8": Blockwise("int8", Integers()),
    "fp8": Blockwise("fp8", Float8()),
    "int4": Blockwise("int4", Nibbles()),
    "quinary": Blockwise("quinary", Quinary()),
    "onebit": Blockwise("onebit", Signs()),
}
"""By the names of a Job."""
