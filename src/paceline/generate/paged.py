"""Attention over blocks: the keys and values of many sequences, kept between forward passes.

How it works: a forward pass has packed tokens, (1, num_tokens), of several sequences. Every layer
writes its new keys and values into blocks, and each token attends to those of its own sequence.

- A part of a prompt attends in one call of torch's attention, over its sequence's keys in order.
- Single tokens, one of each sequence, attend all together. Each pair of a token and a block is one
  small attention, all pairs are one call, and the results of a token's blocks are combined by the
  logarithms of their sums (as in flash-decoding, https://arxiv.org/abs/2309.06180 keeps blocks so).
  Blocks that lie close together are read where they lie.
- `is_exact` treats all tokens as single ones: then no result depends on what else is computed.

Latent attention is absorbed (`LatentAttention.is_absorbed`): one narrow key per token is kept, and
its values are a part of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.mesh import local_part
from paceline.models.attention import LatentAttention, Sdpa
from paceline.models.decoder import Block, Decoder

# Where blocks that somebody needs are fewer than one in so many of those from the first to the
# last, they are copied together rather than read where they lie (measured on two EPYC cores).
_SPARSE = 2.0
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class KeyShape:
    """What a layer keeps of a token."""

    num_layers: int
    num_heads: int
    """Of keys, on this rank."""
    width: int
    """Of a key, and of a value where there are any."""
    has_values: bool
    """False: values are a part of the keys."""

    @staticmethod
    def of(decoder: Decoder) -> "KeyShape":
        """Of a network, or of a rank's part of one."""
        attention, num_layers = blocks_of(decoder)[0].attention, len(decoder.blocks)
        if isinstance(attention, LatentAttention):
            return KeyShape(
                num_layers, 1, attention.shape.kv_rank + attention.shape.rope_dim, False
            )
        rows = local_part(attention.k_proj.weight).shape[0]
        return KeyShape(num_layers, rows // attention.head_dim, attention.head_dim, True)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """What a block takes, in all layers."""
        values = 2 if self.has_values else 1
        return self.num_layers * values * self.num_heads * self.width * block_size * dtype.itemsize


class Memory:
    """The keys and values of all blocks: (num_layers, num_blocks, num_heads, block_size, width).

    There is one block more than was asked for: whatever nobody wants is written there.
    """

    def __init__(
        self,
        shape: KeyShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size, self.spare_block = block_size, num_blocks
        size = (shape.num_layers, num_blocks + 1, shape.num_heads, block_size, shape.width)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys) if shape.has_values else self.keys

    def clear(self, blocks: Sequence[int]) -> None:
        """Blocks get new users: what isn't a number there must not reach them through a mask."""
        if blocks:
            for kept in {self.keys, self.values}:
                kept[:, torch.tensor(blocks, device=kept.device)] = 0


@dataclass(frozen=True)
class Part:
    """Neighbouring tokens of one sequence in a forward pass."""

    row: int
    """Its first token's place among the packed ones."""
    first: int
    """That token's position in the sequence."""
    num_tokens: int
    blocks: Sequence[int]
    """Of the sequence, as many as it has."""


class Packed:
    """The tokens of one forward pass, and where their keys and values lie.

    Args:
        parts: all of them, in order of their rows.
        is_exact: treat all tokens as single ones.
    """

    def __init__(self, parts: Sequence[Part], memory: Memory, *, is_exact: bool = False) -> None:
        size, device = memory.block_size, memory.keys.device
        self._memory = memory
        positions = np.concatenate([_range(part.first, part.num_tokens) for part in parts])
        of = [np.asarray(p.blocks)[_range(p.first, p.num_tokens) // size] for p in parts]
        self.positions = torch.from_numpy(positions).to(device)
        self.blocks = torch.from_numpy(np.concatenate(of)).to(device)
        self.places = torch.from_numpy(positions % size).to(device)
        self._several = [part for part in parts if part.num_tokens > 1 and not is_exact]
        self._single = [part for part in parts if part.num_tokens == 1 or is_exact]
        self._is_exact = is_exact
        self._views: dict[int | None, _View] = {}

    def view(self, window: int | None) -> "_View":
        """Who sees whom, where tokens see `window` ones; None: all before."""
        if window not in self._views:
            parts = [_SeveralTokens(part, window, self._memory) for part in self._several]
            single = (
                _SingleTokens(self._single, window, self._memory, is_exact=self._is_exact)
                if self._single
                else None
            )
            self._views[window] = _View(self, parts, single)
        return self._views[window]


@dataclass(frozen=True)
class _View:
    packed: Packed
    parts: Sequence["_SeveralTokens"]
    single: "_SingleTokens | None"


class PagedAttend:
    """The attention core of a decoder whose keys and values are in blocks; see `Attend`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.packed: Packed | None = None
        """Of the forward pass that runs."""

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> _View:
        """Who sees whom in this forward pass."""
        assert self.packed is not None, "a paged core attends within a forward pass of a Runner"
        assert documents is None, "packed sequences are told apart by their blocks"
        return self.packed.view(window)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Not for this object, but for that of each layer."""
        raise TypeError("each layer has its own part of the memory: use `put_in`")

    @contextmanager
    def put_in(self, decoder: Decoder) -> Iterator[None]:
        """Borrow a network: within the context it attends over blocks, and as before afterwards."""
        before, attentions = decoder.attend, [block.attention for block in blocks_of(decoder)]
        decoder.set_attend(self)
        for layer, attention in enumerate(attentions):
            attention.attend = _LayerAttend(self._memory, layer)
            if isinstance(attention, LatentAttention):
                attention.is_absorbed = True
        try:
            yield
        finally:
            decoder.set_attend(before)
            for attention in attentions:
                if isinstance(attention, LatentAttention):
                    attention.is_absorbed = False


def blocks_of(decoder: Decoder) -> list[Block]:
    """The layers of a network that is not cut into stages."""
    return cast(list[Block], list(decoder.blocks))


class _LayerAttend:
    """The core of one layer."""

    def __init__(self, memory: Memory, layer: int) -> None:
        self._keys, self._values = memory.keys[layer], memory.values[layer]
        self._has_values = memory.values is not memory.keys

    def mask(self, *args: Any) -> Any:
        """The whole decoder asks once for all layers."""
        raise TypeError("the decoder's own core makes the masks")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: _View) -> Tensor:
        """Write k and v (1, kv_heads, num_tokens, _) into blocks, and attend; see `Attend`."""
        packed, width = mask.packed, v.shape[-1]
        self._keys[packed.blocks, :, packed.places] = k[0].transpose(0, 1)
        if self._has_values:
            self._values[packed.blocks, :, packed.places] = v[0].transpose(0, 1)
        out = q.new_empty(*q.shape[:-1], width)
        for part in mask.parts:
            out[:, :, part.rows] = part.attend(q, k, v, self._keys, self._values)
        if mask.single is not None:
            rows, attended = mask.single.attend(q[0], self._keys, self._values)
            out[0, :, rows] = attended[..., :width].transpose(0, 1)
        return out


class _SeveralTokens:
    """A part of a prompt attends."""

    def __init__(self, part: Part, window: int | None, memory: Memory) -> None:
        self.rows = slice(part.row, part.row + part.num_tokens)
        length = part.first + part.num_tokens
        device, self._sdpa = memory.keys.device, Sdpa()
        self._blocks = None
        if part.first == 0:  # it sees only what comes with it
            self._mask = self._sdpa.mask(length, window, None, device)
            return
        used = -(-length // memory.block_size)
        self._blocks, self._length = torch.tensor(part.blocks[:used], device=device), length
        keys = torch.arange(length, device=device)
        distance = keys[part.first :, None] - keys
        visible = distance >= 0
        self._mask = visible if window is None else visible & (distance < window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (1, heads, num_tokens, value_dim)."""
        own_q, width = q[:, :, self.rows], v.shape[-1]
        if self._blocks is None:
            return self._sdpa(own_q, k[:, :, self.rows], v[:, :, self.rows], self._mask)
        return self._sdpa(own_q, self._read(keys), self._read(values)[..., :width], self._mask)

    def _read(self, kept: Tensor) -> Tensor:
        """(1, kv_heads, length, width), of the sequence in order."""
        read = kept[self._blocks].transpose(0, 1).flatten(1, 2)
        return read[None, :, : self._length]


@dataclass(frozen=True)
class _Read:
    """Pairs of a token and a block, whose results are computed in one call."""

    blocks: slice | Tensor
    tokens: Tensor
    """(num_pairs,) of the single tokens."""
    mask: Tensor
    """(num_pairs, 1, 1, block_size), added to the scores."""


class _SingleTokens:
    """Tokens attend one by one, all at once.

    Args:
        parts: each token of them attends alone.
        is_exact: add up the results of blocks in one order, however many there are.
    """

    def __init__(
        self, parts: Sequence[Part], window: int | None, memory: Memory, *, is_exact: bool
    ) -> None:
        device, dtype = memory.keys.device, memory.keys.dtype
        rows = np.concatenate([_range(part.row, part.num_tokens) for part in parts])
        pairs = _Pairs(parts, window, memory.block_size)
        self.rows, self._is_exact = torch.from_numpy(rows).to(device), is_exact

        def read(blocks: slice | Ints, of_pair: Ints) -> _Read:
            mask = np.where(pairs.visible[of_pair], 0.0, -np.inf)
            mask[of_pair < 0] = -np.inf
            return _Read(
                torch.from_numpy(blocks).to(device) if isinstance(blocks, np.ndarray) else blocks,
                torch.from_numpy(pairs.token[of_pair]).to(device),
                torch.from_numpy(mask).to(device, dtype)[:, None, None],
            )

        reads, place_of_pair = pairs.reads()
        self._reads = [read(blocks, of_pair) for blocks, of_pair in reads]
        self._places = torch.from_numpy(pairs.by_token(place_of_pair)).to(device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: (heads, num_tokens, width), of all packed tokens.
            keys: (num_blocks, kv_heads, block_size, width); `values` likewise.

        Returns:
            which rows these are, and their results: (num_rows, heads, width).
        """
        num_kv = keys.shape[1]
        own = q[:, self.rows].transpose(0, 1)
        own = own.unflatten(1, (num_kv, -1))  # (rows, kv_heads, group, width)
        results = [
            _attend_pairs(own[read.tokens], keys[read.blocks], values[read.blocks], read.mask)
            for read in self._reads
        ]
        nothing = own.new_zeros(1, *own.shape[1:])
        out = torch.cat([*(result for result, _ in results), nothing])
        sums = torch.cat([*(log for _, log in results), nothing[..., 0].float() - torch.inf])
        if self._is_exact:
            return self.rows, self._in_order(sums, out).flatten(1, 2)
        weights = sums[self._places].softmax(1)  # (rows, most_blocks, kv_heads, group)
        combined = torch.einsum("rbkg,rbkgw->rkgw", weights.to(out.dtype), out[self._places])
        return self.rows, combined.flatten(1, 2)

    def _in_order(self, sums: Tensor, out: Tensor) -> Tensor:
        """The same sum, block after block, whatever the others' numbers of blocks."""
        of_token = sums[self._places]
        parts = (of_token - of_token.amax(1, keepdim=True)).exp()
        total = torch.zeros_like(parts[:, 0])
        combined = torch.zeros_like(out[self._places[:, 0]], dtype=torch.float32)
        for block in range(parts.shape[1]):
            total = total + parts[:, block]
            combined += parts[:, block, ..., None] * out[self._places[:, block]]
        return (combined / total[..., None]).to(out.dtype)


class _Pairs:
    """Which token sees which part of which block, as arrays over the pairs."""

    def __init__(self, parts: Sequence[Part], window: int | None, size: int) -> None:
        position = np.concatenate([_range(part.first, part.num_tokens) for part in parts])
        table = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int64)
        for number, part in enumerate(parts):
            table[number, : len(part.blocks)] = part.blocks
        part_of = np.repeat(np.arange(len(parts)), [part.num_tokens for part in parts])
        oldest = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
        self._counts = position // size - oldest // size + 1
        self.token = np.repeat(np.arange(len(position)), self._counts)
        self._starts = np.cumsum(self._counts) - self._counts
        place = np.arange(len(self.token)) - self._starts[self.token] + (oldest // size)[self.token]
        self.block = table[part_of[self.token], place]
        key = place[:, None] * size + np.arange(size)
        self.visible = (key <= position[self.token, None]) & (key >= oldest[self.token, None])

    def reads(self) -> tuple[list[tuple[slice | Ints, Ints]], Ints]:
        """How blocks are read: each time which ones, and the pair of each (-1: nobody's).

        Returns:
            the reads, and each pair's place among all their results.
        """
        everything = np.arange(len(self.block))
        low, high = int(self.block.min()), int(self.block.max()) + 1
        if high - low > _SPARSE * len(self.block):
            return [(self.block, everything)], everything
        of_pair = np.full(high - low, -1)
        of_pair[self.block[::-1] - low] = everything[::-1]  # the first of those that share it
        place = self.block - low
        reads: list[tuple[slice | Ints, Ints]] = [(slice(low, high), of_pair)]
        others = np.flatnonzero(of_pair[place] != everything)
        if len(others):
            place[others] = high - low + np.arange(len(others))
            reads.append((self.block[others], others))
        return reads, place

    def by_token(self, place_of_pair: Ints) -> Ints:
        """(num_tokens, most_blocks): the places of a token's pairs, then that of nothing."""
        column = np.arange(self._counts.max())
        pair = np.minimum(self._starts[:, None] + column, len(place_of_pair) - 1)
        return np.where(column < self._counts[:, None], place_of_pair[pair], -1)


def _attend_pairs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each pair, not causal, and the logarithms of what its scores sum up to.

    Args:
        q: (num_pairs, kv_heads, group, width). k, v: (num_pairs, kv_heads, block_size, width).
        mask: (num_pairs, 1, 1, block_size).

    Returns:
        (num_pairs, kv_heads, group, width), and (num_pairs, kv_heads, group) in fp32; where nothing
        is visible zeros, and a logarithm that its place must not be taken from.
    """
    if q.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(q, k, v, attn_mask=mask)
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5 + mask
    sums = scores.logsumexp(-1, keepdim=True)
    return (scores - sums).exp().nan_to_num().to(v.dtype) @ v, sums[..., 0]


def _range(first: int, count: int) -> Ints:
    return np.arange(first, first + count)
