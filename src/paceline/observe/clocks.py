"""Clocks of ranks, brought together by the collectives that they took part in.

A collective that every rank waits for can't end anywhere before it began everywhere. So each one
that two ranks share bounds how far their clocks are apart, and many of them leave a narrow
interval. Within it, the offset at which their ends coincide is taken, in the median: ranks leave
a collective together, but come to it when they can. An interval that contradicts the others (two
collectives taken for one) is outvoted.

Not here: clocks that drift apart by more than the interval's width within a window; a few seconds
of drift (1e-5) are far less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ClockOffset:
    """How a rank's clock was brought to that of the first rank."""

    offset_ns: int
    """What was added to its times."""
    uncertainty_ns: int
    """How far the offset can be off by what its collectives allow; 0 for ranks of one host, which
    share a clock; -1 where nothing tells."""


SAME = ClockOffset(0, 0)
UNKNOWN = ClockOffset(0, -1)


def align(meetings: _Array, hosts: Mapping[int, str | None]) -> dict[int, ClockOffset]:
    """Find the clock of each rank.

    Args:
        meetings: rows with `rank`, `meeting` (a number that the ranks of one collective share),
            `start_ns` and `end_ns`, of collectives that none leaves before all have come.
        hosts: the machine of each rank, where it is known.

    Returns:
        rank -> what to add to its times; the first rank's clock is the reference. A rank that
        shares no collective with any other keeps its own.
    """
    first, *others = sorted(hosts)
    clocks = {first: SAME}
    waiting = set(others)
    while waiting:
        found = {}
        for rank in sorted(waiting):
            clock = _by_any(rank, clocks, meetings, hosts)
            if clock is not None:
                found[rank] = clock
        if not found:
            return {**clocks, **dict.fromkeys(sorted(waiting), UNKNOWN)}
        clocks |= found
        waiting -= set(found)
    return clocks


def _by_any(
    rank: int, clocks: Mapping[int, ClockOffset], meetings: _Array, hosts: Mapping[int, str | None]
) -> ClockOffset | None:
    """Return the clock of a rank by the first of the aligned ranks that it has met."""
    for known, clock in clocks.items():
        ours, theirs = _shared(meetings, rank, known)
        same_host = hosts[rank] is not None and hosts[rank] == hosts[known]
        found = _offset(ours, theirs, same_host) if len(ours) or same_host else None
        if found is not None:
            return ClockOffset(
                clock.offset_ns + found.offset_ns, clock.uncertainty_ns + found.uncertainty_ns
            )
    return None


def _shared(meetings: _Array, rank: int, other: int) -> tuple[_Array, _Array]:
    """Return the rows of both ranks at the meetings that both were at."""
    ours, theirs = meetings[meetings["rank"] == rank], meetings[meetings["rank"] == other]
    _, mine, yours = np.intersect1d(ours["meeting"], theirs["meeting"], return_indices=True)
    return ours[mine], theirs[yours]


def _offset(ours: _Array, theirs: _Array, same_host: bool) -> ClockOffset:
    """Return what brings our times to theirs."""
    low = theirs["start_ns"] - ours["end_ns"]
    high = theirs["end_ns"] - ours["start_ns"]
    if same_host and (np.count_nonzero((low <= 0) & (high >= 0)) * 2 >= len(low)):
        return SAME
    bottom, top = _most_agreed(low, high)
    agree = (low <= bottom) & (high >= top)
    together = int(np.median(theirs["end_ns"][agree] - ours["end_ns"][agree]))
    offset = min(max(together, bottom), top)
    return ClockOffset(offset, max(top - offset, offset - bottom))


def _most_agreed(low: _Array, high: _Array) -> tuple[int, int]:
    """Return the stretch that lies in the most of the closed intervals [low, high]."""
    edges = np.concatenate([low, high])
    change = np.repeat([1, -1], len(low))
    order = np.lexsort((-change, edges))  # at one place, intervals begin before others end
    depth = np.cumsum(change[order])
    best = int(np.argmax(depth))
    return int(edges[order][best]), int(edges[order][best + 1])
