"""Curves: how fast a device and its links really are, by size, with the origin of the numbers.

A peak rate is never reached, and by how much it is missed depends on the size of the work: a
product of small matrices may see a tenth of it. So a device carries measured curves; between their
points one interpolates over the logarithms of the sizes, and beyond them the end's value holds.

Curves of the catalogue's devices are data files of this package (`paceline.config.catalogue`);
`paceline bench` measures those of any other device.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.config.frozen import Count, FrozenConfig
from paceline.config.layers import require

Sizes = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
"""Positive and increasing."""
Values = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]


class MatmulCurve(FrozenConfig):
    """The rate of a matrix product (m, k) x (k, n), as a share of the device's peak."""

    m: Sizes
    n: Sizes
    k: Sizes
    share: Values
    """Of len(m) x len(n) x len(k) points, k running fastest; 0 to 1."""
    tile: Annotated[tuple[int, int], Field(strict=False)] | None = None
    """Rows and columns of the result that one processor works on at a time, where the kernels keep
    to one tile, so that between the curve's points whole waves of tiles count; None: they adapt."""
    source: str
    """Where, when and by what it was measured."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _must_fit(self.share, self.m, self.n, self.k)
        return self


class AttentionCurve(FrozenConfig):
    """The rate of causal attention, as a share of the device's peak; half the square counts.

    Measured with samples and heads enough to fill the device.
    """

    seq_len: Sizes
    head_dim: Sizes
    forward: Values
    """Of len(seq_len) x len(head_dim) points, head_dim running fastest; 0 to 1."""
    backward: Values
    """The same for the backward pass, of 2.5 times the forward FLOPs."""
    source: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _must_fit(self.forward, self.seq_len, self.head_dim)
        _must_fit(self.backward, self.seq_len, self.head_dim)
        return self


class MemoryCurve(FrozenConfig):
    """Seconds of a kernel that only moves data, by the bytes that it reads and writes."""

    bytes: Sizes
    seconds: Values
    source: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _must_fit(self.seconds, self.bytes)
        return self


class SharingCurve(FrozenConfig):
    """How ranks that share a node's cores compute: how much faster while others wait, who leave
    them their cores, caches and bandwidth; and how unevenly, while all do."""

    num_ranks: Sizes
    """Ranks of a node that compute at once; the last: all, as in the other curves."""
    pace: Values
    """Over that with all of them, whose own is 1."""
    spread: Annotated[float, Field(ge=0, le=1)] = 0.0
    """By how much equal passes of some tens of milliseconds differ while all ranks compute, from
    each to the next: a standard deviation over the mean. 0 where nobody measured it."""
    source: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _must_fit(self.pace, self.num_ranks)
        return self


class CollectiveCurve(FrozenConfig):
    """Seconds of a collective among some ranks of one tier, by the size of the whole buffer."""

    num_ranks: Count
    bytes: Sizes
    """What nccl-tests calls size: the reduced buffer, the gathered one, the scattered one; of an
    all-to-all what one rank sends, its own part included."""
    seconds: Values
    source: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _must_fit(self.seconds, self.bytes)
        return self


class CodecCurve(FrozenConfig):
    """Seconds of a compression (`comm`), by the number of fp32 values."""

    values: Sizes
    encode: Values
    """Values and the error of earlier ones into a payload and its error."""
    decode: Values
    """A payload, added to values."""
    source: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _must_fit(self.encode, self.values)
        _must_fit(self.decode, self.values)
        return self


class DeviceCurves(FrozenConfig):
    """What was measured of a device; what is missing is not known."""

    matmul: Mapping[str, MatmulCurve] = Field(default_factory=dict)
    """By arithmetic: fp32, tf32, bf16, fp16, fp8, fp4."""
    attention: Mapping[str, AttentionCurve] = Field(default_factory=dict)
    """By backend: "flash" (as FlashAttention-2), "flash3" (FlashAttention-3, cuDNN and others made
    for the generation; missing: the same as "flash"), "unfused"; "flash.bf16" where it was measured
    in an arithmetic of its own besides."""
    memory: MemoryCurve | None = None
    sharing: SharingCurve | None = None
    """Of CPU ranks; None: as fast as while all compute."""
    num_processors: Count | None = None
    """Streaming multiprocessors, over which work is shared out in whole tiles; None: not known."""
    is_quick: bool = False
    """Measured in seconds before a first run: enough for an MFU and a rough prediction, not to
    choose between layouts."""


def _must_fit(values: Sequence[float], *sizes: Sequence[float]) -> None:
    for axis in sizes:
        require(
            axis[0] > 0 and all(a < b for a, b in itertools.pairwise(axis)),
            f"sizes {list(axis)} must be positive and increasing; sort them.",
        )
    points = math.prod(map(len, sizes))
    require(
        len(values) == points and all(value > 0 for value in values),
        f"a curve over {points} sizes has {len(values)} values; give as many, all above 0.",
    )
