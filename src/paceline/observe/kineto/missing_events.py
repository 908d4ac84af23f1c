"""What a recording lacks: caveats, and the steps of a cut file that lack nothing.

A file that was cut, a graph whose kernels the profiler lost, a device that it was not permitted to
look at: all leave the same behind, time in which nothing seems to run. Each is told by what
contradicts that.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import caveats
from paceline.observe import terms as words
from paceline.observe.accounting import clip, intersection, union
from paceline.observe.caveats import Caveat
from paceline.observe.kineto.events import COPY, KERNEL, LAUNCH, OP, Trace
from paceline.observe.kineto.host import NONE
from paceline.observe.kineto.recording import Recording
from paceline.observe.kineto.spans import idle_time
from paceline.observe.terms import EXPOSED_IDS, STEP_RANGE, TERM_ID

_Array = npt.NDArray[Any]

_STARTS_WORK = re.compile(r"Launch|Mem(cpy|set)")  # calls that give work to a device
_MAX_LOST = 0.01  # whole traces lose a few events as well
# Operators that launch work in so many of their calls do it as a rule; of these, in whole traces at
# least so many do.
_LAUNCHES_AS_A_RULE, _MOST_LAUNCH = 0.25, 0.85

# Names that only work of a CPU has.
_OF_CPU = re.compile(r"gloo:|mkldnn|onednn|_for_cpu$")
_GRAPH_LAUNCH = re.compile(r"(cuda|hip|cu)GraphLaunch")
_MOST_WAITED = 0.05  # of the steps, for a device that seems idle
_LONG_NS = 50_000  # between kernels of a graph pass a few us, and waking up takes a host some tens


def kernels_are_missing(trace: Trace, has_gloo: bool) -> bool:
    """Say whether a trace without kernels is of a job on a device all the same.

    Calls that give work to a device say so. Without them a device in the header does, unless
    something ran that only a CPU runs, or our own profiler recorded, which knows.
    """
    if len(_calls(trace)):
        return True
    if not trace.about.get("deviceProperties") or "paceline" in trace.about:
        return False
    return not has_gloo and not any(map(_OF_CPU.search, trace.names))


def caveats_of(recording: Recording, kept: _Array) -> Iterator[Caveat]:
    """Yield what must be known of a recording.

    Args:
        recording: as it was read.
        kept: those of its steps that count.
    """
    for kind, sentence, numbers in _told(recording, kept):
        yield Caveat(kind, sentence, numbers, (recording.rank,))


_Told = tuple[str, str, dict[str, float]]


def _told(recording: Recording, kept: _Array) -> Iterator[_Told]:
    trace = recording.trace
    if trace.num_left_out:
        yield (
            caveats.EVENTS_LEFT_OUT,
            f"{trace.num_left_out:,} events beside {len(trace.events):,} can't be those of a "
            f"profiler and are left out; the first: {trace.why_left_out}.",
            {"events": trace.num_left_out, "read": len(trace.events)},
        )
    if trace.is_cut:
        left_out = len(recording.windows) - len(kept)
        yield (
            caveats.CUT,
            f"The file ends in the middle: {len(trace.events):,} events before that were read, "
            f"{left_out} of {len(recording.windows)} steps are left out because their work isn't "
            "all there.",
            {"events": len(trace.events), "steps": len(kept), "left_out": left_out},
        )
    if not len(recording.marked):
        seconds = float((kept["end_ns"] - kept["start_ns"]).sum()) / 1e9
        yield (
            caveats.NO_STEPS,
            f"The trace marks no steps (ProfilerStep#n or {STEP_RANGE}), so all of its "
            f"{seconds:.3g} s count as one.",
            {"seconds": seconds},
        )
    if recording.engine is not None:
        prompts = int(np.count_nonzero(recording.engine.phases == TERM_ID["prefill"]))
        count = len(recording.engine.phases)
        yield (
            caveats.INFERENCE,
            f"An engine that serves a model: {prompts:,} of its {count:,} batches have prompts "
            "(prefill), the others decode.",
            {"iterations": count, "prefill": prompts, "decode": count - prompts},
        )
    if not len(recording.device) and recording.pieces is None:
        yield _no_kernels(len(_calls(trace)))
    if len(recording.device):
        yield from _lost_graphs(recording, kept)


def _no_kernels(num_calls: int) -> _Told:
    saw = (
        f"The host gave work to a device {num_calls:,} times"
        if num_calls
        else ("The trace's header names a device")
    )
    return (
        caveats.NO_KERNELS,
        f"{saw}, and no kernel was recorded: what the device did isn't known, and only waits of "
        "the host are accounted for. Record ProfilerActivity.CUDA as well, with permission to use "
        "the device's performance counters.",
        {"calls": num_calls},
    )


def _lost_graphs(recording: Recording, kept: _Array) -> Iterator[_Told]:
    """Tell of replayed graphs without kernels: told by those that have none, and by a host that
    waits for a device on which nothing seems to run."""
    calls = _calls(recording.trace)
    is_graph = np.array([bool(_GRAPH_LAUNCH.match(name)) for name in recording.trace.names])
    graphs = calls[is_graph[calls["name"]]]
    if not len(graphs):
        return
    ran = recording.device["correlation"]
    empty = int(np.count_nonzero(~np.isin(graphs["correlation"], ran)))
    recorded = int(np.count_nonzero(np.isin(ran, graphs["correlation"])))
    step_ns = max(1, int((kept["end_ns"] - kept["start_ns"]).sum()))
    waited = _waits_for_nothing(recording, int(graphs["start"].min())) / step_ns
    if empty <= _MAX_LOST * len(graphs) and waited < _MOST_WAITED:
        return
    yield (
        caveats.GRAPH_KERNELS_MISSING,
        f"Graphs were replayed {len(graphs):,} times, and the profiler has no kernel of {empty:,} "
        f"of these; for {waited:.0%} of the time the host waits for a device that seems idle. So "
        "idle time and host_gap are upper bounds, and what kernels did are lower ones.",
        {
            "replays": len(graphs),
            "without_kernels": empty,
            "kernels": recorded,
            "waited_for_nothing": waited,
        },
    )


def _waits_for_nothing(recording: Recording, since_ns: int) -> int:
    """Return nanoseconds of the steps in which the host waits and the device has no kernel."""
    events = recording.host.events
    waits = np.array([words.is_sync(name) for name in recording.host.names], bool)
    calls = events[waits[events["name"]] & (events["kind"] == LAUNCH)]
    waiting = union(calls["start"], calls["end"])
    last = int(events["end"].max(initial=since_ns))
    nothing = intersection(idle_time(recording), clip(waiting, since_ns, last))
    lengths = nothing.ends - nothing.starts
    return int(lengths[lengths >= _LONG_NS].sum())


def _calls(trace: Trace) -> _Array:
    """Return the calls that give work to a device, in the file's order."""
    starts_work = np.array([bool(_STARTS_WORK.search(name)) for name in trace.names], bool)
    return trace.events[(trace.events["kind"] == LAUNCH) & starts_work[trace.events["name"]]]


