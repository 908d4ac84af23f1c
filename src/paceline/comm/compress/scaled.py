"""Means in the form of a codec of few levels, in units that each row and column has of its own.

Why: a scale for a block of neighbours leaves as much noise on a small value as on a large one.
Error feedback sends the noise back later, so sums stay right, but squares don't: AdamW divides by
the root of the mean square of what arrives, and where that is mostly noise it steps too little (the
rows of rare tokens are the worst of them).

How it works: values and errors of a matrix are divided by an estimate of each value's own root mean
square before the codec sees them, and multiplied by it afterwards. The estimate is the product of a
row's and a column's (as Adafactor keeps second moments, https://arxiv.org/abs/1804.04235), of the
means that arrived lately: every rank knows those, so nothing is sent for it. Vectors have no units.

Not here: the codec and the exchange (`means`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.compress.codec import BlockCodec
from paceline.comm.compress.feedback import BufferPart
from paceline.comm.compress.means import CodecMeans, CompressedMean
from paceline.comm.queue import Job

_MEMORY = 0.95
"""Of the squares that a step adds to: that of AdamW's second moment, whose noise is to be small."""
_LEAST = 0.01
"""Of the mean square of a matrix: what a row or column has at least. Assumed."""
_CHUNK_VALUES = 1 << 17
"""Fits a core's cache. Not what is fastest here (`chunks`): sums over columns are added up chunk by
chunk, and all ranks need the same bits."""
_TINY = torch.finfo(torch.float32).tiny


class ScaledMeans:
    """Means in the form of a codec, and the squares by which units go."""

    def __init__(self, codec: BlockCodec, group: dist.ProcessGroup) -> None:
        self._blocks = CodecMeans(codec, group)
        self._squares: dict[str, Tensor] = {}

    def takes(self, shape: torch.Size) -> bool:
        """Any."""
        return True

    def mean_of(self, parts: Sequence[BufferPart], like: Tensor) -> "ScaledMean":
        """The mean of a buffer of these tensors, in units that go on where they stand."""
        return ScaledMean(self._blocks.mean_of(parts, like), ScaleUnits(parts, self._squares, like))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, the same on all ranks: {name: (rows + columns,)}."""
        return self._squares

    def load(self, squares: Mapping[str, Tensor]) -> None:
        """Go on with these."""
        self._squares = dict(squares)


class ScaledMean:
    """The mean of one buffer, see the module."""

    def __init__(self, mean: CompressedMean, units: "ScaleUnits") -> None:
        self._mean, self._units = mean, units
        self.sent_bytes = mean.sent_bytes

    def average(self, values: Tensor, errors: Tensor) -> Job:
        """Replace each rank's values by the mean of all, as `CompressedMean` says."""
        self._units.divide(values, errors)
        yield from self._mean.average(values, errors)
        self._units.multiply(values, errors)
        self._units.learn(values)


class _Rows(NamedTuple):
    """Some rows of a matrix in a buffer."""

    place: slice
    """In the buffer."""
    rows: slice
    """Of the matrix."""


@dataclass(frozen=True)
class _Matrix:
    chunks: tuple[_Rows, ...]
    squares: Tensor
    """(rows + columns,) fp32: what their mean squares were lately."""
    num_rows: int


class ScaleUnits:
    """The units of the matrices in a buffer.

    Args:
        parts: of the buffer, in order.
        squares: by name, those that are known; what isn't is added, as zeros.
        like: gives the device.
    """

    def __init__(
        self, parts: Sequence[BufferPart], squares: dict[str, Tensor], like: Tensor
    ) -> None:
        self._matrices: list[_Matrix] = []
        at = 0
        for part in parts:
            if part.is_compressed and len(part.shape) > 1:
                num_rows, length = part.shape[0], part.shape[0] + part.shape[1:].numel()
                if part.name not in squares:
                    squares[part.name] = torch.zeros(length, device=like.device)
                chunks = tuple(_chunks(at, part.shape, _CHUNK_VALUES))
                self._matrices.append(_Matrix(chunks, squares[part.name], num_rows))
            at += part.num_values

    def divide(self, *buffers: Tensor) -> None:
        """Take values (n,) into units, in place."""
        for matrix in self._matrices:
            self._apply(matrix, [unit.reciprocal() for unit in _units(matrix)], buffers)

    def multiply(self, *buffers: Tensor) -> None:
        """Take values (n,) out of units, in place."""
        for matrix in self._matrices:
            self._apply(matrix, _units(matrix), buffers)

    def learn(self, mean: Tensor) -> None:
        """Let units follow the mean (n,) that arrived; what isn't finite in it teaches nothing."""
        for matrix in self._matrices:
            found = torch.zeros_like(matrix.squares)
            for_rows, for_columns = _sides(found, matrix.num_rows)
            for chunk in matrix.chunks:
                values = mean[chunk.place].view(-1, len(for_columns)).square()
                for_rows[chunk.rows] = values.mean(1)
                for_columns += values.sum(0).div_(matrix.num_rows)
            kept = torch.where(found.isfinite(), found, matrix.squares)
            matrix.squares.lerp_(kept, 1 - _MEMORY)

    def _apply(self, matrix: _Matrix, factors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for_rows, for_columns = factors
        for chunk in matrix.chunks:
            of_chunk = for_rows[chunk.rows, None] * for_columns
            for buffer in buffers:
                buffer[chunk.place].view(of_chunk.shape).mul_(of_chunk)


def _units(matrix: _Matrix) -> tuple[Tensor, Tensor]:
    """Factors of rows and of columns, whose products are units: all alike while none is known."""
    for_rows, for_columns = _sides(matrix.squares, matrix.num_rows)
    level = for_columns.mean()
    level = torch.where(level > _TINY, level, 1.0)
    return (for_rows + _LEAST * level).sqrt_(), (for_columns / level + _LEAST).sqrt_()


def _sides(squares: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Squares (rows + columns,) of the rows and of the columns, as views."""
    return squares[:num_rows], squares[num_rows:]


def _chunks(start: int, shape: torch.Size, most_values: int) -> Iterator[_Rows]:
    """Whole rows of a matrix that begins there in a buffer, so few that they stay in a cache."""
    width = shape[1:].numel()
    height = max(1, most_values // width)
    for first in range(0, shape[0], height):
        end = min(first + height, shape[0])
        yield _Rows(slice(start + first * width, start + end * width), slice(first, end))
