"""Bandwidth: what was measured of a collective, as nccl-tests defines it, and a line through it.

Algorithm bandwidth is the whole buffer over the time. Bus bandwidth is that times the part of the
buffer which has to leave each rank, so that it can be held against the rate of a link, whatever the
collective and however many ranks. That part is 2 (n - 1) / n for an all-reduce, (n - 1) / n for a
reduce-scatter, an all-gather and an all-to-all, 1 for a broadcast and a message.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from paceline.explain.traffic import bus_factor


class BandwidthRow(NamedTuple):
    """One collective at one size, with all groups of this kind at work at once."""

    op: str
    algorithm: str
    """"backend", or one of ours."""
    links: str
    """What the group's ranks meet: "inside" a node, "across" nodes (one rank of each), "both"."""
    num_ranks: int
    num_bytes: int
    """Of the whole buffer."""
    seconds: float
    """Median over blocks of calls, mean over ranks."""
    low_s: float
    """10th percentile over blocks."""
    high_s: float
    """90th percentile."""
    alone_s: float | None = None
    """Seconds while the other groups wait; None: there are none, or it was not measured."""

    @property
    def algorithm_bytes_per_s(self) -> float:
        """The buffer over the time."""
        return self.num_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """What each rank must send, at least, over the time."""
        return self.algorithm_bytes_per_s * bus_factor(self.op, self.num_ranks)

    @property
    def contention(self) -> float | None:
        """How many times longer it takes while all groups do it than alone."""
        return None if self.alone_s is None else self.seconds / self.alone_s

    def figures(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            **self._asdict(),
            "algorithm_bytes_per_s": self.algorithm_bytes_per_s,
            "bus_bytes_per_s": self.bus_bytes_per_s,
            "contention": self.contention,
        }


@dataclass(frozen=True)
class LatencyBandwidthFit:
    """Seconds = latency + bytes / rate, and how badly that describes what was measured."""

    latency_s: float
    bytes_per_s: float
    """Of the whole buffer; infinite where more bytes took no longer."""
    errors: tuple[float, float] | None
    """Median and worst of the fitted seconds over the measured, less 1, absolute; None with fewer
    than three sizes: a line goes through two points, and says nothing of itself."""

    def seconds(self, num_bytes: float) -> float:
        """As fitted."""
        return self.latency_s + num_bytes / self.bytes_per_s

    @property
    def error_texts(self) -> list[str]:
        """Median and worst error as people read them."""
        return ["-", "-"] if self.errors is None else [f"{error:.0%}" for error in self.errors]


def fit(rows: Sequence[BandwidthRow]) -> LatencyBandwidthFit:
    """The line with the least squares of relative errors; neither part is negative.

    A planner reads the measured curves, not this line: it is for people, and for those who compute
    with latency and bandwidth alone. Where its error is large, they should not.
    """
    sizes, seconds = (
        np.array([float(value) for value in column])
        for column in zip(*((row.num_bytes, row.seconds) for row in rows), strict=True)
    )
    parts = np.stack([1 / seconds, sizes / seconds], axis=1)  # (rows, 2), of a target of 1
    late, per_byte = np.linalg.lstsq(parts, np.ones(len(rows)), rcond=None)[0]
    if late < 0 or len(rows) == 1:
        late, per_byte = 0.0, _alone(parts[:, 1])
    elif per_byte < 0:
        late, per_byte = _alone(parts[:, 0]), 0.0
    errors = np.abs(parts @ (late, per_byte) - 1).tolist()
    rate = 1 / per_byte if per_byte > 0 else float("inf")
    known = (median(errors), max(errors)) if len(rows) > 2 else None
    return LatencyBandwidthFit(float(late), float(rate), known)


def _alone(part: np.ndarray[Any, Any]) -> float:
    """The factor that brings one part nearest to 1."""
    return float(part.sum() / (part**2).sum())


Curve = tuple[str, str, str, int]
"""Op, algorithm, links, number of ranks: what rows of one curve have in common."""


def by_curve(rows: Iterable[BandwidthRow]) -> dict[Curve, list[BandwidthRow]]:
    """Rows of each curve, in order of size."""
    found: dict[Curve, list[BandwidthRow]] = {}
    for row in rows:
        found.setdefault((row.op, row.algorithm, row.links, row.num_ranks), []).append(row)
    return {key: sorted(each, key=lambda row: row.num_bytes) for key, each in found.items()}
