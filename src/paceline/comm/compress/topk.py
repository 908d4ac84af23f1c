"""The codec topk: the largest values, exactly so many, and where they stood.

How it works: of n values the share x n largest magnitudes are sent (`kernels/select`), as
bf16, their positions in Elias' code: 3.2 bytes per kept value at 1 %, 3.6 at 0.1 %, where fp32 and
32-bit positions take 8. What isn't sent, and what bf16 rounds off, is the error, which the caller
must keep and send later: without it this learns little (https://arxiv.org/abs/1809.07599).

NaN and infinity are the largest of all: if there are more than are sent, only so many are.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.comm.compress.codec import aligned, check, refuse_seed
from paceline.kernels.select import positions
from paceline.kernels.select.largest import largest


class _Fields(NamedTuple):
    """A payload, cut up."""

    values: Tensor
    """(k,) bf16"""
    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class TopK:
    """A share of the values."""

    share: float
    """Above 0, at most 1."""
    is_unbiased: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """As in a Job."""
        return f"topk:{self.share:g}"

    def num_kept(self, num_values: int) -> int:
        """How many of so many values are sent: one at least."""
        return min(num_values, max(1, round(self.share * num_values)))

    def num_bytes(self, num_values: int) -> int:
        """Values, positions, and what makes a multiple of ALIGNMENT."""
        sizes = self._sizes(num_values)
        total = sizes.k * (torch.bfloat16.itemsize + sizes.num_low_bytes) + sizes.num_high_bytes
        return aligned(total)

    def encode(self, values: Tensor, payload: Tensor, *, seed: int | None = None) -> None:
        """See BlockCodec."""
        check(self, values, payload)
        refuse_seed(self, seed)
        self._write(values, payload)

    def encode_with_error(
        self, values: Tensor, error: Tensor, payload: Tensor, *, seed: int | None = None
    ) -> None:
        """See BlockCodec."""
        check(self, values, payload, error)
        refuse_seed(self, seed)
        where, sent = self._write(error.add_(values), payload)
        left = error.index_select(0, where).sub_(sent)
        error.index_copy_(0, where, left.nan_to_num_(0.0, 0.0, 0.0))

    def decode(self, payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        """See BlockCodec."""
        check(self, values, payload)
        fields = self._cut(payload, len(values))
        where = positions.read(self._sizes(len(values)), fields.low, fields.high)
        if not add:
            values.zero_()
        values.index_add_(0, where, fields.values.to(values.dtype))

    def _write(self, values: Tensor, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Write the payload; returns positions (k,) int64 and what is read there, (k,) bf16."""
        sizes = self._sizes(len(values))
        fields = self._cut(payload, len(values))
        where = largest(values, sizes.k)
        fields.values.copy_(values.index_select(0, where))
        positions.write(where, sizes, fields.low, fields.high)
        return where, fields.values

    def _sizes(self, num_values: int) -> positions.PositionLayout:
        return positions.position_layout(self.num_kept(num_values), num_values)

    def _cut(self, payload: Tensor, num_values: int) -> _Fields:
        """The payload's fields; what is left over at its end stays as it is."""
        sizes = self._sizes(num_values)
        num_bytes = (
            sizes.k * torch.bfloat16.itemsize,
            sizes.k * sizes.num_low_bytes,
            sizes.num_high_bytes,
        )
        values, low, high, _rest = payload.split([*num_bytes, len(payload) - sum(num_bytes)])
        return _Fields(values.view(torch.bfloat16), low, high)
