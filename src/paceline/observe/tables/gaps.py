"""Gaps, in which the device had nothing to do, and syncs, in which the host waited for it.

What the host was doing in a gap is told by the thread that launched the next kernel. Once that call
had returned, the host was not late any more: from there on the gap is `(between kernels)`.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.account import GAP, SYNC
from paceline.observe.kineto.cpu import ThreadPieces
from paceline.observe.kineto.events import LAUNCH
from paceline.observe.kineto.host import NONE, inherit_flags
from paceline.observe.kineto.nest import nest_events, own_time, within
from paceline.observe.kineto.recording import Recording
from paceline.observe.kineto.spans import idle_time
from paceline.observe.tables.names import Names, step_numbers, step_of
from paceline.observe.terms import TERM_ID

BETWEEN_KERNELS = "(between kernels)"
NO_OPERATOR = "(no operator)"

_Array = npt.NDArray[Any]
_LINE = re.compile(r"(?!torch/|<).*\.py\(\d+\): ")  # Python's, but for PyTorch's own
_WAITS = [TERM_ID[term] for term in ("data_wait", "checkpoint_stall")]
_NEVER = np.iinfo(np.int64).max


def gaps(recording: Recording, names: Names) -> _Array:
    """List the gaps of the steps, cut by what the host was doing.

    Returns:
        dtype `account.GAP`.
    """
    if recording.pieces is not None:
        return _of_main_thread(recording, recording.pieces, names)
    host = recording.host
    start, end = idle_time(recording)
    after = np.searchsorted(recording.device["start"], end, "left")
    launch = np.append(recording.launch, NONE)[after]
    thread = np.append(host.events["thread"], recording.main)[launch]
    launched = np.clip(np.append(host.events["end"], _NEVER)[launch], start, end)
    parts = [_queued(recording, names, launched, end)]
    for one in np.unique(thread).tolist():
        mine = (thread == one) & (launched > start)
        at, owners = own_time(host.nest, host.events["start"], host.events["thread"] == one)
        cut = within(at, owners, start[mine], launched[mine])
        parts.append(_rows(recording, names, GAP, *cut, np.full(len(cut[0]), one)))
    table = np.concatenate(parts)
    return table[np.argsort(table["start_ns"], kind="stable")]


def syncs(recording: Recording, names: Names) -> _Array:
    """List the outermost calls that waited for the device or read a value of it.

    Returns:
        dtype `account.SYNC`.
    """
    host, events = recording.host, recording.host.events
    waits = np.array([words.is_sync(name) for name in host.names], bool)[events["name"]]
    if recording.pieces is None:
        # A value that is read of a tensor on the host waits for nothing.
        waits &= _has_within(recording, waits & (events["kind"] == LAUNCH))
    around = np.append(inherit_flags(host.nest, waits), False)[host.nest.parent]
    inside = step_of(recording.windows, events["start"]) != NONE
    chosen = np.flatnonzero(waits & ~around & inside)
    chosen = chosen[np.argsort(events["start"][chosen], kind="stable")]
    found = events[chosen]
    rows = _rows(recording, names, SYNC, found["start"], found["end"], chosen, found["thread"])
    rows["term"] = host.own_term()[chosen]
    return rows


def _of_main_thread(recording: Recording, pieces: ThreadPieces, names: Names) -> _Array:
    idle = pieces.take(pieces.term == TERM_ID["host_gap"])
    thread = np.full(len(idle.start), recording.main)
    return _rows(recording, names, GAP, idle.start, idle.end, idle.owner, thread)


def _queued(recording: Recording, names: Names, launched: _Array, end: _Array) -> _Array:
    """Return the ends of gaps: the next kernel had been launched, and didn't start."""
    late = end > launched
    nobody, thread = np.full(late.sum(), NONE), np.full(late.sum(), recording.main)
    rows = _rows(recording, names, GAP, launched[late], end[late], nobody, thread)
    rows["name"] = names[BETWEEN_KERNELS]
    return rows


def _has_within(recording: Recording, flag: _Array) -> _Array:
    """Say which events have the flag, or something within them has."""
    found, result = recording.host.nest, flag.copy()
    for level in found.levels[:0:-1]:
        result[found.parent[level[result[level]]]] = True
    return result


def _rows(
    recording: Recording,
    names: Names,
    dtype: np.dtype[Any],
    start: _Array,
    end: _Array,
    owner: _Array,
    thread: _Array,
) -> _Array:
    """Make rows of stretches of time on threads, each with its innermost host event."""
    host, windows = recording.host, recording.windows
    table = np.zeros(len(start), dtype)
    label = np.append(names.of(host.names)[host.events["name"]], names[NO_OPERATOR])
    table["rank"], table["step"] = recording.rank, step_numbers(windows, step_of(windows, start))
    table["name"], table["line"] = label[owner], _lines(recording, names, start, end, thread)
    table["start_ns"], table["duration_ns"] = start, end - start
    claim = np.append(host.claim, NONE)[owner]
    table["term"] = np.where(np.isin(claim, _WAITS), claim, TERM_ID["host_gap"])
    return table


def _lines(
    recording: Recording, names: Names, start: _Array, end: _Array, thread: _Array
) -> _Array:
    """Return the innermost function of Python, outside torch, in the middle of each stretch.

    A thread without any (the autograd engine's) has those of the main thread, which waits for it.
    """
    lines = np.full(len(start), NONE)
    if not len(recording.python):
        return lines
    is_line = np.array([bool(_LINE.match(name)) for name in recording.trace.names], bool)
    frames, found = nest_events(recording.python[is_line[recording.python["name"]]])
    label = np.append(names.of(recording.trace.names)[frames["name"]], NONE)
    thread = np.where(np.isin(thread, frames["thread"]), thread, recording.main)
    for one in np.unique(thread).tolist():
        mine = thread == one
        cuts, owners = own_time(found, frames["start"], frames["thread"] == one)
        place = np.searchsorted(cuts, (start[mine] + end[mine]) // 2, "right") - 1
        lines[mine] = label[np.where(place >= 0, np.append(owners, NONE)[place], NONE)]
    return lines
