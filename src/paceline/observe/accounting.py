"""The accounting of a step: every nanosecond of it goes to exactly one term of the vocabulary.

How it works: in each step's window, the layers of the Timeline are visited from the lowest up, and
in each layer the terms in the order of `TERMS`. A term receives the union of its spans less what
was claimed before. What no span claims is `unattributed`. All of it is arithmetic on whole
nanoseconds, so the terms of a step sum to the step with no remainder; only the division by 1e9 at
the end rounds.

The same rule serves predicted and measured timelines, CPU and CUDA: how a trace becomes layered
spans is decided before (`observe.kineto`).

`device_breakdown` is the coarser split (compute, anything else, idle) of HolisticTraceAnalysis
(https://github.com/facebookresearch/HolisticTraceAnalysis), to compare with its figures.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe.terms import TERM_ID, TERMS
from paceline.observe.timeline import HOST, PROCESSOR, Timeline

_Array = npt.NDArray[np.int64]
UNATTRIBUTED = "unattributed"


class Intervals(NamedTuple):
    """Disjoint half-open intervals in rising order, in nanoseconds."""

    starts: _Array
    ends: _Array

    @property
    def total_ns(self) -> int:
        """The summed length."""
        return int((self.ends - self.starts).sum())


def union(starts: _Array, ends: _Array) -> Intervals:
    """Merge intervals that overlap or touch; empty ones vanish."""
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if not len(starts):
        return Intervals(starts, ends)
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[1:] > reach[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Intervals(starts[opens], reach[closes])


def clip(intervals: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Keep the part within a window."""
    starts, ends = np.maximum(intervals.starts, start_ns), np.minimum(intervals.ends, end_ns)
    kept = ends > starts
    return Intervals(starts[kept], ends[kept])


def join(one: Intervals, other: Intervals) -> Intervals:
    """Return the union of two sets of intervals."""
    starts = np.concatenate([one.starts, other.starts])
    return union(starts, np.concatenate([one.ends, other.ends]))


def complement(intervals: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Return what a window has beside the intervals."""
    inside = clip(intervals, start_ns, end_ns)
    starts = np.concatenate([np.array([start_ns], np.int64), inside.ends])
    ends = np.concatenate([inside.starts, np.array([end_ns], np.int64)])
    kept = ends > starts
    return Intervals(starts[kept], ends[kept])


def accounting(timeline: Timeline) -> dict[int, dict[int, dict[str, float]]]:
    """Split each step into the terms of the vocabulary.

    Returns:
        rank -> step -> term -> seconds. Terms without time are left out; the others sum to the
        step's length. Where steps of a rank share a number, the last one counts.
    """
    accounts = accounting_ns(timeline)
    return {
        rank: {step: {t: ns / 1e9 for t, ns in terms.items()} for step, terms in steps.items()}
        for rank, steps in accounts.items()
    }


def accounting_ns(timeline: Timeline) -> dict[int, dict[int, dict[str, int]]]:
    """Do as `accounting`, in whole nanoseconds: the sums are exact."""
    accounts: dict[int, dict[int, dict[str, int]]] = {}
    for rank in timeline.ranks:
        classes = _classes(timeline, rank)
        windows = timeline.steps[timeline.steps["rank"] == rank]
        accounts[rank] = {
            int(step): _account(classes, int(start), int(end))
            for _, step, start, end in windows.tolist()
        }
    return accounts


def device_breakdown(timeline: Timeline, rank: int) -> dict[str, float]:
    """Split the time between a device's first and last span as HolisticTraceAnalysis does.

    Like there, the last step is left out where there are several: its kernels are often cut off.

    Returns:
        shares of 1: "compute" (a compute kernel runs), "non_compute" (only communication or
        copies run), "idle".

    Raises:
        InputError: this rank has no device spans.
    """
    spans = timeline.spans[timeline.spans["rank"] == rank]
    streams = np.array([label.startswith("device") for label in timeline.streams], bool)
    spans = spans[streams[spans["stream"]] & (spans["layer"] < HOST)]
    steps = timeline.steps[timeline.steps["rank"] == rank]
    if len(steps) > 1:
        spans = spans[spans["start_ns"] < np.sort(steps["end_ns"])[-2]]
    if not len(spans):
        raise InputError(f"rank {rank} has no device spans; give a trace recorded with CUDA.")
    ends = spans["start_ns"] + spans["duration_ns"]
    working = spans["layer"] == PROCESSOR
    whole = int(ends.max() - spans["start_ns"].min())
    at_work = union(spans["start_ns"], ends).total_ns
    compute = union(spans["start_ns"][working], ends[working]).total_ns
    shares = {"compute": compute, "non_compute": at_work - compute, "idle": whole - at_work}
    return {name: ns / whole for name, ns in shares.items()}


def busy(timeline: Timeline, rank: int) -> Intervals:
    """Return when a rank's processor, links or copy engines were at work."""
    spans = timeline.spans[timeline.spans["rank"] == rank]
    spans = spans[spans["layer"] < HOST]
    return union(spans["start_ns"], spans["start_ns"] + spans["duration_ns"])


def _classes(timeline: Timeline, rank: int) -> list[tuple[str, Intervals]]:
    """Return (term, when) for each layer and term that occurs, in order of priority."""
    spans = timeline.spans[timeline.spans["rank"] == rank]
    return [(TERMS[term], when) for term, when in _by_priority(spans)]


def _by_priority(spans: npt.NDArray[Any]) -> Iterator[tuple[int, Intervals]]:
    keys = spans["layer"].astype(np.int64) * len(TERMS) + spans["term"]
    for key in np.unique(keys):
        chosen = spans[keys == key]
        ends = chosen["start_ns"] + chosen["duration_ns"]
        yield int(key % len(TERMS)), union(chosen["start_ns"], ends)


def _account(classes: list[tuple[str, Intervals]], start: int, end: int) -> dict[str, int]:
    """Give each class what is left of the window, in order of priority."""
    terms: dict[str, int] = {}
    claimed = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
    claimed_ns = 0
    for term, when in classes:
        claimed = join(claimed, clip(when, start, end))
        terms[term] = terms.get(term, 0) + claimed.total_ns - claimed_ns
        claimed_ns = claimed.total_ns
    terms[UNATTRIBUTED] = terms.get(UNATTRIBUTED, 0) + end - start - claimed_ns
    return {term: terms[term] for term in sorted(terms, key=TERM_ID.__getitem__) if terms[term]}
