"""Messages in compressed form: activations and their gradients from one rank to another.

Values are rounded to the nearest that the codec has, at once and for good: there is no error to
feed back, since the next message is about other tokens. The gradient of what was rounded passes as
if nothing had been (straight through, https://arxiv.org/abs/1308.3432), and is coded on its way
itself.

Small messages travel as they are, in bytes of their own type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.compress.codec import BlockCodec, aligned
from paceline.comm.compress.codecs import codec_of
from paceline.config.comm import codec


def messages_of(compress: str, compress_from: int) -> "CodedMessages | None":
    """The form that a Job names; None: "none".

    Args:
        compress: a codec's name.
        compress_from: messages of fewer values travel as they are.
    """
    chosen = codec(compress)
    return None if chosen.kind == "none" else CodedMessages(codec_of(chosen), compress_from)


@dataclass
class CodedMessages:
    """A form of messages that both ends know, and how much was sent in it."""

    codec: BlockCodec
    compress_from: int
    """Messages of fewer values travel as they are."""
    sent_bytes: int = 0
    """Since `take_sent`."""

    def take_sent(self) -> int:
        """The bytes that this rank sent since this was last asked."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def num_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """Of a message, a multiple of ALIGNMENT."""
        if self._is_coded(num_values):
            return self.codec.num_bytes(num_values)
        return aligned(num_values * dtype.itemsize)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Write values (n,) into a message (num_bytes,) uint8, which is then to be sent."""
        self.sent_bytes += len(payload)
        if self._is_coded(len(values)):
            self.codec.encode(values, payload)
        else:
            payload.view(values.dtype)[: len(values)].copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Read a message into values (n,), in place."""
        if self._is_coded(len(values)):
            self.codec.decode(payload, values)
        else:
            values.copy_(payload.view(values.dtype)[: len(values)])

    def coded(self, values: Tensor) -> Tensor:
        """A message of any tensor: (num_bytes,) uint8."""
        flat = values.detach().reshape(-1)
        size = self.num_bytes(len(flat), flat.dtype)
        payload = torch.zeros(size, dtype=torch.uint8, device=flat.device)
        self.encode(flat, payload)
        return payload

    def decoded(self, payload: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """The tensor of a message."""
        values = torch.empty(size, dtype=dtype, device=payload.device)
        self.decode(payload, values.view(-1))
        return values

    def _is_coded(self, num_values: int) -> bool:
        return num_values >= self.compress_from


@torch.compiler.disable
def send_coded(
    rows: Tensor,
    to: Sequence[int],
    come: Sequence[int],
    group: dist.ProcessGroup,
    messages: CodedMessages,
) -> Tensor:
    """`exchange_rows`, whose gradients go back the same way in the same form."""
    sent: Tensor = _SendRows.apply(rows, to, come, group, messages)
    return sent


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        rows: Tensor,
        to: Sequence[int],
        come: Sequence[int],
        group: dist.ProcessGroup,
        messages: CodedMessages,
    ) -> Tensor:
        return exchange_rows(rows, to, come, group, messages)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.given = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to, come, group, messages = ctx.given
        back = exchange_rows(gradient.contiguous(), come, to, group, messages)
        return back, None, None, None, None


def exchange_rows(
    rows: Tensor,
    to: Sequence[int],
    come: Sequence[int],
    group: dist.ProcessGroup,
    messages: CodedMessages,
) -> Tensor:
    """Send rows to the ranks of a group; those for this rank itself are not rounded.

    Args:
        rows: (sum of `to`, width), sorted by rank.
        to: how many go to each rank.
        come: how many come from each rank.

    Returns:
        (sum of `come`, width), sorted by rank.
    """
    width, here = rows.shape[1], group.rank()
    arrived = rows.new_empty(sum(come), width)
    given, got = (
        [part.reshape(-1) for part in whole.split(list(counts))]
        for whole, counts in ((rows, to), (arrived, come))
    )
    out_sizes, in_sizes = (
        [
            0 if rank == here else messages.num_bytes(count * width, rows.dtype)
            for rank, count in enumerate(counts)
        ]
        for counts in (to, come)
    )
    outgoing = torch.zeros(sum(out_sizes), dtype=torch.uint8, device=rows.device)
    incoming = torch.empty(sum(in_sizes), dtype=torch.uint8, device=rows.device)
    for values, payload in zip(given, outgoing.split(out_sizes), strict=True):
        if len(payload):
            messages.encode(values, payload)
    dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=group)
    for values, payload in zip(got, incoming.split(in_sizes), strict=True):
        if len(payload):
            messages.decode(payload, values)
    got[here].copy_(given[here])
    return arrived
