"""Ulysses: exchange heads for tokens, attend, and exchange back.

How it works: before attention each rank holds some tokens of all heads; an all-to-all each for q, k
and v leaves it all tokens of some heads, to which any core attends as if nothing were shared; a
fourth all-to-all takes the result back. Backward is the same four in reverse. One tensor at a time,
because a message of all three would need their memory once more.

Where there are fewer key heads than ranks, they are repeated until every rank has one of its own:
each key head then travels to several ranks, and its gradients add up.

It doesn't overlap its exchanges with anything: they are few, and short between neighbours.

Paper: https://arxiv.org/abs/2309.14509
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.errors import InputError
from paceline.parallel.cp.ring import in_autocast_type


class AttentionCore(Protocol):
    """The core of attention, by shape that of a network's `attend`."""

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare what the calls of a forward pass need."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attend causally."""


class UlyssesAttend:
    """Attention to a sequence whose tokens the ranks of a group share, contiguously.

    Args:
        group: its ranks' tokens, in their order, are the sequence that `inner` sees.
        inner: attends to that sequence; a ring of such groups, or one device alone.
    """

    def __init__(self, group: dist.ProcessGroup, inner: AttentionCore) -> None:
        self.group, self.inner = group, inner
        self.size = dist.get_world_size(group)

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare the mask of the whole group's tokens; arguments as of any core.

        Args:
            seq_len: tokens of the sequence that this rank holds.
            window: a query sees itself and the window - 1 tokens before it.
            documents: (batch, whole_seq) numbers of the packed documents.
            device: where q, k and v will lie.
        """
        return self.inner.mask(seq_len * self.size, window, documents, device)

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attend causally.

        Args:
            q: (batch, heads, seq, head_dim), the tokens of this rank.
            k: (batch, kv_heads, seq, head_dim); each key head serves heads / kv_heads query heads.
            v: (batch, kv_heads, seq, v_head_dim).
            mask: what `mask` returned.

        Returns:
            (batch, heads, seq, v_head_dim)

        Raises:
            InputError: the ranks can't share the query heads equally.
        """
        q, k, v = in_autocast_type(q, k, v)
        k, v = self._enough_heads(q, k, v)
        whole = [self._gather_tokens(x) for x in (q, k, v)]
        return self._gather_heads(self.inner(whole[0], whole[1], whole[2], mask))

    def _enough_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat key heads, in place, until the ranks can share them."""
        heads, kv_heads = q.shape[1], k.shape[1]
        if heads % self.size:
            raise InputError(
                f"{heads} query heads were given to {self.size} Ulysses ranks, which share them "
                "equally: choose a divisor of the heads, or pass keys in a ring instead."
            )
        times = math.lcm(kv_heads, self.size) // kv_heads
        if times == 1:
            return k, v
        return k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)

    def _gather_tokens(self, x: Tensor) -> Tensor:
        """Map (batch, heads, seq, dim) to (batch, heads / size, size * seq, dim)."""
        # (to which rank, seq, batch, heads / size, dim): tokens first, so that those of all ranks
        # are in place as they arrive.
        parts = x.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4)
        return _AllToAll.apply(parts, self.group).flatten(0, 1).permute(1, 2, 0, 3)

    def _gather_heads(self, x: Tensor) -> Tensor:
        """Map (batch, heads / size, size * seq, dim) to (batch, heads, seq, dim)."""
        parts = x.permute(2, 0, 1, 3).unflatten(0, (self.size, -1))
        received = _AllToAll.apply(parts, self.group)  # (of which rank, seq, batch, ..) as sent
        # In memory (batch, seq, heads, dim), as the product that follows will want it.
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


class _AllToAll(torch.autograd.Function):
    """Send row i of a tensor to rank i; row i of the result came from rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
