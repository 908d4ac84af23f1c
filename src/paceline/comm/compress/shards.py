"""Shards in compressed form: gradients on their way to the rank that keeps them, parameters back.

A buffer has one row per rank: that rank's shards of a few parameters, one after the other.
Gradients are coded row by row, each sent to its rank alone, which decodes the rows it gets and adds
them to its own, never coded one. Each rank sends (N-1)/N of the coded size. Hierarchical, gradients
are added up exactly inside each node first, and only these sums are coded, to the ranks at the same
place in other nodes: over m nodes of g ranks each rank sends (m-1)/m of a g-th of the coded size.
What a coding loses stays with the rank that coded (`feedback`). Parameters are coded once by the
rank that keeps them, rounded stochastically, and decoded by all, that rank too: all compute with
the same bits, and the shards themselves stay exact (both as ZeRO++ does,
https://arxiv.org/abs/2306.10209, which keeps no errors).

Small tensors travel as they are, behind the coded part of the same payload.

Not here: which parameters a row holds (`parallel.compressed_shards`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import Collectives
from paceline.comm.compress.codec import ROW_ALIGNMENT, BlockCodec, aligned


@dataclass(frozen=True)
class CodedRow:
    """What a rank has of some tensors: which of its values are coded."""

    coded: tuple[slice, ...]
    exact: tuple[slice, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, bool]]) -> "CodedRow":
        """Of consecutive parts: how many values each has, and whether they are coded."""
        ends = accumulate((num_values for num_values, _ in parts), initial=0)
        cuts = [slice(*cut) for cut in pairwise(ends)]
        pairs = list(zip(cuts, (is_coded for _, is_coded in parts), strict=True))
        return cls(
            _joined([cut for cut, is_coded in pairs if is_coded]),
            _joined([cut for cut, is_coded in pairs if not is_coded]),
        )

    @property
    def num_coded(self) -> int:
        """Values that are coded."""
        return _length(self.coded)

    @property
    def num_values(self) -> int:
        """All values."""
        return self.num_coded + _length(self.exact)


@dataclass(frozen=True)
class Payloads:
    """How rows become payloads: the codec's bytes, then the exact values' own."""

    codec: BlockCodec
    row: CodedRow
    dtype: torch.dtype
    """Of the rows' values."""

    @property
    def num_bytes(self) -> int:
        """Of a payload."""
        exact = _length(self.row.exact) * self.dtype.itemsize
        return self._coded_bytes + aligned(exact, ROW_ALIGNMENT)

    @property
    def _coded_bytes(self) -> int:
        return aligned(self._used_bytes, ROW_ALIGNMENT) if self.row.coded else 0

    def encode(
        self, values: Tensor, payload: Tensor, error: Tensor | None = None, seed: int | None = None
    ) -> None:
        """Write a payload.

        Args:
            values: (num_values,), not changed.
            payload: (num_bytes,) uint8, in place.
            error: (num_coded,) fp32, added to what is coded and left with what was lost, in place.
            seed: of stochastic rounding; not with an error.
        """
        if self.row.coded:
            coded, body = _picked(values, self.row.coded), payload[: self._used_bytes]
            if error is None:
                self.codec.encode(coded, body, seed=seed)
            else:
                self.codec.encode_with_error(coded, error, body)
        self._exact(payload).copy_(_picked(values, self.row.exact))

    def decode(self, payload: Tensor, values: Tensor, *, add: bool = False) -> None:
        """Read a payload into values (num_values,), or add it to them, in place."""
        if self.row.coded:
            body = payload[: self._used_bytes]
            if len(self.row.coded) == 1:
                self.codec.decode(body, values[self.row.coded[0]], add=add)
            else:
                decoded = values.new_empty(self.row.num_coded)
                self.codec.decode(body, decoded)
                _put(values, self.row.coded, decoded, add=add)
        _put(values, self.row.exact, self._exact(payload), add=add)

    def owe(self, values: Tensor, owed: Tensor) -> None:
        """Add to a row's values (num_values,), in place, what is owed of the coded ones."""
        _put(values, self.row.coded, owed, add=True)

    @property
    def _used_bytes(self) -> int:
        return self.codec.num_bytes(self.row.num_coded)

    def _exact(self, payload: Tensor) -> Tensor:
        return payload[self._coded_bytes :].view(self.dtype)[: _length(self.row.exact)]


