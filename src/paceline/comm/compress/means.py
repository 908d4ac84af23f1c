"""Means over ranks that travel in compressed form, both ways.

The values are cut into one chunk per rank. Every rank codes each other rank's chunk of its summand
and sends it there (all-to-all); it decodes what it gets, adds it to its own chunk, which it never
codes, codes the sum and sends it to all (all-gather). Each rank sends 2(N-1)/N of the coded size,
whatever N is, where an all-gather of everything would send N-1 times the coded size; and there are
two codings, however many ranks. All ranks decode the same payloads, their own too, so all end with
the same bits.

Two ranks have it simpler: each codes all of its summand and sends it to the other. These are as
many bytes, one wait instead of two, and no coding of what was coded already.

What a coding loses stays with the rank that coded, in one buffer as long as the values: the errors
of its summand for the chunks of others, the error of the mean for its own chunk (as the two-sided
error feedback of 1-bit Adam, https://arxiv.org/abs/2102.02888, whose scheme this is).

What compresses by other means than a codec is a `CompressedMean` as well (`low_rank`).

Not here: whether to compress (`parallel.replicate`), and who keeps the errors (`feedback`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import Collectives, issued
from paceline.comm.compress.chunks import chunk_values
from paceline.comm.compress.codec import ROW_ALIGNMENT, BlockCodec, aligned
from paceline.comm.compress.feedback import BufferPart
from paceline.comm.queue import Job, Works
from paceline.config.comm import BLOCK


def chunks(num_values: int, num_ranks: int) -> list[slice]:
    """Whose part of a sum is what: equal chunks of whole blocks, the last ones shorter or empty."""
    blocks = -(-num_values // BLOCK)
    length = -(-blocks // num_ranks) * BLOCK
    starts = [min(rank * length, num_values) for rank in range(num_ranks + 1)]
    return [slice(*ends) for ends in pairwise(starts)]


class CompressedMean(Protocol):
    """A mean over ranks in compressed form, with its memory; one at a time is under way."""

    sent_bytes: int
    """What this rank sends each time."""

    def average(self, values: Tensor, errors: Tensor) -> Job:
        """Replace each rank's values by the mean of all, as it was sent.

        Args:
            values: (n,) fp32 or fp64, in place.
            errors: (n,) of the same type, in place: what this rank's compression has lost of the
                mean.
        """
        ...


class Compressor(Protocol):
    """Makes the means of one form of compression."""

    def takes(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape can be compressed, and becomes smaller by it."""
        ...

    def mean_of(self, parts: Sequence[BufferPart], like: Tensor) -> CompressedMean:
        """The mean of a buffer of these tensors, one after the other.

        Args:
            like: gives device and dtype of the buffer.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps besides errors, the same on all ranks, by parameter's name."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave."""
        ...


def buffer_part(
    name: str, parameter: Tensor, shape: torch.Size, compressor: Compressor | None, least: int
) -> BufferPart:
    """How a parameter travels.

    Args:
        name: of the parameter.
        parameter: exactly where it has fewer than `least` values.
        shape: of what this rank holds of it.
        compressor: None: everything travels exactly.
        least: see `parameter`.
    """
    is_large = parameter.numel() >= least
    return BufferPart(name, shape, compressor is not None and is_large and compressor.takes(shape))


def mean_of_parts(
    compressor: Compressor | None, parts: Sequence[BufferPart], like: Tensor
) -> CompressedMean | None:
    """The mean of a buffer, as of `Compressor`; None where nothing in it is compressed."""
    if compressor is None or not any(part.is_compressed for part in parts):
        return None
    return compressor.mean_of(parts, like)


