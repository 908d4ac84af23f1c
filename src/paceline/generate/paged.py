"""Attention over blocks: the keys and values of many sequences, kept between forward passes.

How it works: a forward pass has packed tokens, (1, num_tokens), of several sequences. Every layer
writes its new keys and values into blocks, and each token attends to those of its own sequence.

- A part of a prompt attends in one call of torch's attention, over its sequence's keys in order.
- Single tokens, one of each sequence, attend all together. On a CPU their scores and results are
  sums of the rows of blocks (`bags`). Elsewhere, and for latent attention and many heads over one,
  the blocks that a token sees are cut into pieces of equally many, as large as filling them up
  allows. Pieces are copied together and attend in one batched product each for scores and results;
  the results of a token with several pieces are combined by the logarithms of their sums
  (flash-decoding, https://pytorch.org/blog/flash-decoding/). With one query per sequence torch's
  attention for CPUs takes longer: 32 sequences of 128 tokens, 8 heads over 4 of 64 numbers, one
  core: 1.8 ms a layer and 0.6 so (bf16 1.2 and 0.3; EPYC, torch 2.13).
- `is_exact` treats all tokens as single ones, and attends block by block with torch's attention:
  then no result depends on what else is computed.

Latent attention is absorbed (`LatentAttention.is_absorbed`): one narrow key per token is kept, and
its values are a part of it.

Memory of int8 holds rows in 8 bits (`narrow_keys`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.local_part import local_part
from paceline.generate.bags import MOST_QUERIES, SummedTokens
from paceline.generate.narrow_keys import is_narrow, kept_width, narrowed, scales_of, widened
from paceline.models.attention import PLAIN, LatentAttention, Scores, Sdpa
from paceline.models.decoder import Block, Decoder

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
    queries: int
    """Heads of queries over each of keys."""

    @staticmethod
    def of(decoder: Decoder) -> "KeyShape":
        """Of a network, or of a rank's part of one."""
        attention, num_layers = blocks_of(decoder)[0].attention, len(decoder.blocks)
        if isinstance(attention, LatentAttention):
            width = attention.shape.kv_rank + attention.shape.rope_dim
            return KeyShape(num_layers, 1, width, False, decoder.model.num_heads)
        rows = local_part(attention.k_proj.weight).shape[0]
        queries = decoder.model.num_heads // decoder.model.num_kv_heads
        width = attention.head_dim
        return KeyShape(num_layers, rows // width, width, True, queries)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """What a block takes, in all layers, in memory of a type."""
        values = 2 if self.has_values else 1
        row_bytes = kept_width(self.width, dtype) * dtype.itemsize
        return self.num_layers * values * self.num_heads * block_size * row_bytes


class Memory:
    """The keys and values of all blocks: (num_layers, num_blocks, num_heads, block_size, width),
    or rows of `narrow_keys`, where the type is int8.

    There is one block more than was asked for: whatever nobody wants is written there.

    Args:
        is_exact: single tokens attend in exact passes only.
    """

    def __init__(
        self,
        shape: KeyShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_exact: bool = False,
    ) -> None:
        self.block_size, self.num_blocks, self.spare_block = block_size, num_blocks, num_blocks
        self.shape = shape
        self.has_columns = (
            device.type == "cpu"
            and shape.has_values
            and dtype.is_floating_point
            and shape.queries <= MOST_QUERIES
            and not is_exact
        )
        """Whether keys lie by column, and single tokens attend by `bags`."""
        self.block_bytes = shape.block_bytes(block_size, dtype)
        width = kept_width(shape.width, dtype)
        size = (shape.num_layers, num_blocks + 1, shape.num_heads, block_size, width)
        # Not filled: what no sequence has used yet takes no memory on a CPU.
        self.keys = torch.empty(size, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys) if shape.has_values else self.keys
        if self.has_columns:
            self.keys = self.keys.view(*size[:3], shape.width, block_size).mT
        self.clear([self.spare_block])

    def clear(self, blocks: Sequence[int]) -> None:
        """Blocks get new users: what isn't a number there must not reach them through a mask."""
        if blocks:
            for kept in {self.keys, self.values}:
                kept[:, torch.tensor(blocks, device=kept.device)] = 0

    def read(self, block: int) -> Tensor:
        """A copy of a block: (block_bytes,) uint8."""
        data = torch.empty(self.block_bytes, dtype=torch.uint8, device=self.keys.device)
        for kept, part in self._parts(block, data):
            part.copy_(kept)
        return data

    def write(self, block: int, data: Tensor) -> None:
        """Make a block what `read` returned."""
        for kept, part in self._parts(block, data):
            kept.copy_(part)

    def _parts(self, block: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        both = [self.keys] if self.values is self.keys else [self.keys, self.values]
        for kept, part in zip(both, data.chunk(len(both)), strict=True):
            of_block = kept[:, block]
            yield of_block, part.view(kept.dtype).view(of_block.shape)


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
            self._views[window] = _View(self, parts, self._single_tokens(window))
        return self._views[window]

    def _single_tokens(self, window: int | None) -> "_SingleTokens | SummedTokens | None":
        if not self._single:
            return None
        if not self._memory.has_columns or self._is_exact:
            return _SingleTokens(self._single, window, self._memory, is_exact=self._is_exact)
        shape, dtype = self._memory.shape, self._memory.keys.dtype
        return SummedTokens(
            np.array([part.row for part in self._single]),
            np.array([part.first for part in self._single]),
            [part.blocks for part in self._single],
            window,
            self._memory.block_size,
            shape.num_heads,
            shape.width,
            shape.queries,
            _computed_in(dtype),
        )


@dataclass(frozen=True)
class _View:
    packed: Packed
    parts: Sequence["_SeveralTokens"]
    single: "_SingleTokens | SummedTokens | None"


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

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scores: Scores = PLAIN
    ) -> Tensor:
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

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: _View, scores: Scores = PLAIN
    ) -> Tensor:
        """Write k and v (1, kv_heads, num_tokens, _) into blocks, and attend; see `Attend`."""
        width = v.shape[-1]
        k = self._keep(self._keys, k, mask)
        v = self._keep(self._values, v, mask) if self._has_values else k[..., :width]
        if mask.single is not None:
            of_single = mask.single.attend(q[0].transpose(0, 1), self._keys, self._values, scores)
            of_single = of_single[None, ..., :width].transpose(1, 2)
            if not mask.parts:
                return of_single
        out = q.new_empty(*q.shape[:-1], width)
        for part in mask.parts:
            out[:, :, part.rows] = part.attend(q, k, v, self._keys, self._values, scores)
        if mask.single is not None:
            out[:, :, mask.single.rows] = of_single
        return out

    def _keep(self, kept: Tensor, rows: Tensor, mask: _View) -> Tensor:
        """Write rows (1, kv_heads, num_tokens, _) into blocks; as parts that begin with them read
        them."""
        places = mask.packed.blocks, slice(None), mask.packed.places
        by_token = rows[0].transpose(0, 1)
        if not is_narrow(kept.dtype):
            kept[places] = by_token
            return rows
        kept[places] = narrow = narrowed(by_token)
        if not mask.parts:
            return rows
        return widened(narrow, rows.shape[-1], rows.dtype).transpose(0, 1)[None]


