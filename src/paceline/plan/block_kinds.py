"""Block kinds: the blocks of a network that cost the same are counted, not repeated.

A network of a hundred layers has one to four kinds of block: with a sliding window or without, with
experts or dense. Every formula works out a block of each kind once and multiplies.
"""

from functools import lru_cache
from typing import NamedTuple

from paceline.config.model import Model


class BlockKind(NamedTuple):
    """Blocks of a network that are alike."""

    layer: int
    """The first of them: stands for all."""
    window: int | None
    """How far attention sees, tokens; None: everything."""
    has_experts: bool
    layers: tuple[int, ...]
    """Their indices."""


@lru_cache(maxsize=64)
def block_kinds_of(model: Model) -> tuple[BlockKind, ...]:
    """The kinds of block of a network, in the order of their first appearance."""
    found: dict[tuple[int | None, bool], list[int]] = {}
    for layer in range(model.num_layers):
        found.setdefault((model.window(layer), model.has_experts(layer)), []).append(layer)
    return tuple(
        BlockKind(layers[0], window, has_experts, tuple(layers))
        for (window, has_experts), layers in found.items()
    )
