"""Lanes: one step of some ranks as strips of colour, a stream each, small enough for a page.

A trace of a step has up to millions of spans; a page is a thousand pixels wide. So each lane is cut
into cells, and a cell takes the term that has most of its time; cells in a row with one term are
one strip. What is shorter is in the tables, and in the trace itself (Perfetto opens it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.account import Account
from paceline.observe.kineto.read import read_kineto
from paceline.observe.recorded import rank_in
from paceline.observe.terms import TERMS
from paceline.observe.timeline import HOST, Timeline

CELLS = 600
_FILLED = 0.2
"""Part of a cell that must be busy for it to have a colour."""
_MOST_RANKS = 6
_MOST_STREAMS = 4
"""Of a rank: those with the most time."""
_MOST_BYTES = 64 << 20
"""Of compressed traces: larger ones take longer to read again than a page is worth."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Strip:
    """A stretch of one term; times as parts of the step, 0 to 1."""

    start: float
    width: float
    term: str


@dataclass(frozen=True)
class Lane:
    """One stream of one rank."""

    rank: int
    stream: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Lanes:
    """One step, as the ranks saw it."""

    step: int
    length_s: float
    """From the first rank's start to the last one's end."""
    lanes: tuple[Lane, ...]
    num_ranks: int
    """Of the recording; not all are shown."""

    @property
    def terms(self) -> list[str]:
        """Those that occur, in the order of the vocabulary."""
        seen = {strip.term for lane in self.lanes for strip in lane.strips}
        return [term for term in TERMS if term in seen]


def read_lanes(traces: Sequence[Path], account: Account, axis: str | None = None) -> Lanes | None:
    """The median step of the recording; None where the traces are too large to read once more.

    Args:
        traces: of the account's ranks, one each.
        account: what was read of them.
        axis: as for `Account.read`.
    """
    files = _chosen(traces)
    if sum(file.stat().st_size for file in files) > _MOST_BYTES:
        return None
    step = _typical_step(account)
    timelines = [_aligned(read_kineto(file, rank_in(file), axis), account) for file in files]
    return lanes_of(Timeline.merge(timelines), step, len(account.ranks))


def lanes_of(timeline: Timeline, step: int, num_ranks: int) -> Lanes | None:
    """The lanes of one step; None where no rank has it."""
    windows = timeline.steps[timeline.steps["step"] == step]
    if not len(windows):
        return None
    start, end = int(windows["start_ns"].min()), int(windows["end_ns"].max())
    lanes = [
        Lane(rank, timeline.streams[stream], strips)
        for rank in timeline.ranks
        for stream in _streams(timeline, rank, start, end)
        if (strips := _strips(_spans(timeline, rank, stream), start, end))
    ]
    return Lanes(step, (end - start) / 1e9, tuple(lanes), num_ranks)


def _chosen(traces: Sequence[Path]) -> list[Path]:
    """All, or a few spread evenly over them."""
    places = np.linspace(0, len(traces) - 1, min(len(traces), _MOST_RANKS)).round().astype(int)
    return [traces[place] for place in dict.fromkeys(places.tolist())]


def _typical_step(account: Account) -> int:
    """The step of median length."""
    lengths = account.steps["end_ns"] - account.steps["start_ns"]
    order = np.argsort(lengths, kind="stable")
    return int(account.steps["step"][order[(len(order) - 1) // 2]])


def _aligned(timeline: Timeline, account: Account) -> Timeline:
    """On the clock of the first rank."""
    for rank in timeline.ranks:
        if rank in account.clocks:
            offset = account.clocks[rank].offset_ns
            timeline.spans["start_ns"][timeline.spans["rank"] == rank] += offset
            of_rank = timeline.steps["rank"] == rank
            timeline.steps["start_ns"][of_rank] += offset
            timeline.steps["end_ns"][of_rank] += offset
    return timeline


def _spans(timeline: Timeline, rank: int, stream: int) -> _Array:
    spans = timeline.spans
    return spans[(spans["rank"] == rank) & (spans["stream"] == stream) & (spans["layer"] < HOST)]


def _streams(timeline: Timeline, rank: int, start: int, end: int) -> list[int]:
    """The streams of a rank with the most time in the step, the busiest first."""
    spans = timeline.spans
    inside = spans[
        (spans["rank"] == rank)
        & (spans["layer"] < HOST)
        & (spans["start_ns"] < end)
        & (spans["start_ns"] + spans["duration_ns"] > start)
    ]
    busy = np.bincount(inside["stream"], inside["duration_ns"], len(timeline.streams))
    most = np.argsort(-busy, kind="stable")[:_MOST_STREAMS]
    return [int(stream) for stream in most if busy[stream] > 0.001 * (end - start)]


def _strips(spans: _Array, start: int, end: int) -> tuple[Strip, ...]:
    """Runs of cells with the same term; an empty cell is none."""
    width = (end - start) / CELLS
    filled = np.zeros((len(TERMS), CELLS))
    for term in np.unique(spans["term"]):
        mine = spans[spans["term"] == term]
        first = (mine["start_ns"] - start) / width
        filled[term] = _covered(first, first + mine["duration_ns"] / width)
    strongest = np.where(filled.sum(axis=0) > _FILLED, filled.argmax(axis=0), -1)
    edges = np.flatnonzero(np.diff(strongest, prepend=-2, append=-2))
    return tuple(
        Strip(int(a) / CELLS, int(b - a) / CELLS, TERMS[strongest[a]])
        for a, b in pairwise(edges)
        if strongest[a] >= 0
    )


def _covered(first: _Array, last: _Array) -> _Array:
    """How much of each cell some stretches cover, each counted for itself."""
    edges = np.arange(CELLS + 1)
    starts, ends = np.sort(np.clip(first, 0, CELLS)), np.sort(np.clip(last, 0, CELLS))
    return np.diff(_below(ends, edges) - _below(starts, edges))


def _below(values: _Array, edges: _Array) -> _Array:
    """Sum of min(value, edge) over the values, for each edge."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.searchsorted(values, edges)
    return sums[place] + (len(values) - place) * edges
