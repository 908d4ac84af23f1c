"""Collectives: over which axis and group, how many bytes, and how much of each was exposed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.account import COLLECTIVE
from paceline.observe.accounting import Intervals, union
from paceline.observe.kineto.cpu import ThreadPieces
from paceline.observe.kineto.events import CALL, KERNEL, OP
from paceline.observe.kineto.host import NONE, inherit_values
from paceline.observe.kineto.recording import Recording
from paceline.observe.tables.names import Names, step_numbers, step_of
from paceline.observe.terms import AXES, EXPOSED_COMM, EXPOSED_IDS, TERMS

_Array = npt.NDArray[Any]
_NEVER = np.iinfo(np.int64).max
_AXIS_OF_TERM = np.array(
    [
        AXES.index(axis) if (axis := term.removeprefix(f"{EXPOSED_COMM}.")) in AXES else NONE
        for term in TERMS
    ]
)


def collectives(recording: Recording, names: Names) -> _Array:
    """List the collectives of the steps in order of start.

    Returns:
        dtype `account.COLLECTIVE`.
    """
    if recording.pieces is None:
        events, terms, asked, exposed = _of_device(recording)
    else:
        events, terms, asked, exposed = _of_gloo(recording, recording.pieces)
    host, windows = recording.host, recording.windows
    step = step_of(windows, events["start"])
    began = np.where(asked == NONE, events["start"], np.append(host.events["start"], 0)[asked])
    table = np.zeros(len(events), COLLECTIVE)
    table["rank"], table["step"] = recording.rank, step_numbers(windows, step)
    table["axis"] = _AXIS_OF_TERM[terms]
    table["start_ns"], table["duration_ns"] = events["start"], events["end"] - events["start"]
    table["exposed_ns"] = exposed
    table["micro_batch"], table["in_backward"] = _passes_begun(recording, step, began)
    _describe(recording, names, table, events, asked)
    _name_groups(recording, names, table)
    return table[step != NONE]


def _of_device(recording: Recording) -> tuple[_Array, _Array, _Array, _Array]:
    """Return events, terms, launches and exposed time of the kernels that communicate."""
    device, terms = recording.device, recording.terms
    communicates = np.isin(terms, EXPOSED_IDS)
    computes = ~communicates & (device["kind"] == KERNEL)
    chosen = communicates & (device["kind"] == KERNEL)
    events = device[chosen]
    beside = union(device["start"][computes], device["end"][computes])
    exposed = _shares(events, lambda at: at - _covered(beside, at))
    return events, terms[chosen], recording.launch[chosen], exposed


def _of_gloo(recording: Recording, pieces: ThreadPieces) -> tuple[_Array, _Array, _Array, _Array]:
    """Return events, terms, starting operators and awaited time of gloo's collectives."""
    events = recording.host.events[recording.gloo.owner]
    waits = pieces.take(np.isin(pieces.term, EXPOSED_IDS))
    waited = union(waits.start, waits.end)
    exposed = _shares(events, lambda at: _covered(waited, at))
    return events, recording.gloo.term, recording.asked, exposed


def _shares(events: _Array, exposed_until: Callable[[_Array], _Array]) -> _Array:
    """Return the exposed time of each event: what several are on their way in, they share.

    Args:
        exposed_until: how much of the time up to each moment is exposed.
    """
    edges = np.unique(np.concatenate([events["start"], events["end"]]))
    begun = np.searchsorted(np.sort(events["start"]), edges, "right")
    ended = np.searchsorted(np.sort(events["end"]), edges, "right")
    on_their_way = np.maximum(begun - ended, 1)
    shares = np.diff(exposed_until(edges)) / on_their_way[:-1]
    until = np.concatenate([[0.0], np.cumsum(shares)])
    first, last = (np.searchsorted(edges, events[side]) for side in ("start", "end"))
    return np.rint(until[last] - until[first]).astype(np.int64)


def _covered(intervals: Intervals, at: _Array) -> _Array:
    """Return how much of the time up to each moment the intervals cover."""
    if not len(intervals.starts):
        return np.zeros(len(at), np.int64)
    before = np.concatenate([[0], np.cumsum(intervals.ends - intervals.starts)])
    place = np.searchsorted(intervals.starts, at, "right")
    still_on = np.maximum(intervals.ends[place - 1] - at, 0)
    return before[place] - np.where(place > 0, still_on, 0)


def _describe(
    recording: Recording, names: Names, table: _Array, events: _Array, asked: _Array
) -> None:
    """Say what each is: by its own arguments, else by those of the call that asked for it."""
    host, trace = recording.host, recording.trace
    said = {}
    for field in CALL.names or ():
        column = np.append(trace.calls[field], NONE)
        own, outer = column[events["call"]], column[host.events["call"]]
        around = np.append(inherit_values(host.nest, outer), NONE)[asked]
        said[field] = np.where(own == NONE, around, own)
    texts = names.of(trace.names)
    by_kernel = np.array([names[words.collective_name(name) or name] for name in trace.names])
    name = texts[said["name"]]
    table["name"] = np.where(name == NONE, by_kernel[events["name"]], name)
    table["group"], table["members"] = texts[said["group"]], texts[said["ranks"]]
    table["bytes"], table["group_size"] = said["bytes"], np.maximum(said["group_size"], 0)


