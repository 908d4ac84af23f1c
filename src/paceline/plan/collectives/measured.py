"""Measured: seconds of a collective from curves over bytes and ranks.

Between the points one interpolates logarithms. Outside them:
- fewer bytes than measured: the latency of the smallest;
- more bytes: the bandwidth between the last two sizes;
- other numbers of ranks than between the fewest and the most: a ring of the same step. Each of its
  n - 1 steps carries 1/n of the buffer, so that n ranks with S bytes do (n - 1) / (m - 1) times the
  steps of m measured ranks with S m / n bytes; what a group takes without any step (launch) counts
  once. An all-reduce may also use a tree, whose latency grows with log(n); the better of the two is
  taken. An all-to-all has no steps: its ranks send to all others at once.

Times are made non-decreasing in bytes by the geometric mean of the two envelopes that are: noise of
a measurement must not make a larger message faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.config.curves import CollectiveCurve
from paceline.plan.points import Array


class CurveAxis(NamedTuple):
    """Increasing points of one axis."""

    points: Array  # (g,)
    gaps: Array  # (g - 1,), to the next

    def place(self, wanted: Array) -> tuple[Array, Array]:
        """Index of the point below, and the share of the way to the next; ends hold beyond."""
        index = self.points.searchsorted(wanted, side="right") - 1
        index = np.minimum(np.maximum(index, 0), len(self.gaps) - 1)
        share = (wanted - self.points[index]) / self.gaps[index]
        return index, np.minimum(np.maximum(share, 0.0), 1.0)


@dataclass(frozen=True, eq=False)
class CurveTable:
    """Curves of one collective on one tier, on a common grid: r numbers of ranks, b sizes."""

    op: str
    ranks: tuple[float, float]
    """The fewest and the most that were measured."""
    log_ranks: CurveAxis  # (r,)
    log_bytes: CurveAxis  # (b,)
    log_s: Array  # (r, b)
    last_bytes: float
    log_slope: Array  # (r,), seconds per byte beyond the last size
    launch_s: float
    """What a group of one rank would take: the part that no step adds to."""
    rank_s: float
    """What each rank adds to the latency."""

    def seconds(self, num_bytes: Array, num_ranks: Array) -> Array:
        """Seconds of a collective of so many bytes among so many ranks: arrays of one shape."""
        fewest, most = self.ranks
        measured = np.minimum(np.maximum(num_ranks, fewest), most)
        if (measured == num_ranks).all():
            return self._between(num_bytes, num_ranks)
        if self.op == "all_to_all":
            leaving = (1 - 1 / num_ranks) / (1 - 1 / measured)
            late_s = self.rank_s * np.maximum(0.0, num_ranks - measured)
            return leaving * self._between(num_bytes, measured) + late_s
        steps = (num_ranks - 1) / (measured - 1)
        of_measured = self._between(num_bytes * measured / num_ranks, measured)
        ring = self.launch_s + steps * np.maximum(0.0, of_measured - self.launch_s)
        if self.op != "all_reduce":
            return ring
        depth = np.maximum(1.0, np.log(num_ranks) / np.log(measured))
        return np.minimum(ring, depth * self._between(num_bytes, measured))

    def _between(self, num_bytes: Array, num_ranks: Array) -> Array:
        column, part = self.log_bytes.place(np.log(np.maximum(num_bytes, 1.0)))
        row, mix = self.log_ranks.place(np.log(num_ranks))
        left = self.log_s[row, column], self.log_s[row + 1, column]
        right = self.log_s[row, column + 1], self.log_s[row + 1, column + 1]
        below, above = (low + part * (high - low) for low, high in zip(left, right, strict=True))
        seconds = np.exp(below + mix * (above - below))
        more = num_bytes - self.last_bytes
        if (more <= 0).all():
            return seconds
        slope = self.log_slope[row]
        slope = np.exp(slope + mix * (self.log_slope[row + 1] - slope))
        return seconds + np.maximum(0.0, more) * slope


def table_of(op: str, curves: Sequence[CollectiveCurve]) -> CurveTable:
    """The table of the curves of one collective, at least one of them of several ranks."""
    curves = sorted((c for c in curves if c.num_ranks > 1), key=lambda curve: curve.num_ranks)
    sizes = np.array(sorted({size for curve in curves for size in curve.bytes}))
    ranks = np.array([curve.num_ranks for curve in curves], float)
    rows = [_resampled(curve, sizes) for curve in curves]
    log_s = np.log([seconds for seconds, _ in rows])
    launch_s, rank_s = _latency_line(ranks, np.array([min(curve.seconds) for curve in curves]))
    return CurveTable(
        op=op,
        ranks=(ranks[0], ranks[-1]),
        log_ranks=_grid(np.log(ranks)),
        log_bytes=_grid(np.log(sizes)),
        # One row and column more: the neighbour of the last is itself.
        log_s=np.pad(log_s, ((0, 1), (0, 1)), mode="edge"),
        last_bytes=float(sizes[-1]),
        log_slope=np.pad(np.log([slope for _, slope in rows]), (0, 1), mode="edge"),
        launch_s=launch_s,
        rank_s=rank_s,
    )


def _grid(points: Array) -> CurveAxis:
    """A single point gets a neighbour far away, which holds the same."""
    return CurveAxis(points, np.diff(points) if len(points) > 1 else np.ones(1))


def _resampled(curve: CollectiveCurve, sizes: Array) -> tuple[Array, float]:
    """Seconds of one curve at the common sizes, and its seconds per byte beyond its last."""
    size, seconds = np.array(curve.bytes), np.array(curve.seconds)
    rising = np.sqrt(np.maximum.accumulate(seconds) * np.minimum.accumulate(seconds[::-1])[::-1])
    slope = rising[-1] / size[-1]
    if len(size) > 1:
        # At least half of the mean, where two noisy points would say "free".
        slope = max(slope / 2, (rising[-1] - rising[-2]) / (size[-1] - size[-2]))
    within = np.exp(np.interp(np.log(sizes), np.log(size), np.log(rising)))
    return within + slope * np.maximum(0.0, sizes - size[-1]), float(slope)


def _latency_line(ranks: Array, latency_s: Array) -> tuple[float, float]:
    """A line through the latencies of the fewest and the most ranks: at one rank, and per rank.

    Where one number of ranks was measured, half of its latency is taken for the launch.
    """
    steps = ranks[-1] - 1
    if len(ranks) == 1:
        return float(latency_s[0] / 2), float(latency_s[0] / 2 / steps)
    rank_s = max(0.0, (latency_s[-1] - latency_s[0]) / (ranks[-1] - ranks[0]))
    rank_s = min(rank_s, latency_s[-1] / steps)
    return float(latency_s[-1] - rank_s * steps), float(rank_s)