def whole_steps(recording: Recording) -> _Array:
    """Return the steps of a cut file that are known to have all of their work.

    The device's events stand behind the host's, each kind in order of time, or thread after thread:
    a step may have its range and its operators and not its kernels, and would look idle. So a step
    counts if what was read of each kind reaches beyond its end and no stream may be missing
    altogether. Besides, the kernels of its calls have to be there, and operators must have their
    calls.
    """
    events, windows, marked = recording.trace.events, recording.windows, recording.marked
    calls = _calls(recording.trace)
    device = events[np.isin(events["kind"], (KERNEL, COPY))]
    if not len(marked):
        return windows[:0]
    communicates = len(recording.gloo.owner) or np.isin(recording.terms, EXPOSED_IDS).any()
    if any(map(words.is_comm_op, recording.trace.names)) and not communicates:
        return windows[:0]
    if not len(device):
        if recording.pieces is None:
            return windows[:0]
        return windows[windows["end_ns"] <= _reached(events[events["kind"] == OP])]
    if _is_by_stream(device["thread"]):
        return windows[:0]
    reached = min(_reached(rows) for rows in (calls, device) if len(rows))
    lost = ~np.isin(calls["correlation"], device["correlation"])
    # The host's own steps: those of the device end where the last kernel that was read does.
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