def _name_groups(recording: Recording, names: Names, table: _Array) -> None:
    """Name the group of collectives that don't, where only one can be meant.

    The trace's header lists the process groups. gloo's collectives say nothing but their name: one
    over an axis has the ranks of that axis' group, or those of the only group there is.
    """
    groups = [group for group in _listed(recording) if len(group["ranks"]) > 1]  # one says nothing
    for axis in np.unique(table["axis"]).tolist():
        mine = [group for group in groups if axis != NONE and _axis_of(group) == AXES[axis]]
        ranks = {str(group["ranks"]) for group in mine or groups}
        if len(ranks) != 1:
            continue
        group, rows = (mine or groups)[0], (table["axis"] == axis) & (table["members"] == NONE)
        table["members"][rows] = names[ranks.pop()]
        table["group"][rows] = names[str(group.get("pg_desc", ""))]
        table["group_size"][rows] = len(group["ranks"])


def _listed(recording: Recording) -> list[dict[str, Any]]:
    """Return the process groups that the trace's header lists with their ranks."""
    where = recording.trace.about.get("distributedInfo") or {}
    groups = where.get("pg_config")
    return [
        group
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict) and isinstance(group.get("ranks"), list)
    ]


def _axis_of(group: dict[str, Any]) -> str | None:
    return words.axis_of_group(str(group.get("pg_desc", "")))


def _passes_begun(recording: Recording, step: _Array, when: _Array) -> tuple[_Array, _Array]:
    """Number the forward-backward passes of each step, for some moments of the host.

    A pass begins with the first operator that records for autograd after a node was evaluated, or
    after an optimizer ran. Its step is the one whose device time has most of what it launched: the
    host runs ahead, and begins a step's passes before the device has done the step before.

    Args:
        recording: with the passes.
        step: index of the step that what was begun at each moment belongs to, or NONE.
        when: moments of the host.

    Returns:
        how many passes of its step had begun since the last optimizer, or NONE where none is seen;
        and whether a backward pass had begun in the latest of them.
    """
    host, events = recording.host, recording.host.events
    records = (events["kind"] == OP) & (events["sequence"] >= 0)
    node = records & (events["forward_thread"] > 0)
    forward = records & (events["forward_thread"] <= 0) & ~host.in_backward
    if not node.any() or not forward.any():
        return np.full(len(when), NONE), np.zeros(len(when), bool)
    nodes = np.sort(events["start"][node])
    optimizers = np.sort(_optimizers(recording))
    ends = np.concatenate([[-_NEVER], nodes, optimizers])
    at = np.concatenate([ends, events["start"][forward]])
    is_forward = np.arange(len(at)) >= len(ends)
    order = np.argsort(at, kind="stable")
    at, is_forward = at[order], is_forward[order]
    begins = at[1:][is_forward[1:] & ~is_forward[:-1]]
    of_step = _steps_of_passes(recording, begins)
    since = np.searchsorted(optimizers, begins)
    is_first = np.append(True, (of_step[1:] != of_step[:-1]) | (since[1:] != since[:-1]))
    places = np.arange(len(begins))
    number = places - np.maximum.accumulate(np.where(is_first, places, 0)) + 1
    mine = np.searchsorted(begins, when, "right") - 1
    is_before = (mine == NONE) | (of_step[mine] < step)
    has_nodes = np.searchsorted(nodes, when, "right") > np.searchsorted(nodes, begins)[mine]
    return np.where(is_before, 0, number[mine]), ~is_before & has_nodes


def _optimizers(recording: Recording) -> _Array:
    """Return when the host ran optimizers: their ranges, and what launched their kernels."""
    host, optimizer = recording.host, words.TERM_ID["optimizer"]
    launched = recording.launch[(recording.terms == optimizer) & (recording.launch != NONE)]
    ranges = host.events["start"][host.claim == optimizer]
    return np.concatenate([ranges, host.events["start"][launched]])


def _steps_of_passes(recording: Recording, begins: _Array) -> _Array:
    """Return the index of the step that each pass belongs to, or NONE."""
    windows = recording.windows
    by_host = step_of(windows, begins)
    known = recording.launch != NONE
    if recording.pieces is not None or not known.any():
        return by_host
    launched = recording.host.events["start"][recording.launch[known]]
    steps = step_of(windows, recording.device["start"][known])
    which = np.searchsorted(begins, launched, "right") - 1
    inside = (which >= 0) & (steps != NONE)
    counts = np.zeros((len(begins), len(windows)), np.int64)
    np.add.at(counts, (which[inside], steps[inside]), 1)
    return np.where(counts.any(axis=1), counts.argmax(axis=1), by_host)