class PayloadBuffers:
    """Memory for payloads, used by one exchange after the other."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """So many bytes, (num_bytes,) uint8; what was taken before is no longer the caller's."""
        if len(self._held) < num_bytes or self._held.device != device:
            # Zeros, for what fills payloads up travels too.
            self._held = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._held[:num_bytes]


@dataclass(frozen=True)
class CodedShards:
    """The exchanges of a group of shards."""

    collectives: Collectives
    room: PayloadBuffers

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all shards."""
        return self.collectives.group

    @property
    def others(self) -> list[int]:
        """Whom this rank sends coded gradients to."""
        return [rank for rank in self.collectives.peers if rank != self.group.rank()]

    def reduce_scatter(
        self, payloads: Payloads, received: Tensor, values: Tensor, errors: Tensor
    ) -> int:
        """Leave in `received` this rank's row of the sum over the ranks.

        Args:
            payloads: of the rows.
            received: (num_values,) fp32, overwritten.
            values: (ranks * num_values,) fp32; spoiled.
            errors: (others, num_coded) fp32, in place: of the rows of the `others`.

        Returns:
            the bytes that this rank sent.
        """
        self.collectives.add_inside(values)
        rows = values.view(self.group.size(), -1)
        others, size = self.others, payloads.num_bytes * len(self.others)
        held = self.room.take(2 * size, values.device)
        to_send, arrived = held.view(2, len(others), payloads.num_bytes)
        for payload, error, rank in zip(to_send, errors, others, strict=True):
            payloads.encode(rows[rank], payload, error)
        splits = [payloads.num_bytes * (rank in others) for rank in range(self.group.size())]
        dist.all_to_all_single(arrived.view(-1), to_send.view(-1), splits, splits, group=self.group)
        received.copy_(rows[self.group.rank()])
        for payload in arrived:
            payloads.decode(payload, received, add=True)
        return size + values.nbytes * (self.collectives.inside - 1) // self.collectives.inside

    def all_gather(self, payloads: Payloads, whole: Tensor, part: Tensor, seed: int | None) -> int:
        """Fill `whole` with what all ranks decode of all ranks' parts.

        Args:
            payloads: of the parts.
            whole: (ranks * num_values,), overwritten.
            part: (num_values,), this rank's, which may lie in its place in `whole`.
            seed: of this rank's stochastic rounding; None rounds to nearest.

        Returns:
            the bytes that this rank sent.
        """
        size, num_ranks = payloads.num_bytes, self.group.size()
        own, arrived = self.room.take((num_ranks + 1) * size, whole.device).split(
            [size, num_ranks * size]
        )
        payloads.encode(part, own, seed=seed)
        # By its lower name: the public one was renamed between torch 2.11 and 2.13.
        work = self.group._allgather_base(arrived, own)
        work.wait()
        for payload, values in zip(arrived.split(size), whole.view(num_ranks, -1), strict=True):
            payloads.decode(payload, values)
        return size * (num_ranks - 1)


def _joined(cuts: Sequence[slice]) -> tuple[slice, ...]:
    """Neighbours as one; without empty ones."""
    joined: list[slice] = []
    for cut in cuts:
        if joined and joined[-1].stop == cut.start:
            joined[-1] = slice(joined[-1].start, cut.stop)
        elif cut.stop > cut.start:
            joined.append(cut)
    return tuple(joined)


def _length(cuts: Sequence[slice]) -> int:
    return sum(cut.stop - cut.start for cut in cuts)


def _picked(values: Tensor, cuts: Sequence[slice]) -> Tensor:
    """The values of the cuts one after the other: a view where there is one cut."""
    if len(cuts) == 1:
        return values[cuts[0]]
    return torch.cat([values[cut] for cut in cuts]) if cuts else values[:0]


def _put(values: Tensor, cuts: Sequence[slice], picked: Tensor, *, add: bool) -> None:
    """Write or add to the cuts what `_picked` would give."""
    sizes = [cut.stop - cut.start for cut in cuts]
    for cut, part in zip(cuts, picked.split(sizes) if sizes else (), strict=True):
        values[cut].add_(part) if add else values[cut].copy_(part)
