"""Which event stands in which: the nesting of the events of a thread, without a loop over them.

Events of a thread nest as calls do. How deep an event stands is how many began before it and
haven't ended, which sorting tells; what is around it is the last event before it that stands one
deeper. Where events overlap without nesting (rounded times, mostly), the inner one is taken to end
with the outer one; a thread on which that leaves doubts is walked through with a stack.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.accounting import union

_Ints = npt.NDArray[np.int64]
_PASSES = 8


@dataclass(frozen=True, eq=False)
class Nest:
    """The nesting of some events, in the order in which they were given."""

    parent: _Ints
    """Index of the event around each, or -1."""
    end: _Ints
    """Where it ends, at the latest where its parent does."""
    depth: _Ints
    levels: list[_Ints]
    """The indices of the events of each depth, outermost first, in order of thread and start."""


def nest_events(events: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Nest]:
    """Return events (dtype `events.EVENT`) by thread and start, outer ones first, nested."""
    order = np.lexsort((-events["end"], events["start"], events["thread"]))
    events = events[order]
    found = nest(*(events[field].astype(np.int64) for field in ("thread", "start", "end")))
    events["end"] = found.end
    return events, found


def nest(thread: _Ints, start: _Ints, end: _Ints) -> Nest:
    """Find what is around each event.

    Events must be in order of thread, start and, where these are equal, outer before inner.
    """
    if not len(start):
        return Nest(start, end, start, [])
    # One axis for all threads: each gets a stretch of its own. An event without length counts
    # as half a nanosecond, so that it stands in what begins with it.
    origin, reach = start.min(), 2 * (end.max() - start.min() + 2)
    begins = 2 * (start - origin) + thread.astype(np.int64) * reach
    ends = begins + np.maximum(2 * (end - start), 1)
    for _ in range(_PASSES):
        found = _laminar(begins, ends)
        inside = found.parent >= 0
        over = inside & (ends > ends[found.parent])
        if not over.any():
            break
        # Until an end is set right, what begins behind it seems to stand in that event.
        behind = union(ends[found.parent[over]], ends[over])
        place = np.searchsorted(behind.starts, begins, "right") - 1
        misled = (place >= 0) & (begins < behind.ends[place])
        first = over & ~misled
        ends[first] = ends[found.parent[first]]
    else:
        ends = _walked(begins, ends, np.flatnonzero(np.isin(thread, thread[over])))
        found = _laminar(begins, ends)
    kept = start + (ends - begins) // 2
    return Nest(found.parent, kept, found.depth, found.levels)


def _laminar(begins: _Ints, ends: _Ints) -> Nest:
    """Nest events of which any two are apart or one within the other."""
    order = np.arange(len(begins))
    depth = order - np.searchsorted(np.sort(ends, kind="stable"), begins, "right")
    by_depth = np.argsort(depth, kind="stable")
    levels = np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])
    parent = np.full(len(begins), -1)
    for outer, inner in pairwise(levels):
        parent[inner] = outer[np.searchsorted(outer, inner) - 1]
    return Nest(parent, ends, depth, levels)


def _walked(begins: _Ints, ends: _Ints, chosen: _Ints) -> _Ints:
    """Return ends within those of what is around: event by event, for tangled threads."""
    kept = ends.copy()
    open_ends: list[int] = []
    clipped = []
    for start, end in zip(begins[chosen].tolist(), ends[chosen].tolist(), strict=True):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        open_ends.append(min(end, open_ends[-1]) if open_ends else end)
        clipped.append(open_ends[-1])
    kept[chosen] = clipped
    return kept


def own_time(found: Nest, start: _Ints, chosen: npt.NDArray[np.bool_]) -> tuple[_Ints, _Ints]:
    """Cut the time of one thread at every start and end of its chosen events.

    Returns:
        the cuts in rising order, and the innermost event from each cut to the next (-1: none).
    """
    mine = np.flatnonzero(chosen & (found.end > start))
    depth = found.depth[mine]
    at = np.concatenate([start[mine], found.end[mine]])
    owners = np.concatenate([mine, _nearest(found.parent, chosen)[mine]])
    # At equal times: ends before starts, inner ends before outer, outer starts before inner.
    order = np.lexsort((np.concatenate([depth, -1 - depth]), at))
    return at[order], owners[order]


def _nearest(parent: _Ints, chosen: npt.NDArray[np.bool_]) -> _Ints:
    """Return the nearest chosen event around each, or -1."""
    above = parent.copy()
    while len(rest := np.flatnonzero((above >= 0) & ~chosen[above])):
        above[rest] = parent[above[rest]]
    return above


def within(at: _Ints, owners: _Ints, starts: _Ints, ends: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Cut windows (disjoint, in rising order) into pieces by owner.

    Returns:
        start, end and owner of each piece; the pieces tile the windows.
    """
    edges = np.concatenate([starts, ends])
    before = np.searchsorted(at, edges, "left")
    edge_owners = np.where(before > 0, np.append(owners, -1)[before - 1], -1)
    at, owners = np.concatenate([edges, at]), np.concatenate([edge_owners, owners])
    order = np.argsort(at, kind="stable")
    at, owners = at[order], owners[order]
    if not len(starts) or not len(at):
        return at[:0], at[:0], owners[:0]
    window = np.searchsorted(starts, at[:-1], "right") - 1
    kept = (window >= 0) & (at[:-1] < ends[window]) & (at[1:] > at[:-1])
    return at[:-1][kept], at[1:][kept], owners[:-1][kept]
