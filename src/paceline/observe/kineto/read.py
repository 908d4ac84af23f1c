"""Read the trace that torch.profiler (Kineto) exports, as a Timeline.

There are two kinds of trace, told apart by whether work of a device was recorded; `kineto.cuda` and
`kineto.cpu` say how each is read. Both kinds of step are wall-clock windows of the host's
`paceline.step` ranges (or of `ProfilerStep#n`, or else the trace as a whole). On a device a step
lasts until its last kernel has finished, and the next begins there at the earliest.

Not here: traces of several devices in one process.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe.kineto import cpu, cuda, missing_events
from paceline.observe.kineto.engine import iterations, phase_terms
from paceline.observe.kineto.events import COPY, KERNEL, OP, PYTHON, RANGE, Trace, read_events
from paceline.observe.kineto.host import NONE, HostEvents, nest_host_events
from paceline.observe.kineto.recording import Recording
from paceline.observe.kineto.spans import timeline_of
from paceline.observe.terms import STEP_RANGE
from paceline.observe.timeline import STEP, Timeline

METADATA = "paceline"  # what our profiler notes in a trace: {"first_step": .., "axis": ..}

_OUR_STEP = re.compile(rf"{re.escape(STEP_RANGE)}(?:#(\d{{1,18}}))?$")
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
    kept = missing_events.whole_steps(recording) if trace.is_cut else recording.windows
    if not len(kept):
        raise InputError(
            f"{path} was cut, and of none of its steps it is certain that all is there; "
            "record it again."
        )
    return replace(
        recording, windows=kept, caveats=tuple(missing_events.caveats_of(recording, kept))
    )


def _recording(trace: Trace, rank: int, axis: str | None, first_step: int) -> Recording:
    kinds = trace.events["kind"]
    on_device = np.isin(kinds, (KERNEL, COPY))
    python = trace.events[kinds == PYTHON]
    host = nest_host_events(trace, trace.events[~on_device & (kinds != PYTHON)], axis)
    main, marked = _steps(host, trace, rank, first_step)
    engine = iterations(host)
    if engine is not None and not len(marked):
        main, marked = engine.main, engine.steps(rank, first_step)
    windows = marked if len(marked) else _whole_trace(trace, rank, first_step)
    device = trace.events[on_device]
    device = device[np.argsort(device["start"], kind="stable")]
    launch = cuda.launches(host, device)
    terms = cuda.device_terms(trace, host, device, launch, serves=engine is not None)
    phases = None
    if engine is not None and len(device):
        phases = phase_terms(trace, host, device, launch, terms, engine)
    found = cpu.gloo_collectives(host)
    asked = cpu.starters(host, found)
    gloo, pieces = cpu.as_pieces(host, found, asked), None
    if len(device) or missing_events.kernels_are_missing(trace, len(found) > 0):
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
        marked,
        windows,
        pieces,
        gloo,
        asked,
        engine,
        phases,
    )


def _whole_trace(trace: Trace, rank: int, number: int) -> _Array:
    """Return one step that lasts as long as the trace."""
    start, end = trace.events["start"].min(), trace.events["end"].max()
    return np.array([(rank, number, start, end)], STEP)


def _steps(host: HostEvents, trace: Trace, rank: int, first_step: int) -> tuple[int, _Array]:
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


def _busiest_thread(host: HostEvents) -> int:
    operators = host.events["thread"][host.events["kind"] == OP]
    return int(np.bincount(operators).argmax()) if len(operators) else NONE


def _disjoint(windows: _Array) -> _Array:
    """Let each step begin where the one before it ended, at the earliest."""
    result = windows.copy()
    result["end_ns"] = np.maximum.accumulate(windows["end_ns"])
    result["start_ns"][1:] = np.maximum(windows["start_ns"][1:], result["end_ns"][:-1])
    result["end_ns"] = np.maximum(result["end_ns"], result["start_ns"])
    return result
