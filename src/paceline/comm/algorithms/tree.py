"""Tree: an all-reduce up and down two binary trees, each with half of the buffer.

A rank is a leaf of one tree and an inner node of the other one, so that all ranks send alike. Each
half is cut into segments that follow each other: while a rank adds one, the last one is on its way
to its parent. Rounds are numbered so that a child's sending and its parent's receiving agree: the
deepest level starts, each level above is one round later.

Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35 (2009); NCCL 2.4 uses the same for all-reduces across nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.comm.algorithms.blocks import Cut, Round, Transfer, split_evenly

SEGMENT_VALUES = 1 << 17
"""512 KiB of fp32."""


@dataclass(frozen=True)
class TreePosition:
    """A rank's neighbours in one tree."""

    parent: int | None
    children: tuple[int, ...]
    level: int
    """Steps up to the root."""
    depth: int
    """Level of the deepest rank."""
    segments: tuple[Cut, ...]


def tree_reduce(whole: Cut, n: int, me: int) -> list[Round]:
    """Up both trees, then down."""
    places = [
        position_in(number, n, me, half) for number, half in enumerate(split_evenly(whole, 2))
    ]
    # As many rounds on every rank, so that what follows has the same number everywhere.
    number = max(place.depth + len(place.segments) - 1 for place in places)
    up = _merged([_up(place) for place in places], number, adds=True)
    down = _merged([_down(place) for place in places], number, adds=False)
    return up + down


def position_in(tree: int, n: int, me: int, half: Cut) -> TreePosition:
    """A rank's place in the first (0) or the second (1) of the trees of n ranks."""
    parents = {rank: _parent_in(tree, n, rank) for rank in range(n)}
    levels = {rank: _level(parents, rank) for rank in range(n)}
    number = max(1, -(-(half.stop - half.start) // SEGMENT_VALUES))
    return TreePosition(
        parent=parents[me],
        children=tuple(rank for rank in range(n) if parents[rank] == me),
        level=levels[me],
        depth=max(levels.values()),
        segments=tuple(split_evenly(half, number)),
    )


def _parent_in(tree: int, n: int, rank: int) -> int | None:
    """The second tree is the first one mirrored, or turned by one where n is odd."""
    if tree == 0:
        return _parent(n, rank)
    if n % 2 == 0:
        above = _parent(n, n - 1 - rank)
        return None if above is None else n - 1 - above
    above = _parent(n, (rank - 1) % n)
    return None if above is None else (above + 1) % n


def _parent(n: int, rank: int) -> int | None:
    """In the tree over 0 to n - 1 whose odd ranks are leaves: clear the lowest bit, set the next.

    Where that is beyond the last rank, only clear it.
    """
    if rank == 0:
        return None
    bit = rank & -rank
    above = (rank ^ bit) | (bit << 1)
    return above if above < n else rank ^ bit


def _level(parents: dict[int, int | None], rank: int) -> int:
    above = parents[rank]
    return 0 if above is None else 1 + _level(parents, above)


Messages = dict[int, tuple[list[Transfer], list[Transfer]]]
"""Round -> what is sent and received in it."""


def _up(place: TreePosition) -> Messages:
    messages: Messages = {}
    for number, cut in enumerate(place.segments):
        late = number + place.depth - place.level
        if place.parent is not None:
            _at(messages, late)[0].append(Transfer(place.parent, *cut))
        for child in place.children:
            _at(messages, late - 1)[1].append(Transfer(child, *cut))
    return messages


def _down(place: TreePosition) -> Messages:
    messages: Messages = {}
    for number, cut in enumerate(place.segments):
        late = number + place.level
        for child in place.children:
            _at(messages, late)[0].append(Transfer(child, *cut))
        if place.parent is not None:
            _at(messages, late - 1)[1].append(Transfer(place.parent, *cut))
    return messages


def _at(messages: Messages, number: int) -> tuple[list[Transfer], list[Transfer]]:
    return messages.setdefault(number, ([], []))


def _merged(trees: Iterable[Messages], num_rounds: int, adds: bool) -> list[Round]:
    """The rounds of both trees at once, the first tree first in each."""
    both: Messages = {}
    for tree in trees:
        for number, (sends, receives) in tree.items():
            _at(both, number)[0].extend(sends)
            _at(both, number)[1].extend(receives)
    return [
        Round(_not_empty(sends), _not_empty(receives), adds)
        for sends, receives in (_at(both, number) for number in range(num_rounds))
    ]


def _not_empty(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    return tuple(each for each in transfers if each.start < each.stop)
