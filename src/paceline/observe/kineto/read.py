"""Read the trace that torch.profiler (Kineto) exports, as a Timeline.

There are two kinds of trace, told apart by whether work of a device was recorded; `kineto.cuda` and
`kineto.cpu` say how each is read. Both kinds of step are wall-clock windows of the host's
`paceline.step` ranges (or of `ProfilerStep#n`, or else the trace as a whole). On a device a step
lasts until its last kernel has finished, and the next begins there at the earliest.

Not here: traces larger than memory, traces of several devices in one process.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import re
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.observe.kineto.cpu import Window, add_main_thread
from paceline.observe.kineto.cuda import add_device, follow_device, launches_of, with_idle
from paceline.observe.kineto.host import Event, Thread, nest
from paceline.observe.terms import STEP_RANGE
from paceline.observe.timeline import Builder, Timeline, load_trace

METADATA = "paceline"  # what our profiler notes in a trace: {"first_step": .., "axis": ..}

# Categories, with the names that PyTorch before 1.12 gave them.
_KINDS = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "range",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "runtime": "launch",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "gpu_memset": "copy",
    "memset": "copy",
}
_OUR_STEP = re.compile(rf"{re.escape(STEP_RANGE)}(?:#(\d+))?$")
_FOREIGN_STEP = re.compile(r"ProfilerStep#(\d+)$")


def read_kineto(path: str | Path, rank: int | None = None, axis: str | None = None) -> Timeline:
    """Read a trace of one rank.

    Args:
        path: Chrome trace JSON by torch.profiler, gzipped or not.
        rank: the rank to file the spans under; by default what the trace says, else 0.
        axis: the mesh axis of collectives that don't tell theirs (the default process group);
            by default what our profiler noted in the trace, else unknown.

    Raises:
        InputError: the file is missing, cut, or has no events of a profiler.
    """
    trace = load_trace(path)
    try:
        noted = trace.get(METADATA) or {}
        where = trace.get("distributedInfo") or {}
        rank = int(where.get("rank", 0)) if rank is None else rank
        axis = noted.get("axis") if axis is None else axis
        events = _events(trace)
        if events:
            return _timeline(events, rank, axis, int(noted.get("first_step", 0)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path} has an event that a profiler's trace can't have ({error!r}); record it again."
        ) from None
    raise InputError(
        f"{path} has no operators or kernels; record it with torch.profiler around whole steps."
    )


def _events(trace: dict[str, Any]) -> list[Event]:
    """Keep the complete events of operators, ranges, launches and kernels, in order of start."""
    raw = [
        (event, kind)
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and (kind := _KINDS.get(str(event.get("cat", "")).lower())) is not None
    ]
    # Microseconds since the epoch fill a double; relative to the first event they keep their ns.
    origin_us = int(min((event["ts"] for event, _ in raw), default=0))
    base_ns = int(trace.get("baseTimeNanoseconds") or 0) + origin_us * 1000
    events = [_event(event, kind, origin_us, base_ns) for event, kind in raw]
    events.sort(key=lambda event: (event.start, -event.end))
    return events


def _event(raw: dict[str, Any], kind: str, origin_us: int, base_ns: int) -> Event:
    start = base_ns + round((raw["ts"] - origin_us) * 1e3)
    duration = round(raw["dur"] * 1e3)
    if duration < 0:
        raise ValueError(f"{raw['name']} lasts {raw['dur']} us")
    thread = (raw["pid"], raw["tid"])
    return Event(str(raw["name"]), kind, thread, start, start + duration, raw.get("args") or {})


def _timeline(events: list[Event], rank: int, axis: str | None, first_step: int) -> Timeline:
    on_device = [event for event in events if event.kind in ("kernel", "copy")]
    host = nest([event for event in events if event.kind not in ("kernel", "copy")], axis)
    main, windows = _steps(host.events, events, first_step)
    build = Builder()
    if not on_device:
        windows = _disjoint(windows)
        add_main_thread(build, rank, host, main, windows)
        return build.timeline([(rank, *window) for window in windows])
    launches = launches_of(host)
    add_device(build, rank, on_device, launches, host)
    windows = _disjoint(follow_device(windows, on_device, launches, host))
    timeline = build.timeline([(rank, *window) for window in windows])
    return with_idle(timeline, rank) if host.events else timeline


def _steps(
    host: list[Event], events: list[Event], first_step: int
) -> tuple[Thread | None, list[Window]]:
    """Return the main thread and the steps that its ranges mark."""
    ranges = [event for event in host if event.kind == "range"]
    for pattern, first in ((_OUR_STEP, first_step), (_FOREIGN_STEP, 0)):
        found = [(event, match) for event in ranges if (match := pattern.match(event.name))]
        if found:
            main = found[0][0].thread
            mine = [pair for pair in found if pair[0].thread == main]
            return main, [
                (int(match[1] or first + index), event.start, event.end)
                for index, (event, match) in enumerate(mine)
            ]
    whole = (first_step, events[0].start, max(event.end for event in events))
    return _busiest_thread(host), [whole]


def _busiest_thread(host: list[Event]) -> Thread | None:
    operators: dict[Thread, int] = {}
    for event in host:
        if event.kind == "op":
            operators[event.thread] = operators.get(event.thread, 0) + 1
    return max(operators, key=operators.__getitem__, default=None)


def _disjoint(windows: list[Window]) -> list[Window]:
    """Let each step begin where the one before it ended, at the earliest."""
    result = []
    reached = 0
    for step, start, end in windows:
        start, end = max(start, reached), max(end, reached)
        result.append((step, start, end))
        reached = end
    return result
