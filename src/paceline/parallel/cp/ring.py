"""Ring attention: keys and values travel around the ranks, queries stay.

How it works, forward: at each of the ring's steps a rank sends the block it has to the next rank,
receives one from the rank before, and meanwhile attends to the block it has; the results are merged
by their log-sum-exp. Backward: the same trip once more, with the weights computed again from q, k
and the final log-sum-exp. What each rank contributes to the gradients of a block follows that block
one step behind, and the last hop brings it home. The first block is a rank's own: its gradients
never travel.

Kept for backward: this rank's q, k, v, out and lse, nothing gathered. Per layer and pass a rank
sends (ring - 1) blocks forward and (ring - 1) blocks and gradients of blocks backward.

A custom autograd function, so checkpointing may run it again; the messages of a second forward are
those of the first, in the same order on every rank.

It takes causal attention only, and no dropout.

Papers: https://arxiv.org/abs/2310.01889; load balance: `tiles.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.errors import InputError
from paceline.parallel.cp.local import (
    accumulator,
    attend_block,
    attend_block_backward,
    hidden_score,
    merge,
)
from paceline.parallel.cp.tiles import Tile, causal_tiles, masked_tiles, row_blocks


@dataclass(frozen=True)
class RingMask:
    """Who sees whom, prepared for every step of the ring."""

    tiles: tuple[tuple[Tile, ...], ...]
    """For step i, those of the block that started i ranks before this one."""
    window: int | None
    documents: Tensor | None
    """(batch, whole_seq), as given to `mask`."""


class RingAttend:
    """Attention over a sequence that the ranks of a group share, zig-zag (see `positions_of`).

    Args:
        group: the ring; its ranks pass keys on in their order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @torch.compiler.disable
    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> RingMask:
        """Prepare, once per forward and distinct window, which tiles each step works on.

        With documents the host waits for the device once, to learn where they start.

        Args:
            seq_len: tokens of the sequence that this rank of the ring holds.
            window: a query sees itself and the window - 1 tokens before it; None means all before.
            documents: (batch, whole_seq) numbers of the packed documents, increasing along the
                sequence; a query sees only its own document. None means one document each.
            device: where q, k and v will lie; tiles are numbers, and need none.

        Raises:
            InputError: an odd seq_len, or documents of another whole sequence.
        """
        self._check(seq_len, documents)
        half, sources = seq_len // 2, [(self.rank - i) % self.size for i in range(self.size)]
        if documents is None and (window is None or window >= seq_len * self.size):
            steps = [causal_tiles(self.rank, source, half) for source in sources]
            return RingMask(tuple(map(tuple, steps)), None, None)
        rows = row_blocks(self.size, self.rank, half)
        low, sure = [0] * len(rows), [0] * len(rows)
        if documents is not None:
            low, sure = _starts(documents, [r.start for r in rows], [r.last for r in rows])
        if window is not None:
            low = [max(at, r.start - window + 1) for at, r in zip(low, rows, strict=True)]
            sure = [max(at, r.last - window + 1) for at, r in zip(sure, rows, strict=True)]
        steps = [masked_tiles(self.size, source, half, rows, low, sure) for source in sources]
        return RingMask(tuple(map(tuple, steps)), window, documents)

    def _check(self, seq_len: int, documents: Tensor | None) -> None:
        if seq_len % 2:
            raise InputError(
                f"A rank of a ring was given {seq_len} tokens, but it holds two chunks of the "
                "sequence: choose a length that divides by twice the ring's ranks."
            )
        whole = seq_len * self.size
        if documents is not None and documents.shape[1] != whole:
            raise InputError(
                f"document numbers of {documents.shape[1]} tokens were given with {seq_len} tokens "
                f"on each of {self.size} ranks: pass those of all {whole} tokens to every rank."
            )

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: RingMask) -> Tensor:
        """Attend causally to the whole sequence.

        Args:
            q: (batch, heads, seq, head_dim), the tokens of this rank.
            k: (batch, kv_heads, seq, head_dim); each key head serves heads / kv_heads query heads.
            v: (batch, kv_heads, seq, v_head_dim).
            mask: what `mask` returned.

        Returns:
            (batch, heads, seq, v_head_dim)
        """
        q, k, v = in_autocast_type(q, k, v)
        return _Ring.apply(q, k, v, mask, self)


def in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast would for attention; it does not know of ours."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    # As autocast: what is fp64 stays so.
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _starts(documents: Tensor, first: list[int], last: list[int]) -> tuple[list[int], list[int]]:
    """Where documents start: the first start among the samples' at the positions `first`, the last
    start among those at the positions `last`.
    """
    documents = documents.contiguous()
    # Numbers increase, so a document starts where its number would be put in.
    found = torch.searchsorted(documents, documents[:, first + last].contiguous())
    low, sure = found.amin(0), found.amax(0)
    low_and_sure = torch.cat((low[: len(first)], sure[len(first) :])).tolist()
    return low_and_sure[: len(first)], low_and_sure[len(first) :]


