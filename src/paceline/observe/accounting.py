"""The accounting of a step: every nanosecond of it goes to exactly one term of the vocabulary.

How it works: in each step's window, the layers of the Timeline are visited from the lowest up, and
in each layer the terms in the order of `TERMS`. A term receives the union of its spans less what
was claimed before. What no span claims is `unattributed`. All of it is arithmetic on whole
nanoseconds, so the terms of a step sum to the step with no remainder; only the division by 1e9 at
the end rounds.

The same rule serves predicted and measured timelines, CPU and CUDA: how a trace becomes layered
spans is decided before (`observe.kineto`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.observe.terms import TERM_ID, TERMS
from paceline.observe.timeline import Timeline

_Array = npt.NDArray[np.int64]
UNATTRIBUTED = "unattributed"


class Intervals(NamedTuple):
    """Disjoint half-open intervals in rising order, in nanoseconds."""

    starts: _Array
    ends: _Array


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


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Return what both sets of intervals have."""
    if not len(one.starts) or not len(other.starts):
        return Intervals(one.starts[:0], one.ends[:0])
    low = int(min(one.starts[0], other.starts[0]))
    high = int(max(one.ends[-1], other.ends[-1]))
    outside = join(complement(one, low, high), complement(other, low, high))
    return complement(outside, low, high)


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
    accounts: dict[int, dict[int, dict[str, int]]] = {rank: {} for rank in timeline.ranks}
    for (rank, step, _, _), row in zip(
        timeline.steps.tolist(), terms_matrix(timeline).tolist(), strict=True
    ):
        accounts[rank][step] = {term: ns for term, ns in zip(TERMS, row, strict=True) if ns}
    return accounts


def terms_matrix(timeline: Timeline) -> _Array:
    """Return the nanoseconds of each step's terms, (num_steps, len(TERMS)): rows sum exactly."""
    terms = np.zeros((len(timeline.steps), len(TERMS)), np.int64)
    for rank in timeline.ranks:
        line = owners(timeline, rank)
        for index in np.flatnonzero(timeline.steps["rank"] == rank).tolist():
            _, _, start, end = timeline.steps[index].tolist()
            terms[index] = line.within(start, end)
    return terms


class Owners(NamedTuple):
    """Which term each instant of a rank's time belongs to."""

    at: _Array
    """Cuts in rising order, in nanoseconds."""
    term: npt.NDArray[np.int8]
    """Index into TERMS from each cut to the next; before the first nothing is known."""

    def within(self, start_ns: int, end_ns: int) -> _Array:
        """Return the nanoseconds of each term in a window; they sum to its length."""
        low, high = np.searchsorted(self.at, [start_ns, end_ns], "right")
        edges = np.concatenate([[start_ns], self.at[low:high], [end_ns]])
        before = self.term[low - 1] if low else TERM_ID[UNATTRIBUTED]
        inside = np.concatenate([[before], self.term[low:high]])
        terms = np.zeros(len(TERMS), np.int64)
        np.add.at(terms, inside, np.diff(edges))
        return terms

    def shifted(self, by_ns: int) -> "Owners":
        """Return the same on another clock."""
        return Owners(self.at + by_ns, self.term)

    def give(self, taken: "Intervals", of: Sequence[int], to: int) -> "Owners":
        """Give the time of some terms within intervals to another term."""
        edges = np.concatenate([taken.starts, taken.ends])
        place = np.searchsorted(self.at, edges, "right") - 1
        there = np.where(place >= 0, np.append(self.term, 0)[place], TERM_ID[UNATTRIBUTED])
        at = np.concatenate([self.at, edges])
        order = np.argsort(at, kind="stable")
        at, term = at[order], np.concatenate([self.term, there])[order]
        place = np.searchsorted(taken.starts, at, "right") - 1
        inside = (place >= 0) & (at < np.append(taken.ends, 0)[place])
        return Owners(at, np.where(inside & np.isin(term, of), to, term).astype(np.int8))


def owners(timeline: Timeline, rank: int) -> Owners:
    """Cut a rank's time by the term that each instant belongs to."""
    classes = list(_by_priority(timeline.spans[timeline.spans["rank"] == rank]))
    # A class's intervals are disjoint, so it is a bit that goes on and off. The lowest bit that is
    # on owns the instant.
    edges = [edge for _, when in classes for edge in when]
    bits = [sign << k for k in range(len(classes)) for sign in (1, -1)]
    at = np.concatenate([np.empty(0, np.int64), *edges])
    change = np.repeat(np.array(bits, np.int64), [len(edge) for edge in edges])
    order = np.argsort(at, kind="stable")
    active = np.cumsum(change[order])
    lowest = np.frexp((active & -active).astype(float))[1] - 1  # -1: none is on
    terms = np.array([*(term for term, _ in classes), TERM_ID[UNATTRIBUTED]], np.int8)
    return Owners(at[order], terms[lowest])


def _by_priority(spans: npt.NDArray[Any]) -> Iterator[tuple[int, Intervals]]:
    keys = spans["layer"].astype(np.int64) * len(TERMS) + spans["term"]
    for key in np.unique(keys):
        chosen = spans[keys == key]
        ends = chosen["start_ns"] + chosen["duration_ns"]
        yield int(key % len(TERMS)), union(chosen["start_ns"], ends)