@dataclass(frozen=True)
class CodecMeans:
    """Means in the form of a codec, which takes anything and remembers nothing."""

    codec: BlockCodec
    group: dist.ProcessGroup

    def takes(self, shape: torch.Size) -> bool:
        """Any."""
        return True

    def mean_of(self, parts: Sequence[BufferPart], like: Tensor) -> CompressedMean:
        """The mean of a buffer as long as all parts; where one begins does not matter."""
        # Tried here, and not on the queue's thread beside a backward pass.
        chunk_values(like.device)
        kind = PairMean if self.group.size() == 2 else CodecMean
        return kind(self.codec, self.group, sum(p.num_values for p in parts), like.device)

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Nothing."""


class CodecMean:
    """A mean in the form of a codec, see the module."""

    def __init__(
        self, codec: BlockCodec, group: dist.ProcessGroup, num_values: int, device: torch.device
    ) -> None:
        self._codec, self._group = codec, group
        self._num_ranks, self._rank = group.size(), group.rank()
        self._others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        self._cuts = chunks(num_values, self._num_ranks)
        longest = codec.num_bytes(self._cuts[0].stop)
        self._payload_bytes = aligned(longest, ROW_ALIGNMENT)
        self.sent_bytes = 2 * len(self._others) * self._payload_bytes
        # Payloads as rows. Zeros, for what lies between the end of one and of its row travels too.
        rows = (len(self._others), len(self._others), self._num_ranks, 1)
        self._to_send, self._received, self._means, self._own_mean = (
            torch.zeros(row, self._payload_bytes, dtype=torch.uint8, device=device) for row in rows
        )

    def average(self, values: Tensor, errors: Tensor) -> Job:
        """Replace each rank's values by the mean of all, as `CompressedMean` says."""
        values.mul_(1 / self._num_ranks)
        for row, rank in enumerate(self._others):
            self._encode(values, errors, rank, self._to_send[row])
        yield self._all_to_all()
        for payload in self._received:
            self._decode(payload, values, self._rank, add=True)
        self._encode(values, errors, self._rank, self._own_mean[0])
        yield _all_gather(self._means, self._own_mean, self._group)
        for rank, payload in enumerate(self._means):
            self._decode(payload, values, rank)

    def _all_to_all(self) -> Works:
        """Send each other rank the payload for it; nothing to this one."""
        splits = [self._payload_bytes] * self._num_ranks
        splits[self._rank] = 0
        to_send, received = self._to_send.view(-1), self._received.view(-1)
        return issued(
            dist.all_to_all_single(
                received, to_send, splits, splits, group=self._group, async_op=True
            )
        )

    def _encode(self, values: Tensor, errors: Tensor, rank: int, payload: Tensor) -> None:
        chunk = values[self._cuts[rank]]
        if chunk.numel():
            used = self._codec.num_bytes(chunk.numel())
            self._codec.encode_with_error(chunk, errors[self._cuts[rank]], payload[:used])

    def _decode(self, payload: Tensor, values: Tensor, rank: int, *, add: bool = False) -> None:
        chunk = values[self._cuts[rank]]
        if chunk.numel():
            used = self._codec.num_bytes(chunk.numel())
            self._codec.decode(payload[:used], chunk, add=add)


class PairMean:
    """A mean of two ranks in the form of a codec, see the module."""

    def __init__(
        self, codec: BlockCodec, group: dist.ProcessGroup, num_values: int, device: torch.device
    ) -> None:
        self._codec, self._group = codec, group
        self._used = codec.num_bytes(num_values)
        self.sent_bytes = aligned(self._used, ROW_ALIGNMENT)
        self._own = torch.zeros(self.sent_bytes, dtype=torch.uint8, device=device)
        self._both = torch.zeros(2, self.sent_bytes, dtype=torch.uint8, device=device)

    def average(self, values: Tensor, errors: Tensor) -> Job:
        """Replace each rank's values by the mean of both, as `CompressedMean` says."""
        values.mul_(1 / 2)
        self._codec.encode_with_error(values, errors, self._own[: self._used])
        yield _all_gather(self._both, self._own, self._group)
        for at, payload in enumerate(self._both):
            self._codec.decode(payload[: self._used], values, add=at > 0)


class UncompressedRest:
    """What is too small to be compressed, of all means of a series: one exact mean at their end."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._views: list[Tensor] = []
        self._held: list[Tensor] = []
        self._means: Tensor | None = None

    def take(self, views: Sequence[Tensor]) -> None:
        """Keep these values and leave zeros in their place, which codecs keep as they are."""
        if views:
            self._views += views
            self._held += [view.clone() for view in views]
            torch._foreach_zero_(list(views))

    def average(self) -> Job:
        """Average what was taken."""
        if self._held:
            self._means = torch.cat(self._held)
            yield from exact_mean(self._means, self._collectives)

    def put_back(self) -> int:
        """Write the means where the values were; return their bytes. After everything else."""
        num_bytes = 0
        if self._means is not None:
            sizes = [view.numel() for view in self._views]
            torch._foreach_copy_(self._views, list(self._means.split(sizes)))
            num_bytes = self._means.nbytes
        self._views, self._held, self._means = [], [], None
        return num_bytes


def exact_mean(values: Tensor, collectives: Collectives) -> Job:
    """Replace each rank's values by the mean of all, in full, as DDP does: divided before added."""
    values.mul_(1 / collectives.group.size())
    yield from collectives.all_reduce_works(values)


def exact_bytes(values_bytes: int, num_ranks: int) -> int:
    """What a rank sends for an exact sum: the least that is possible, which gloo and NCCL reach."""
    return 2 * (num_ranks - 1) * values_bytes // num_ranks


def _all_gather(payloads: Tensor, own: Tensor, group: dist.ProcessGroup) -> Works:
    # By its lower name: the public one was renamed between torch 2.11 and 2.13.
    return issued(group._allgather_base(payloads.view(-1), own.view(-1)))
