"""Which tokens a rank of "cp" holds, and which of them see which: pure, on numbers.

A causal query sees only what came before it, so a rank with the last tokens would work most. The
sequence is therefore cut into 2 x ring chunks, and ring rank i holds the chunks i and
2 x ring - 1 - i (zig-zag): then each pair of ranks has the same number of visible pairs, and where
no window or document hides more, they make up whole halves of a block. Within a ring rank the
tokens are cut contiguously over its Ulysses ranks.

A *tile* is a rectangle of (queries, keys) of one block. Tiles of what is hidden don't exist; the
others are full, causal (the diagonal), or masked: cut by a window's or a document's edge.

Zig-zag: https://github.com/zhuzilin/ring-flash-attention; the same thought with single tokens in
place of chunks: https://arxiv.org/abs/2311.09431
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.config.errors import InputError

ROWS = 512
"""Queries of a masked tile at most: bounds the memory of its mask, which is rows x keys."""


class Tile(NamedTuple):
    """Queries q0..q1-1 of this rank, keys k0..k1-1 of a block: some of these pairs are visible."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "masked"]
    q_at: int = 0
    """Position in the whole sequence of query q0; used by masked tiles, as is k_at."""
    k_at: int = 0


class Rows(NamedTuple):
    """Neighbouring queries of a rank, within a chunk."""

    q0: int
    start: int
    """Position of the first; the last has stop - 1."""
    stop: int

    @property
    def last(self) -> int:
        """Position of the last one."""
        return self.stop - 1


def positions_of(seq_len: int, ring: int, ulysses: int, rank_in_cp: int) -> Tensor:
    """Return the positions in the whole sequence of the tokens that a rank of "cp" holds.

    Args:
        seq_len: tokens of the whole sequence.
        ring: ranks that pass keys in a ring.
        ulysses: ranks that exchange heads, neighbours in cp.
        rank_in_cp: of ring x ulysses.

    Returns:
        (seq_len / (ring x ulysses),) positions, int64.

    Raises:
        InputError: the sequence doesn't split into equal parts.
    """
    parts = (2 * ring if ring > 1 else 1) * ulysses
    if seq_len % parts:
        raise InputError(
            f"A sequence of {seq_len} tokens was given to {ring} x {ulysses} ranks (ring x "
            f"ulysses), which need a multiple of {parts}: change seq_len or the layout."
        )
    ring_rank, place = divmod(rank_in_cp, ulysses)
    whole = torch.arange(seq_len)
    if ring > 1:
        chunks = whole.chunk(2 * ring)
        whole = torch.cat([chunks[at] for at in chunks_of(ring, ring_rank)])
    return whole.chunk(ulysses)[place]


def chunks_of(ring: int, rank: int) -> tuple[int, int]:
    """Return the two chunks, of 2 x ring, that a ring rank holds, in their order."""
    return rank, 2 * ring - 1 - rank


def causal_tiles(rank: int, source: int, half: int) -> list[Tile]:
    """Tiles of a rank's queries and the block of rank `source`, with nothing hidden but the future.

    Of another rank's block, half of the pairs are visible, whoever it is.

    Args:
        rank: in the ring.
        source: whose keys these are.
        half: tokens of a chunk; a rank has two.
    """
    if source == rank:
        return [Tile(0, 2 * half, 0, 2 * half, "causal")]
    if source < rank:  # its first chunk comes before both of ours, its second after both
        return [Tile(0, 2 * half, 0, half, "full")]
    return [Tile(half, 2 * half, 0, 2 * half, "full")]


def row_blocks(ring: int, rank: int, half: int) -> list[Rows]:
    """Cut a rank's queries into pieces of at most ROWS neighbours."""
    return [
        Rows(own * half + at, chunk * half + at, chunk * half + min(at + ROWS, half))
        for own, chunk in enumerate(chunks_of(ring, rank))
        for at in range(0, half, ROWS)
    ]


def masked_tiles(
    ring: int, source: int, half: int, rows: list[Rows], low: list[int], sure: list[int]
) -> list[Tile]:
    """Tiles of a rank's queries and the block of rank `source` under a window or documents.

    Args:
        ring: its size.
        source: whose keys these are.
        half: tokens of a chunk.
        rows: from `row_blocks`.
        low: for each of `rows`, a position before which no query of it sees anything.
        sure: for each of `rows`, a position from which on every query of it, in every sample of the
            batch, sees all that is not in its future.
    """
    return [
        tile
        for row, first, clear in zip(rows, low, sure, strict=True)
        for own, chunk in enumerate(chunks_of(ring, source))
        for tile in _cut(row, chunk * half, own * half, half, first, clear)
    ]


def _cut(row: Rows, start: int, k0: int, half: int, low: int, sure: int) -> Iterator[Tile]:
    """Tiles of `row` and the chunk of keys that starts at position `start`, k0 in its block."""
    first, stop = max(low, start), min(row.stop, start + half)
    if first >= stop:
        return
    # Up to `sure` some pairs may be hidden; from the row's own start on lies the diagonal. Where
    # both meet, one masked tile takes all.
    cuts = (sure, row.start) if sure <= row.start else ()
    edges = {first, stop} | {edge for edge in cuts if first < edge < stop}
    for a, b in pairwise(sorted(edges)):
        kind: Literal["full", "causal", "masked"] = "masked"
        if sure <= a and b <= row.start:
            kind = "full"
        elif sure <= a and a == row.start:
            kind = "causal"
        size = row.stop - row.start
        yield Tile(row.q0, row.q0 + size, k0 + a - start, k0 + b - start, kind, row.start, a)
