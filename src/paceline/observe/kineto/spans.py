"""The spans of a recording: what a Timeline shows of it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.accounting import Intervals, clip, complement, union
from paceline.observe.kineto.cpu import ThreadPieces
from paceline.observe.kineto.events import COPY, RANGE
from paceline.observe.kineto.host import NONE
from paceline.observe.kineto.recording import Recording
from paceline.observe.terms import EXPOSED_IDS, TERM_ID
from paceline.observe.timeline import COMM, HOST, IDLE, PROCESSOR, Timeline, span_columns
from paceline.observe.timeline import COPY as COPIES

_Array = npt.NDArray[Any]
_WAITS, _IDLES, _NO_OPERATOR = "(waits for a collective)", "(device idle)", "(no operator)"


def timeline_of(recording: Recording) -> Timeline:
    """Return the spans of a recording, and its steps."""
    if recording.pieces is None:
        return _device_timeline(recording)
    return _cpu_timeline(recording, recording.pieces)


def idle_time(recording: Recording) -> Intervals:
    """Return when, within steps, a device had nothing to do and the host was being recorded.

    A device of which nothing was recorded isn't known to have idled.
    """
    events, idle = recording.host.events, _unused_time(recording)
    if not len(events) or not len(recording.device):
        return Intervals(idle.starts[:0], idle.ends[:0])
    return clip(idle, int(events["start"].min()), int(events["end"].max()))


def _unused_time(recording: Recording) -> Intervals:
    """Return when, within steps, a device had nothing to do."""
    device = recording.device
    at_work = union(device["start"], device["end"])
    windows = zip(recording.windows["start_ns"], recording.windows["end_ns"], strict=True)
    parts = [complement(at_work, int(start), int(end)) for start, end in windows]
    starts = np.concatenate([np.empty(0, np.int64), *(part.starts for part in parts)])
    ends = np.concatenate([np.empty(0, np.int64), *(part.ends for part in parts)])
    return Intervals(starts, ends)


def _cpu_timeline(recording: Recording, pieces: ThreadPieces) -> Timeline:
    trace, host, rank = recording.trace, recording.host, recording.rank
    label = np.append(host.events["name"], len(trace.names))[pieces.owner]
    waits = (pieces.owner == NONE) & (pieces.term != TERM_ID["host_gap"])
    label[waits] = len(trace.names) + 1
    beside, main = recording.gloo, len(trace.threads)
    events = host.events[beside.owner]
    name, thread = events["name"], events["thread"]
    spans = (
        span_columns(name, beside.term, COMM, rank, thread, beside.start, beside.end),
        span_columns(label, pieces.term, PROCESSOR, rank, main, pieces.start, pieces.end),
    )
    names = (*trace.names, _NO_OPERATOR, _WAITS)
    streams = (*(f"thread {thread}" for _, thread in trace.threads), "main")
    return Timeline(np.concatenate(spans), recording.windows, names, streams)


def _device_timeline(recording: Recording) -> Timeline:
    trace, rank, device = recording.trace, recording.rank, recording.device
    numbers, stream = _streams(recording)
    hosts = [f"host {thread}" for _, thread in trace.threads]
    streams = (*(f"device {number}" for number in numbers), *hosts, "idle")
    terms, idle, gap = recording.terms, idle_time(recording), TERM_ID["host_gap"]
    if recording.phases is not None:
        terms, idle, gap = recording.phases, _unused_time(recording), TERM_ID["idle"]
    layer = np.where(np.isin(terms, EXPOSED_IDS), COMM, PROCESSOR)
    layer[device["kind"] == COPY] = COPIES
    waits, wait_terms = _host_waits(recording)
    wait_streams = len(numbers) + waits["thread"]
    last = len(streams) - 1
    spans = (
        span_columns(device["name"], terms, layer, rank, stream, device["start"], device["end"]),
        span_columns(
            waits["name"], wait_terms, HOST, rank, wait_streams, waits["start"], waits["end"]
        ),
        span_columns(len(trace.names), gap, IDLE, rank, last, idle.starts, idle.ends),
    )
    return Timeline(np.concatenate(spans), recording.windows, (*trace.names, _IDLES), streams)


def _streams(recording: Recording) -> tuple[_Array, _Array]:
    """Return the numbers of the device's streams, and the index of each event's among them."""
    said = recording.device["stream"]
    threads = np.array([_number(thread) for _, thread in recording.trace.threads], np.int64)
    number = np.where(said >= 0, said, threads[recording.device["thread"]])
    return np.unique(number, return_inverse=True)


def _number(thread: Any) -> int:
    """Return the number of a stream, which some traces only have as the thread's."""
    return thread if isinstance(thread, int) and abs(thread) < 1 << 62 else NONE


def _host_waits(recording: Recording) -> tuple[_Array, _Array]:
    """Return the ranges in which the host waits by itself, and their terms."""
    events = recording.host.events
    terms = np.array([_wait(name) for name in recording.trace.names], np.int64)[events["name"]]
    chosen = (terms != NONE) & (events["kind"] == RANGE)
    return events[chosen], terms[chosen]


def _wait(name: str) -> int:
    term = words.range_term(name)
    return TERM_ID[term] if term in ("data_wait", "checkpoint_stall") else NONE