def _bias(tile: Tile, mask: RingMask, like: Tensor) -> Tensor | None:
    """What a masked tile adds to its scores: (1 or batch, 1, queries, keys), in `like`'s type."""
    if tile.kind != "masked":
        return None
    queries = torch.arange(tile.q_at, tile.q_at + tile.q1 - tile.q0, device=like.device)
    keys = torch.arange(tile.k_at, tile.k_at + tile.k1 - tile.k0, device=like.device)
    distance = queries[:, None] - keys
    hidden = distance < 0
    if mask.window is not None:
        hidden |= distance >= mask.window
    hidden = hidden[None]
    if mask.documents is not None:
        hidden = hidden | (mask.documents[:, queries, None] != mask.documents[:, None, keys])
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(hidden, hidden_score(like.dtype)).unsqueeze(1)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """A block as one message: (k.numel() + v.numel(),)."""
    message = torch.empty(k.numel() + v.numel(), dtype=k.dtype, device=k.device)
    for part, x in zip(_unpack(message, k, v), (k, v), strict=True):
        part.copy_(x)
    return message


def _unpack(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message in the shapes of k and v."""
    return message[: k.numel()].view(k.shape), message[k.numel() :].view(v.shape)


class _RingMessages:
    """Messages under way: to the next rank of the ring, and as large ones from the one before."""

    def __init__(self, ring: RingAttend, *messages: Tensor) -> None:
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        self.received = [torch.empty_like(message) for message in messages]
        pairs = zip(messages, self.received, strict=True)
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(op, tensor, group=ring.group, group_peer=peer)
                for message, space in pairs
                for op, tensor, peer in ((dist.isend, message, after), (dist.irecv, space, before))
            ]
        )

    def wait(self) -> list[Tensor]:
        """Return what came, in the order of what was sent."""
        for work in self._work:
            work.wait()
        return self.received


class _Ring(torch.autograd.Function):
    """The two trips around the ring."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: RingMask, ring: RingAttend
    ) -> Tensor:
        wide = accumulator(q.dtype)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        block = _pack(k, v)
        for step, tiles in enumerate(mask.tiles):
            under_way = _RingMessages(ring, block) if step + 1 < ring.size else None
            _attend_tiles(q, *_unpack(block, k, v), tiles, mask, out, lse)
            if under_way is not None:
                (block,) = under_way.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.ring = mask, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        mask, ring = ctx.mask, ctx.ring
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # the kernels ask for it
        dq = torch.zeros_like(q, dtype=lse.dtype)
        block, home, travelling = _pack(k, v), None, None
        for step, tiles in enumerate(mask.tiles):
            messages = ([block] if step + 1 < ring.size else []) + (
                [travelling] if travelling is not None else []
            )
            under_way = _RingMessages(ring, *messages) if messages else None
            d_block = torch.zeros_like(block, dtype=lse.dtype)
            k_now, v_now = _unpack(block, k, v)
            d_kv = _unpack(d_block, k, v)
            _backward_tiles((grad, q, k_now, v_now, out, lse), tiles, mask, dq, *d_kv)
            received = [] if under_way is None else under_way.wait()
            if step + 1 < ring.size:
                block = received.pop(0)
            if received:  # what the ranks before contributed to this step's block
                d_block += received.pop()
            if step == 0:
                home = d_block
            else:
                travelling = d_block
        assert home is not None
        if travelling is not None:
            home += _RingMessages(ring, travelling).wait()[0]
        dk, dv = _unpack(home, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: tuple[Tile, ...],
    mask: RingMask,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge a block's share into out and lse, in place."""
    for tile in tiles:
        rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        bias, is_causal = _bias(tile, mask, q), tile.kind == "causal"
        parts = attend_block(q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, is_causal)
        merge(out[:, :, rows], lse[:, :, rows], *parts)


def _backward_tiles(
    inputs: tuple[Tensor, ...],
    tiles: tuple[Tile, ...],
    mask: RingMask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add a block's share to the gradients, in place; inputs are grad, q, k, v, out and lse."""
    grad, q, k, v, out, lse = inputs
    for tile in tiles:
        rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        shares = attend_block_backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
            lse[:, :, rows], _bias(tile, mask, q), tile.kind == "causal",
        )  # fmt: skip
        dq[:, :, rows] += shares[0]
        dk[:, :, keys] += shares[1]
        dv[:, :, keys] += shares[2]
