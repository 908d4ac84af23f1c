"""Exact passes: what makes each token's results independent of its company.

A product's rounding may depend on how many rows it has, not on what stands in the other rows. So a
pass has always as many tokens, attention adds up in one order (`paged`), and experts work on tiles
of as many rows. Whether a row's place matters depends on the product's shape and the device, so it
is tried once (`check_places`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.models.decoder import Decoder
from paceline.models.moe import Compute, expert_layers

_TILE_ROWS = 16


class _Tiles:
    """Experts work on tiles of 16 rows, filled up with zeros (`models.moe.TokenDispatcher`)."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: Compute) -> Tensor:
        out, start = torch.empty_like(rows), 0
        for slot, count in enumerate(counts.tolist()):
            of_tile = torch.zeros_like(counts)
            of_tile[slot] = _TILE_ROWS
            for first in range(start, start + count, _TILE_ROWS):
                stop = min(first + _TILE_ROWS, start + count)
                tile = rows.new_zeros(_TILE_ROWS, rows.shape[1])
                tile[: stop - first] = rows[first:stop]
                out[first:stop] = experts(tile, of_tile)[: stop - first]
            start += count
        return out


@contextmanager
def tiled_experts(decoder: Decoder) -> Iterator[None]:
    """Within the context the experts of a network that holds all of them work on tiles."""
    layers = expert_layers(decoder).values()
    before = [layer.exchange for layer in layers]
    for layer in layers:
        layer.exchange = _Tiles()
    try:
        yield
    finally:
        for layer, exchange in zip(layers, before, strict=True):
            layer.exchange = exchange


def check_places(logits: Tensor) -> None:
    """Check that equal tokens had equal results in all places of a pass.

    Args:
        logits: (num_tokens, vocab), of a pass whose tokens are all the same.

    Raises:
        InputError: they differ.
    """
    if not torch.equal(logits, logits[:1].expand_as(logits)):
        raise InputError(
            "serve.exact can't be kept on this device: some product of this network rounds rows "
            "differently by their place; use widths that are multiples of 16, or set serve.exact "
            "to false."
        )
