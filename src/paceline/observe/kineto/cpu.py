"""Steps on the CPU: the main thread's time is the step.

Each instant belongs to the innermost operator running. Where none runs and a collective is awaited
(gloo works on threads of its own, while the main thread sleeps without a trace), it is
`exposed_comm`, up to the moment the thread goes on. Other gaps are the host's (`host_gap`): Python,
the autograd engine, the dispatcher.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.kineto.events import OP, RANGE
from paceline.observe.kineto.host import NONE, HostEvents, comm_terms
from paceline.observe.kineto.nest import own_time, within
from paceline.observe.terms import EXPOSED_COMM, TERM_ID

_Array = npt.NDArray[Any]
_Bools = npt.NDArray[np.bool_]

# Python and the dispatcher pause for 0.01-0.3 ms between operators.
_LONG_PAUSE_NS = 500_000
_EXPOSED = [TERM_ID[term] for term in TERM_ID if term.startswith(EXPOSED_COMM)]
_WAITS_ANYWAY = [*_EXPOSED, TERM_ID["data_wait"], TERM_ID["checkpoint_stall"]]


@dataclass(frozen=True, eq=False)
class ThreadPieces:
    """A thread's time, cut by what ran innermost."""

    start: _Array
    end: _Array
    owner: _Array
    """Index of a host event, or NONE."""
    term: _Array

    def take(self, chosen: _Array) -> "ThreadPieces":
        """Return some of the pieces."""
        return ThreadPieces(
            self.start[chosen], self.end[chosen], self.owner[chosen], self.term[chosen]
        )


def main_pieces(host: HostEvents, main: int, windows: _Array) -> ThreadPieces:
    """Cut the main thread's steps into the own time of its events; the pieces tile the steps."""
    at, owners = own_time(host.nest, host.events["start"], host.events["thread"] == main)
    pieces = within(at, owners, windows["start_ns"], windows["end_ns"])
    term = np.append(host.own_term(), TERM_ID["host_gap"])[pieces[2]]
    return ThreadPieces(*pieces, term)


def split_waits(host: HostEvents, pieces: ThreadPieces, collectives: ThreadPieces) -> ThreadPieces:
    """Cut off the part of each pause in which a collective was awaited.

    A wait ends when its collective does. But on busy cores gloo's thread may write its end down
    after the waiting thread has gone on, so a long pause beside a collective counts as well.

    Returns:
        the pieces, with the waits among them: they have no owner, and the collective's term.
    """
    pauses = np.flatnonzero(_is_pause(host, pieces))
    pause, other = _pairs(pieces.start[pauses], pieces.end[pauses], collectives)
    end = pieces.end[pauses]
    finished = collectives.end[other] <= end[pause]
    any_finished = np.zeros(len(pauses), bool)
    any_finished[pause[finished]] = True
    is_long = end - pieces.start[pauses] >= _LONG_PAUSE_NS
    counts = np.where(any_finished[pause], finished, is_long[pause])
    pause, other = pause[counts], other[counts]
    since = end.copy()
    np.minimum.at(since, pause, collectives.start[other])
    last = np.lexsort((collectives.end[other], pause))  # of each pause, the last to end names it
    term = np.full(len(pauses), NONE)
    term[pause[last]] = collectives.term[other[last]]
    waited = np.flatnonzero(term != NONE)
    chosen, since = pauses[waited], np.maximum(since, pieces.start[pauses])[waited]
    rest = pieces.end.copy()
    rest[chosen] = since
    waits = ThreadPieces(since, pieces.end[chosen], np.full(len(chosen), NONE), term[waited])
    return _in_order(ThreadPieces(pieces.start, rest, pieces.owner, pieces.term), waits)


def gloo_collectives(host: HostEvents) -> _Array:
    """Return the indices of the collectives that ran on threads of gloo, in order of start."""
    names = np.array([name.startswith("gloo:") for name in host.names], bool)
    found = np.flatnonzero(names[host.events["name"]])
    return found[np.argsort(host.events["start"][found], kind="stable")]


def starters(host: HostEvents, collectives: _Array) -> _Array:
    """Return the operator that started each collective, or NONE.

    A collective runs on a thread of gloo and doesn't say who asked for it. It is taken to be the
    communication operator that began last before it did.
    """
    names = np.array([words.is_comm_op(name) for name in host.names], bool)
    asked = np.flatnonzero(names[host.events["name"]] & (host.events["kind"] == OP))
    asked = asked[np.argsort(host.events["start"][asked], kind="stable")]
    began = host.events["start"]
    place = np.searchsorted(began[asked], began[collectives], "right") - 1
    return np.where(place >= 0, np.append(asked, NONE)[place], NONE)


def as_pieces(host: HostEvents, collectives: _Array, started_by: _Array) -> ThreadPieces:
    """Return collectives with their terms, each under the axis of what started it."""
    axis = np.append(host.axis, host.default_axis)[started_by]
    events = host.events[collectives]
    return ThreadPieces(events["start"], events["end"], collectives, comm_terms(axis))


def _is_pause(host: HostEvents, pieces: ThreadPieces) -> _Bools:
    """Say of which pieces no operator runs, and nothing that waits by itself is named."""
    is_range = np.append(host.events["kind"] == RANGE, True)[pieces.owner]
    idle = is_range | (pieces.term == TERM_ID["host_gap"])
    return idle & ~np.isin(pieces.term, _WAITS_ANYWAY)


def _pairs(start: _Array, end: _Array, collectives: ThreadPieces) -> tuple[_Array, _Array]:
    """Return all pairs of an interval and a collective that share time, as two columns."""
    reach = np.maximum.accumulate(collectives.end)
    low = np.searchsorted(reach, start, "right")
    high = np.maximum(np.searchsorted(collectives.start, end, "left"), low)
    count = high - low
    one = np.repeat(np.arange(len(start)), count)
    other = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + low[one]
    share = collectives.end[other] > start[one]
    return one[share], other[share]


def _in_order(*parts: ThreadPieces) -> ThreadPieces:
    joined = ThreadPieces(
        *(
            np.concatenate([getattr(part, field) for part in parts])
            for field in ThreadPieces.__match_args__
        )
    )
    joined = joined.take(joined.end > joined.start)
    return joined.take(np.argsort(joined.start, kind="stable"))
