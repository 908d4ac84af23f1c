"""Steps on a device: what its streams do is the step, the host only explains why they idle.

A kernel's term comes from its name, unless the operator that launched it (found by correlation id)
stood in the optimizer, in a recomputed block or in attention. NCCL kernels are communication,
copies are a layer of their own. Where the device idles, a range of the host (waiting for data, a
checkpoint) claims the time; else it is `host_gap`, or stays unattributed where the trace has
nothing of the host.
"""

from typing import Any

import numpy as np

from paceline.observe import terms as words
from paceline.observe.accounting import Intervals, busy, complement, join
from paceline.observe.kineto.cpu import Window
from paceline.observe.kineto.host import Event, Host, Scope
from paceline.observe.terms import EXPOSED_COMM, TERM_ID
from paceline.observe.timeline import COMM, COPY, HOST, IDLE, PROCESSOR, SPAN, Builder, Timeline

Launches = dict[Any, int]  # correlation id -> index of the host event


def launches_of(host: Host) -> Launches:
    """Return the host event that launched each correlation id."""
    return {
        event.args["correlation"]: index
        for index, event in enumerate(host.events)
        if event.kind == "launch" and "correlation" in event.args
    }


def add_device(
    build: Builder, rank: int, device: list[Event], launches: Launches, host: Host
) -> None:
    """Add kernels and copies on the streams of the device, and the host's waiting."""
    for event in device:
        launch = launches.get(event.args.get("correlation"))
        scope = host.scopes[launch] if launch is not None else None
        term, layer = _kernel(event, scope, host.axis)
        stream = f"device {event.args.get('stream', event.thread[1])}"
        build.add(event.name, term, rank, stream, event.start, event.end, layer)
    for event in host.events:
        waits = words.range_term(event.name) if event.kind == "range" else None
        if waits in ("data_wait", "checkpoint_stall"):
            stream = f"host {event.thread[1]}"
            build.add(event.name, waits, rank, stream, event.start, event.end, HOST)


def follow_device(
    windows: list[Window], device: list[Event], launches: Launches, host: Host
) -> list[Window]:
    """Let each step last until the kernels that it launched have finished.

    A host that runs ahead of its device shifts the windows: it doesn't empty them.
    """
    starts = np.array([start for _, start, _ in windows], np.int64)
    ends = [end for _, _, end in windows]
    for event in device:
        launch = launches.get(event.args.get("correlation"))
        if launch is None:
            continue
        launched = host.events[launch].start
        index = int(np.searchsorted(starts, launched, "right")) - 1
        if index >= 0 and launched < windows[index][2]:
            ends[index] = max(ends[index], event.end)
    return [(step, start, end) for (step, start, _), end in zip(windows, ends, strict=True)]


def with_idle(timeline: Timeline, rank: int) -> Timeline:
    """Add the device's idle time within steps, as spans of the lowest priority."""
    at_work = busy(timeline, rank)
    idle = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
    for _, _, start, end in timeline.steps.tolist():
        idle = join(idle, complement(at_work, start, end))
    names, streams = (*timeline.names, "(device idle)"), (*timeline.streams, "idle")
    label, stream, term = len(names) - 1, len(streams) - 1, TERM_ID["host_gap"]
    rows = [
        (label, term, IDLE, rank, stream, start, end - start)
        for start, end in zip(idle.starts.tolist(), idle.ends.tolist(), strict=True)
    ]
    spans = np.concatenate([timeline.spans, np.array(rows, SPAN)])
    return Timeline(spans, timeline.steps, names, streams)


def _kernel(event: Event, scope: Scope | None, axis: str | None) -> tuple[str, int]:
    """Return the term and the layer of one kernel or copy."""
    if event.kind == "copy":
        return "other_kernels", COPY
    term = words.kernel_term(event.name)
    if term == EXPOSED_COMM:
        group = words.axis_of_group(str(event.args.get("Process Group Description", "")))
        return words.comm_term(group or (scope.axis if scope else None) or axis), COMM
    if scope and scope.claim in ("recompute", "optimizer", "attention"):
        return scope.claim, PROCESSOR
    return term, PROCESSOR
