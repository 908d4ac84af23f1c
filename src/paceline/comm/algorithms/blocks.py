"""Blocks: cuts of a flat buffer that algorithms pass around, and the rounds made of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Cut(NamedTuple):
    """Values start to stop - 1 of a flat buffer."""

    start: int
    stop: int


Block = tuple[Cut, ...]
"""What belongs together: usually one cut."""


class Transfer(NamedTuple):
    """A message: values start to stop - 1, to or from a peer."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """Messages of one rank that are on their way at the same time.

    All ranks have as many rounds, some of them empty. Both ends list the messages of a pair in one
    order, and in rounds of the same number.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    adds: bool
    """What arrives is added to what is there, in order of rank, instead of replacing it."""


def split_evenly(cut: Cut, number: int) -> list[Cut]:
    """A cut in as many parts, whose sizes differ by one at most; some may be empty."""
    length = cut.stop - cut.start
    edges = [cut.start + length * part // number for part in range(number + 1)]
    return [Cut(*edge) for edge in pairwise(edges)]


def make_round(
    sends: Iterable[tuple[int, Sequence[Cut]]],
    receives: Iterable[tuple[int, Sequence[Cut]]],
    adds: bool,
) -> Round:
    """A round of blocks to and from peers; cuts that touch travel as one, empty ones not at all."""
    return Round(_transfers(sends), _transfers(receives), adds)


def _transfers(wanted: Iterable[tuple[int, Sequence[Cut]]]) -> tuple[Transfer, ...]:
    return tuple(Transfer(peer, *cut) for peer, cuts in wanted for cut in _joined(cuts))


def _joined(cuts: Sequence[Cut]) -> list[Cut]:
    joined: list[Cut] = []
    for cut in cuts:
        if cut.start == cut.stop:
            continue
        if joined and joined[-1].stop == cut.start:
            joined[-1] = Cut(joined[-1].start, cut.stop)
        else:
            joined.append(cut)
    return joined
