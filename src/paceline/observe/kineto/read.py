"""Read the trace that torch.profiler (Kineto) exports, as a Timeline.

There are two kinds of trace, told apart by whether work of a device was recorded; `kineto.cuda` and
`kineto.cpu` say how each is read. Both kinds of step are wall-clock windows of the host's
`paceline.step` ranges (or of `ProfilerStep#n`, or else the trace as a whole). On a device a step
lasts until its last kernel has finished, and the next begins there at the earliest.

Not here: traces of several devices in one process.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe import caveats
from paceline.observe import terms as words
from paceline.observe.caveats import Caveat
from paceline.observe.kineto import cpu, cuda
from paceline.observe.kineto.events import (
    COPY,
    KERNEL,
    LAUNCH,
    OP,
    PYTHON,
    RANGE,
    Trace,
    read_events,
)
from paceline.observe.kineto.host import NONE, Host, surround
from paceline.observe.kineto.recording import Recording
from paceline.observe.kineto.spans import timeline_of
from paceline.observe.terms import EXPOSED_IDS, STEP_RANGE
from paceline.observe.timeline import STEP, Timeline

METADATA = "paceline"  # what our profiler notes in a trace: {"first_step": .., "axis": ..}

_OUR_STEP = re.compile(rf"{re.escape(STEP_RANGE)}(?:#(\d{1, 18}))?$")
_STARTS_WORK = re.compile(r"Launch|Mem(cpy|set)")  # calls that give work to a device
_MAX_LOST = 0.01  # whole traces lose a few events as well
# Operators that launch work in so many of their calls do it as a rule; of these, in whole traces at
# least so many do.
_LAUNCHES_AS_A_RULE, _MOST_LAUNCH = 0.25, 0.85
_FOREIGN_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")

_Array = npt.NDArray[Any]


def read_kineto(path: str | Path, rank: int | None = None, axis: str | None = None) -> Timeline:
    """Read a trace of one rank.

    Args:
        path: Chrome trace JSON by torch.profiler, gzipped or not.
        rank: the rank to file the spans under; by default what the trace says, else 0.
        axis: the mesh axis of collectives that don't tell theirs (the default process group);
            by default what our profiler noted in the trace, else unknown.

    Raises:
        InputError: the file is missing, damaged, or has no events of a profiler.
    """
    return timeline_of(read_recording(path, rank, axis))


def read_recording(path: str | Path, rank: int | None = None, axis: str | None = None) -> Recording:
    """Do as `read_kineto`, up to the columns that a Timeline and an Account are made of."""
    trace = read_events(path)
    kinds = trace.events["kind"]
    if not (kinds != PYTHON).any():
        raise InputError(
            f"{path} has no operators or kernels; record it with torch.profiler around whole steps."
        )
    try:
        noted = trace.about.get(METADATA) or {}
        where = trace.about.get("distributedInfo") or {}
        rank = int(where.get("rank", 0)) if rank is None else rank
        axis = noted.get("axis") if axis is None else axis
        first_step = int(noted.get("first_step", 0))
        np.array((rank, first_step), "i4,i8")
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path} has a header that a profiler's trace can't have ({error!r}); record it again."
        ) from None
    recording = _recording(trace, rank, axis, first_step)
    if not trace.is_cut:
        return recording
    are_marked = all(one.kind != caveats.NO_STEPS for one in recording.caveats)
    whole = _whole_steps(recording) if are_marked else recording.windows[:0]
    if not len(whole):
        raise InputError(
            f"{path} was cut, and of none of its steps it is certain that all is there; "
            "record it again."
        )
    return replace(recording, windows=whole, caveats=(*recording.caveats, _cut(recording, whole)))


def _cut(recording: Recording, whole: _Array) -> Caveat:
    left_out = len(recording.windows) - len(whole)
    return Caveat(
        caveats.CUT,
        f"The file ends in the middle: {len(recording.trace.events):,} events before that were "
        f"read, {left_out} of {len(recording.windows)} steps are left out because their work isn't "
        "all there.",
        {"events": len(recording.trace.events), "steps": len(whole), "left_out": left_out},
        (recording.rank,),
    )


def _whole_steps(recording: Recording) -> _Array:
    """Return the steps of a cut file that are known to have all of their work.

    The device's events stand behind the host's, each kind in order of time, or thread after thread:
    a step may have its range and its operators and not its kernels, and would look idle. So a step
    counts if what was read of each kind reaches beyond its end, if the kernels of its calls are
    there and operators have their calls, and if no stream may be missing altogether.
    """
    events, windows = recording.trace.events, recording.windows
    starts_work = np.array([bool(_STARTS_WORK.search(name)) for name in recording.trace.names])
    calls = events[(events["kind"] == LAUNCH) & starts_work[events["name"]]]
    device = events[np.isin(events["kind"], (KERNEL, COPY))]
    communicates = len(recording.gloo.owner) or np.isin(recording.terms, EXPOSED_IDS).any()
    if any(map(words.is_comm_op, recording.trace.names)) and not communicates:
        return windows[:0]
    if not len(device):
        if len(calls) or recording.trace.about.get("deviceProperties"):
            return windows[:0]
        return windows[windows["end_ns"] <= _reached(events[events["kind"] == OP])]
    if _is_by_stream(device["thread"]):
        return windows[:0]
    reached = min(_reached(rows) for rows in (calls, device) if len(rows))
    lost = ~np.isin(calls["correlation"], device["correlation"])
    # The host's own steps: those of the device end where the last kernel that was read does.
    _, marked = _steps(recording.host, recording.trace, recording.rank, 0)
    begun, missing = (_count_in(marked, rows["start"]) for rows in (calls, calls[lost]))
    known = (windows["end_ns"] <= reached) & (missing <= _MAX_LOST * begun)
    return windows[known & (_share_launching(recording, marked) >= _MOST_LAUNCH)]


def _reached(rows: _Array) -> int:
    """Return up to when events are all there, by how far they stand behind later ones."""
    latest = np.maximum.accumulate(rows["start"])
    return int(latest[-1] - (latest - rows["start"]).max()) if len(rows) else 0


def _is_by_stream(streams: _Array) -> bool:
    """Say whether events stand stream after stream: then whole streams may be missing."""
    changes = int(np.count_nonzero(np.diff(streams)))
    return 0 < changes < 2 * len(np.unique(streams))


def _share_launching(recording: Recording, windows: _Array) -> _Array:
    """Return, for each window, how many of its operators that launch work elsewhere do so there."""
    host = recording.host
    launching = host.op[recording.launch[recording.launch != NONE]]
    launches = np.zeros(len(host), bool)
    launches[launching[launching != NONE]] = True
    names = host.events["name"]
    size = len(host.names)
    ops = host.events["kind"] == OP
    every, some = (np.bincount(names[rows], minlength=size) for rows in (ops, ops & launches))
    chosen = ops & (some >= _LAUNCHES_AS_A_RULE * np.maximum(every, 1))[names]
    rule, kept = (
        _count_in(windows, host.events["start"][rows]) for rows in (chosen, chosen & launches)
    )
    return (kept + (rule == 0)) / np.maximum(rule, 1)


def _count_in(windows: _Array, at: _Array) -> _Array:
    at = np.sort(at)
    edges = (np.searchsorted(at, windows[edge], "left") for edge in ("end_ns", "start_ns"))
    return np.subtract(*edges)


def _recording(trace: Trace, rank: int, axis: str | None, first_step: int) -> Recording:
    kinds = trace.events["kind"]
    on_device = np.isin(kinds, (KERNEL, COPY))
    python = trace.events[kinds == PYTHON]
    host = surround(trace, trace.events[~on_device & (kinds != PYTHON)], axis)
    main, windows = _steps(host, trace, rank, first_step)
    are_marked = len(windows) > 0
    if not are_marked:
        windows = _whole_trace(trace, rank, first_step)
    device = trace.events[on_device]
    device = device[np.argsort(device["start"], kind="stable")]
    launch = cuda.launches(host, device)
    terms = cuda.device_terms(trace, host, device, launch)
    found = cpu.gloo_collectives(host)
    asked = cpu.starters(host, found)
    gloo, pieces = cpu.as_pieces(host, found, asked), None
    if len(device):
        windows = _disjoint(cuda.follow_device(windows, host, device, launch))
    else:
        windows = _disjoint(windows)
        pieces = cpu.split_waits(host, cpu.main_pieces(host, main, windows), gloo)
    return Recording(
        rank,
        trace,
        host,
        main,
        python,
        device,
        terms,
        launch,
        windows,
        pieces,
        gloo,
        asked,
        (*_left_out(trace, rank), *(() if are_marked else (_no_steps(windows),))),
    )


def _left_out(trace: Trace, rank: int) -> Iterator[Caveat]:
    if trace.num_left_out:
        yield Caveat(
            caveats.EVENTS_LEFT_OUT,
            f"{trace.num_left_out:,} events beside {len(trace.events):,} can't be those of a "
            f"profiler and are left out; the first: {trace.why_left_out}.",
            {"events": trace.num_left_out, "read": len(trace.events)},
            (rank,),
        )


def _whole_trace(trace: Trace, rank: int, number: int) -> _Array:
    """Return one step that lasts as long as the trace."""
    start, end = trace.events["start"].min(), trace.events["end"].max()
    return np.array([(rank, number, start, end)], STEP)


def _no_steps(windows: _Array) -> Caveat:
    rank, _, start, end = windows[0].tolist()
    seconds = (end - start) / 1e9
    return Caveat(
        caveats.NO_STEPS,
        f"The trace marks no steps (ProfilerStep#n or {STEP_RANGE}), so all of its {seconds:.3g} s "
        "count as one.",
        {"seconds": seconds},
        (rank,),
    )


def _steps(host: Host, trace: Trace, rank: int, first_step: int) -> tuple[int, _Array]:
    """Return the main thread and the steps that its ranges mark, if any."""
    ranges = host.events[host.events["kind"] == RANGE]
    for pattern, first in ((_OUR_STEP, first_step), (_FOREIGN_STEP, 0)):
        matches = {
            index: match for index, name in enumerate(trace.names) if (match := pattern.match(name))
        }
        found = ranges[np.isin(ranges["name"], list(matches))]
        if len(found):
            found = found[np.argsort(found["start"], kind="stable")]
            main = int(found["thread"][0])
            mine = found[found["thread"] == main]
            rows = [
                (rank, int(matches[name][1] or first + index), start, end)
                for index, (name, start, end) in enumerate(
                    zip(*(mine[field].tolist() for field in ("name", "start", "end")), strict=True)
                )
            ]
            return main, np.array(rows, STEP)
    return _busiest_thread(host), np.empty(0, STEP)


def _busiest_thread(host: Host) -> int:
    operators = host.events["thread"][host.events["kind"] == OP]
    return int(np.bincount(operators).argmax()) if len(operators) else NONE


def _disjoint(windows: _Array) -> _Array:
    """Let each step begin where the one before it ended, at the earliest."""
    result = windows.copy()
    result["end_ns"] = np.maximum.accumulate(windows["end_ns"])
    result["start_ns"][1:] = np.maximum(windows["start_ns"][1:], result["end_ns"][:-1])
    result["end_ns"] = np.maximum(result["end_ns"], result["start_ns"])
    return result
