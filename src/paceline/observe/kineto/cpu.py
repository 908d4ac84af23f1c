"""Steps on the CPU: the main thread's time is the step.

Each instant belongs to the innermost operator running. Where none runs and a collective is awaited
(gloo works on threads of its own, while the main thread sleeps without a trace), it is
`exposed_comm`, up to the moment the thread goes on. Other gaps are the host's (`host_gap`): Python,
the autograd engine, the dispatcher.
"""

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.kineto.host import STRENGTH, Event, Host, Thread, own_term
from paceline.observe.terms import EXPOSED_COMM
from paceline.observe.timeline import COMM, PROCESSOR, Builder

_Array = npt.NDArray[np.int64]
Window = tuple[int, int, int]  # (step, start_ns, end_ns)
_Collective = tuple[Event, str]  # with its term

# Python and the dispatcher pause for 0.01-0.3 ms between operators.
_LONG_PAUSE_NS = 500_000
_EDGE = -2  # of a window, among the indices of events


def add_main_thread(
    build: Builder, rank: int, host: Host, main: Thread | None, windows: list[Window]
) -> None:
    """Add the main thread, cut into the own time of its events, and the collectives beside it."""
    collectives = _collectives(host)
    for event, term in collectives:
        stream = f"thread {event.thread[1]}"
        build.add(event.name, term, rank, stream, event.start, event.end, COMM)
    starts, ends, owners = _own_time(host, main, windows)
    in_flight = _overlapped(starts, ends, collectives)
    rows = zip(starts.tolist(), ends.tolist(), owners.tolist(), in_flight.tolist(), strict=True)
    for start, end, owner, beside in rows:
        name, term, is_gap = _piece(host, owner)
        awaited = _awaited(start, end, collectives) if is_gap and beside else None
        if awaited:
            begun, comm_term = awaited
            build.add("(waits for a collective)", comm_term, rank, "main", begun, end, PROCESSOR)
            end = begun
        if end > start:
            build.add(name, term, rank, "main", start, end, PROCESSOR)


def _collectives(host: Host) -> list[_Collective]:
    """Return gloo's collectives, each under the axis of the operator that started it.

    A collective runs on a thread of gloo and doesn't say who asked for it. It is taken to be the
    communication operator that began last before it did.
    """
    starters = [
        index
        for index, event in enumerate(host.events)
        if event.kind == "op" and words.is_comm_op(event.name)
    ]
    began = np.array([host.events[index].start for index in starters], np.int64)
    found = []
    for event in host.events:
        if event.name.startswith("gloo:"):
            place = int(np.searchsorted(began, event.start, "right")) - 1
            axis = host.scopes[starters[place]].axis if place >= 0 else None
            found.append((event, words.comm_term(axis or host.axis)))
    return found


def _own_time(
    host: Host, main: Thread | None, windows: list[Window]
) -> tuple[_Array, _Array, _Array]:
    """Cut the main thread's steps at every start and end of an event.

    Returns:
        start, end and innermost event (-1: none) of each piece; the pieces tile the windows.
    """
    mine = [
        index
        for index, event in enumerate(host.events)
        if event.thread == main and host.scopes[index].end > event.start
    ]
    depth = {-1: 0}
    for index in mine:
        depth[index] = depth[host.scopes[index].parent] + 1
    # At equal times: ends before starts, inner ends before outer, outer starts before inner.
    cuts = [(host.events[i].start, depth[i], i) for i in mine]
    cuts += [(host.scopes[i].end, -depth[i], host.scopes[i].parent) for i in mine]
    cuts += [(edge, -len(host.events) - 1, _EDGE) for _, *edges in windows for edge in edges]
    cuts.sort()
    at = np.array([time for time, _, _ in cuts], np.int64)
    owners = np.array(_carry_over_edges([owner for _, _, owner in cuts]), np.int64)
    inside = np.zeros(len(at), bool)
    for _, start, end in windows:
        inside |= (at >= start) & (at < end)
    kept = inside[:-1] & (at[1:] > at[:-1])
    return at[:-1][kept], at[1:][kept], owners[:-1][kept]


def _carry_over_edges(owners: list[int]) -> list[int]:
    """Let the edge of a window keep the owner before it."""
    current = -1
    result = []
    for owner in owners:
        current = current if owner == _EDGE else owner
        result.append(current)
    return result


def _piece(host: Host, owner: int) -> tuple[str, str, bool]:
    """Return name and term of a piece of the main thread, and whether no operator runs in it."""
    if owner < 0:
        return "(no operator)", "host_gap", True
    event, scope = host.events[owner], host.scopes[owner]
    term = own_term(event, scope)
    if term == EXPOSED_COMM:
        return event.name, words.comm_term(scope.axis or host.axis), False
    is_gap = event.kind == "range" or term == "host_gap"
    return event.name, term, is_gap and STRENGTH.get(term, 0) < STRENGTH["data_wait"]


def _overlapped(
    starts: _Array, ends: _Array, collectives: list[_Collective]
) -> npt.NDArray[np.bool_]:
    """Say which pieces have a collective in flight beside them."""
    begun = np.sort(np.array([event.start for event, _ in collectives], np.int64))
    ended = np.sort(np.array([event.end for event, _ in collectives], np.int64))
    return np.searchsorted(begun, ends, "left") > np.searchsorted(ended, starts, "right")


def _awaited(start: int, end: int, collectives: list[_Collective]) -> tuple[int, str] | None:
    """Return since when, and for which term, a pause of the main thread was a wait; None if not.

    A wait ends when its collective does. But on busy cores gloo's thread may write its end down
    after the waiting thread has gone on, so a long pause beside a collective counts as well.
    """
    beside = [pair for pair in collectives if pair[0].start < end and pair[0].end > start]
    finished = [pair for pair in beside if pair[0].end <= end]
    chosen = finished or (beside if end - start >= _LONG_PAUSE_NS else [])
    if not chosen:
        return None
    since = max(start, min(event.start for event, _ in chosen))
    return since, max(chosen, key=lambda pair: pair[0].end)[1]
