"""The blocks of a module: its repeated layers, the units of recompute, compile and sharding."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class PlacedBlock(NamedTuple):
    """A block and where it stands."""

    parent: nn.Module | None
    """The list that holds it; None: the block is the whole module."""
    name: str
    block: nn.Module


def blocks_of(module: nn.Module) -> list[PlacedBlock]:
    """The children of the outermost ModuleLists and Sequentials, or else the module itself."""
    return list(_children_of_lists(module)) or [PlacedBlock(None, "", module)]


def _children_of_lists(module: nn.Module) -> Iterator[PlacedBlock]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for name, child in module.named_children():
            yield PlacedBlock(module, name, child)
        return
    for child in module.children():
        yield from _children_of_lists(child)
