"""Load: messages and values on a cluster's links, counted from the rounds that are executed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.comm.algorithms.blocks import Round, Transfer
from paceline.comm.algorithms.rounds import Op, rounds

MOST_RANKS = 256
"""Of a group whose load is counted: beyond, that takes longer than planning may."""


@dataclass(frozen=True)
class LinkLoad:
    """What one round puts on the links, by the rank or node that has the most of it."""

    messages: int
    """Of one rank, sent or received, whichever is more."""
    values: int
    """Through one rank, each way."""
    messages_across: int
    """Those between nodes."""
    values_across: int
    """Through the links of one node, of all its ranks together, each way."""
    added: int
    """Values that one rank adds up."""


@lru_cache(maxsize=1024)
def load(
    algorithm: str, op: Op, num_ranks: int, num_values: int, ranks_per_node: int
) -> tuple[LinkLoad, ...]:
    """The load of each round of an algorithm; arguments as of `rounds`."""
    of_rank = [
        rounds(algorithm, op, num_ranks, rank, num_values, ranks_per_node=ranks_per_node)
        for rank in range(num_ranks)
    ]
    return tuple(_load(column, ranks_per_node) for column in zip(*of_rank, strict=True))


def _load(of_rank: Sequence[Round], ranks_per_node: int) -> LinkLoad:
    values, values_across = [0], [0]
    messages, messages_across = [0], [0]
    for way in ("sends", "receives"):
        transfers: list[tuple[Transfer, ...]] = [getattr(each, way) for each in of_rank]
        across = [_across(rank, each, ranks_per_node) for rank, each in enumerate(transfers)]
        messages += map(len, transfers)
        messages_across += map(len, across)
        values += map(_values, transfers)
        nodes = range(0, len(of_rank), ranks_per_node)
        values_across += (sum(map(_values, across[at : at + ranks_per_node])) for at in nodes)
    return LinkLoad(
        messages=max(messages),
        values=max(values),
        messages_across=max(messages_across),
        values_across=max(values_across),
        added=max(_values(each.receives) * each.adds for each in of_rank),
    )


def _across(rank: int, transfers: Sequence[Transfer], ranks_per_node: int) -> tuple[Transfer, ...]:
    node = rank // ranks_per_node
    return tuple(each for each in transfers if each.peer // ranks_per_node != node)


def _values(transfers: Sequence[Transfer]) -> int:
    return sum(each.stop - each.start for each in transfers)