class _SeveralTokens:
    """A part of a prompt attends."""

    def __init__(self, part: Part, window: int | None, memory: Memory) -> None:
        self.rows = slice(part.row, part.row + part.num_tokens)
        length = part.first + part.num_tokens
        device, self._sdpa = memory.keys.device, Sdpa()
        self._is_first, self._length = part.first == 0, length
        if self._is_first:  # it sees only what comes with it
            self._mask = self._sdpa.mask(length, window, None, device)
            return
        self._blocks = torch.tensor(part.blocks[: -(-length // memory.block_size)], device=device)
        keys = torch.arange(length, device=device)
        distance = keys[part.first :, None] - keys
        visible = distance >= 0
        self._mask = visible if window is None else visible & (distance < window)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, change: Scores
    ) -> Tensor:
        """Return (1, heads, num_tokens, value_dim)."""
        own_q, width = q[:, :, self.rows], v.shape[-1]
        if self._is_first:
            return self._sdpa(own_q, k[:, :, self.rows], v[:, :, self.rows], self._mask, change)
        own_k = self._read(keys, q)
        own_v = own_k if values is keys else self._read(values, q)
        return self._sdpa(own_q, own_k, own_v[..., :width], self._mask, change)

    def _read(self, kept: Tensor, q: Tensor) -> Tensor:
        """(1, kv_heads, length, width), of the sequence in order, as wide as q."""
        read = kept.index_select(0, self._blocks).transpose(0, 1).flatten(1, 2)
        read = read[None, :, : self._length]
        return widened(read, q.shape[-1], q.dtype) if is_narrow(kept.dtype) else read


class _SingleTokens:
    """Tokens attend one by one, all at once.

    Args:
        parts: each token of them attends alone.
        is_exact: block by block, and their results added up in one order, however many there are.
    """

    def __init__(
        self, parts: Sequence[Part], window: int | None, memory: Memory, *, is_exact: bool
    ) -> None:
        device = memory.keys.device
        rows = np.concatenate([_range(part.row, part.num_tokens) for part in parts])
        pieces = _Pieces(parts, window, memory, 1 if is_exact else None)
        heads = np.arange(memory.keys.shape[2])[:, None, None]
        self.rows, self._is_exact = torch.from_numpy(rows).to(device), is_exact
        self._rows = torch.from_numpy(rows[pieces.token]).to(device)
        read = pieces.blocks * len(heads) + heads  # (kv_heads, num_pieces, blocks of a piece)
        self._read, self._num_keys = torch.from_numpy(read.ravel()).to(device), pieces.num_keys
        mask = torch.from_numpy(np.where(pieces.visible, 0.0, -np.inf))[:, None]
        self._mask = mask.to(device, _computed_in(memory.keys.dtype))
        self._of_token = torch.from_numpy(pieces.of_token).to(device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, change: Scores) -> Tensor:
        """Attend.

        Args:
            q: (num_tokens, heads, width), of all packed tokens.
            keys: (num_blocks, kv_heads, block_size, width); `values` likewise.
            change: what becomes of scores.

        Returns:
            (num_rows, heads, width)
        """
        own = q.index_select(0, self._rows).unflatten(1, (keys.shape[1], -1)).transpose(0, 1)
        k = self._of_pieces(keys)
        v = k if values is keys else self._of_pieces(values)
        key_scales = value_scales = None
        if is_narrow(keys.dtype):
            key_scales, value_scales = scales_of(k).mT, scales_of(v).mT
            k, v = (each[..., : q.shape[-1]].to(q.dtype) for each in (k, v))
        most = self._of_token.shape[1]
        if self._is_exact:
            results, sums = _attend_blocks(own, k, v, self._mask, change)
        else:
            scores = _scores(own, k, self._mask, change, key_scales)
            weights = scores.softmax(-1)
            weights = weights if value_scales is None else weights * value_scales
            results = weights.to(v.dtype) @ v
            if most == 1 and change.sinks is None:
                return results.transpose(0, 1).flatten(1, 2)
            sums = scores.logsumexp(-1)
        # One more, which is nothing, for tokens with fewer pieces than others.
        results = F.pad(results.transpose(0, 1), (0, 0, 0, 0, 0, 0, 0, 1))
        sums = F.pad(sums.transpose(0, 1), (0, 0, 0, 0, 0, 1), value=-torch.inf)
        by_token = (-1, most)
        of_token = results.index_select(0, self._of_token.flatten()).unflatten(0, by_token)
        weights = sums.index_select(0, self._of_token.flatten()).unflatten(0, by_token)
        largest = weights.amax(1, keepdim=True)
        if change.sinks is not None:
            of_sink = change.sinks.to(weights.dtype).view(weights.shape[2:])
            largest = largest.maximum(of_sink)
        weights = (weights - largest).exp()  # (rows, most, kv_heads, group)
        if self._is_exact:
            combined, total = of_token[:, 0] * weights[:, 0, ..., None], weights[:, 0]
            for piece in range(1, most):
                combined += of_token[:, piece] * weights[:, piece, ..., None]
                total = total + weights[:, piece]
        else:
            combined, total = (of_token * weights[..., None]).sum(1), weights.sum(1)
        if change.sinks is not None:
            total = total + (of_sink - largest[:, 0]).exp()
        return (combined / total[..., None]).flatten(1, 2).to(q.dtype)

    def _of_pieces(self, kept: Tensor) -> Tensor:
        """(kv_heads, num_pieces, num_keys, width), or rows of as many."""
        read = kept.flatten(0, 1).index_select(0, self._read)
        return read.view(kept.shape[1], -1, self._num_keys, kept.shape[-1])


class _Pieces:
    """Which token sees which part of which blocks: what each sees is cut into pieces of so many
    neighbouring blocks, and filled up to that.

    Args:
        num_blocks: of a piece; None: what costs least.
    """

    def __init__(
        self, parts: Sequence[Part], window: int | None, memory: Memory, num_blocks: int | None
    ) -> None:
        size = memory.block_size
        position = np.concatenate([_range(part.first, part.num_tokens) for part in parts])
        oldest = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
        counts = position // size - oldest // size + 1
        num_blocks = num_blocks or _cheapest(counts, size)
        self.num_keys = num_blocks * size
        most = max(len(part.blocks) for part in parts) + num_blocks
        table = np.full((len(parts), most), memory.spare_block)
        for number, part in enumerate(parts):
            table[number, : len(part.blocks)] = part.blocks
        part_of = np.repeat(np.arange(len(parts)), [part.num_tokens for part in parts])
        counts = -(-counts // num_blocks)
        starts = np.cumsum(counts) - counts
        self.token = np.repeat(np.arange(len(position)), counts)
        number = np.arange(len(self.token)) - starts[self.token]
        first = (oldest // size)[self.token] + number * num_blocks
        self.blocks = table[part_of[self.token, None], first[:, None] + np.arange(num_blocks)]
        key = first[:, None] * size + np.arange(self.num_keys)
        self.visible = (key <= position[self.token, None]) & (key >= oldest[self.token, None])
        column = np.arange(counts.max())
        self.of_token = np.where(
            column < counts[:, None], starts[:, None] + column, len(self.token)
        )
        """(num_tokens, most pieces): a token's, then the number of pieces, which is none's."""


def _cheapest(counts: Ints, size: int) -> int:
    """How many blocks a piece has, where tokens see so many: few keys are there only to fill up."""
    most = int(counts.max())

    def cost(blocks: int) -> int:
        pieces = int((-(-counts // blocks)).sum())
        return pieces * (blocks * size + _COST_OF_PIECE) + _COST_OF_SUM * (blocks < most)

    return min((most, *(2**power for power in range(most.bit_length()))), key=cost)


_COST_OF_PIECE, _COST_OF_SUM = 8, 400
"""Beside its keys, and of combining pieces, in keys (measured: 0.1 us a key in bf16, 0.4 in fp32;
0.7 us a piece, 80 us to combine)."""


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Masks and softmaxes are in fp32 where keys are narrower, and all of exact attention is."""
    return torch.promote_types(dtype, torch.float32)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor, change: Scores, scales: Tensor | None = None
) -> Tensor:
    """What each piece's softmax is of: (kv_heads, num_pieces, group, num_keys).

    In bf16 scores are rounded to it: logits of 4 layers were 0.76 % off those of fp64, and 0.74 %
    with scores in fp32.

    Args:
        q: (kv_heads, num_pieces, group, width). k: (kv_heads, num_pieces, num_keys, width).
        mask: (num_pieces, 1, num_keys), added to the scores; each piece sees something.
        change: what becomes of them.
        scales: (kv_heads, num_pieces, 1, num_keys), of keys that are whole numbers.
    """
    scores = q @ k.mT
    scores = scores if scales is None else scores * scales
    return change.masked(scores, q.shape[-1] ** -0.5, mask)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, change: Scores
) -> tuple[Tensor, Tensor]:
    """Attention of each piece, whose bits don't depend on the other pieces; shapes as `_scores`.

    Returns:
        (kv_heads, num_pieces, group, width), and the logarithms of what scores sum up to,
        (kv_heads, num_pieces, group).
    """
    q, k, v = (each.to(mask.dtype) for each in (q, k, v))
    if q.device.type == "cpu" and change.cap is None:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(q, k, v, attn_mask=mask[None])
    scores = _scores(q, k, mask, change)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _range(first: int, count: int) -> Ints:
    return np.arange(first, first + count)
