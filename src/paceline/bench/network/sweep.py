"""Sweep: every collective by size, group and algorithm, within bounds of time and memory.

How it works: as `paceline bench` does (`bench.collectives`): all groups of a kind at once, each
result checked before its time is taken. Where a kind has several groups, one of them is measured
alone as well: the quotient is what groups take from each other. On CPU ranks our own algorithms
(`comm.algorithms`) are measured beside the backend's; NCCL has its own in the devices' kernels.

Each curve gets an equal part of the time that is left, and two sizes in any case. A size that would
not fit is left out together with the larger ones; what the last two took says how long it would
last. All ranks decide alike, from figures that all of them have.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import NamedTuple

from paceline.bench.clock import Call, RankTimer
from paceline.bench.collectives import OPS, Group, checked_exchange, tier_of
from paceline.bench.network.bandwidth import BandwidthRow, by_curve
from paceline.bench.network.sizes import Bounds
from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.algorithms import OPS as REDUCING
from paceline.config.curves import CollectiveCurve
from paceline.config.hardware import Tier

Say = Callable[[str], None]
_ITEM_BYTES = 4
# Calls before the blocks of a size: its check, and those that warm up and are counted.
_CALLS_BEFORE = 4


class PlannedCurve(NamedTuple):
    """A curve to measure."""

    op: str
    algorithm: str
    group: Group

    @property
    def name(self) -> str:
        """As the Cluster's curves are named."""
        return self.op if self.algorithm == "backend" else f"{self.op}.{self.algorithm}"


@dataclass(frozen=True)
class SkippedSizes:
    """Sizes that were left out of a curve."""

    name: str
    num_ranks: int
    above_bytes: int
    """The largest size that was measured, 0 for none."""
    reason: str
    """memory or time."""


def planned(groups: Sequence[Group], device_type: str) -> list[PlannedCurve]:
    """The curves that apply: the backend's first, so that they get the time, then ours."""
    pairs = [(group, op) for group in groups for op in OPS]
    backends = [PlannedCurve(op, "backend", group) for group, op in pairs]
    ours = [
        PlannedCurve(op, algorithm, group)
        for group, op in pairs
        for algorithm in _ours(op, group, device_type)
    ]
    return [*backends, *ours]


def _ours(op: str, group: Group, device_type: str) -> Iterator[str]:
    if device_type != "cpu" or op not in REDUCING:
        return
    for algorithm in ALGORITHMS[op]:
        if algorithm != "hierarchical" or 1 < group.ranks_per_node < group.num_ranks:
            yield algorithm


def sweep(
    clock: RankTimer, curves: Sequence[PlannedCurve], bounds: Bounds, say: Say
) -> tuple[list[BandwidthRow], list[SkippedSizes]]:
    """Measure the curves; every rank must call it and gets the same.

    Args:
        clock: measures.
        curves: of `planned`.
        bounds: sizes, time and memory.
        say: called once for each curve.

    Raises:
        RunError: a collective gave a wrong result.
    """
    began, rows, left = time.monotonic(), list[BandwidthRow](), list[SkippedSizes]()
    for index, each in enumerate(curves):
        remaining_s = bounds.seconds - clock.most(time.monotonic() - began)
        until_s = max(0.0, remaining_s) / (len(curves) - index)
        found, reason = _curve(clock, each, bounds, until_s)
        rows += found
        if reason:
            most = max((row.num_bytes for row in found), default=0)
            left.append(SkippedSizes(each.name, each.group.num_ranks, most, reason))
        say(f"{each.name} of {each.group.num_ranks} ranks")
    return rows, left


def _curve(
    clock: RankTimer, planned_: PlannedCurve, bounds: Bounds, limit_s: float
) -> tuple[list[BandwidthRow], str]:
    """Rows by size, and why there are no more ("" if there are all)."""
    began, rows = time.monotonic(), list[BandwidthRow]()
    for size in bounds.sizes:
        if size > bounds.largest_bytes:
            return rows, "memory"
        spent_s = clock.most(time.monotonic() - began)
        if len(rows) > 1 and spent_s + expected_s(clock, rows, size) > limit_s:
            return rows, "time"
        rows.append(_row(clock, planned_, size))
    return rows, ""


def expected_s(clock: RankTimer, rows: Sequence[BandwidthRow], num_bytes: int) -> float:
    """How long a size will be looked at, by the last two of its curve."""
    before, last = rows[-2:]
    slope = (last.seconds - before.seconds) / (last.num_bytes - before.num_bytes)
    call_s = last.seconds + (num_bytes - last.num_bytes) * max(0.0, slope)
    times = 2 if last.alone_s is not None else 1
    return times * (clock.num_blocks * max(clock.block_s, call_s) + _CALLS_BEFORE * call_s)


def _row(clock: RankTimer, each: PlannedCurve, wanted_bytes: int) -> BandwidthRow:
    op, algorithm, group = each
    length = max(1, wanted_bytes // (_ITEM_BYTES * group.num_ranks))
    call = checked_exchange(op, group, length, clock.ranks.device, algorithm)
    seconds, low_s, high_s = _agreed(clock, clock.blocks(call))
    return BandwidthRow(
        op,
        algorithm,
        links_of(group),
        group.num_ranks,
        length * group.num_ranks * _ITEM_BYTES,
        seconds,
        low_s,
        high_s,
        _alone_s(clock, group, call) if algorithm == "backend" else None,
    )


def links_of(group: Group) -> str:
    """What the ranks of a group meet."""
    if not group.across:
        return "inside"
    return "across" if group.ranks_per_node == 1 else "both"


def _agreed(clock: RankTimer, blocks: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile; of each the mean over ranks."""
    tenths = quantiles(blocks, n=10, method="inclusive")
    low, middle, high = (clock.mean(tenths[at]) for at in (0, 4, 8))
    return middle, low, high


def _alone_s(clock: RankTimer, group: Group, call: Call) -> float | None:
    """Seconds while only the group of rank 0 works, None where there is no other."""
    if group.num_ranks == clock.ranks.world_size:
        return None
    works = group.has_first
    blocks = clock.blocks(call if works else lambda: None)
    middle = quantiles(blocks, n=10, method="inclusive")[4] if works else 0.0
    return clock.mean(middle) * clock.ranks.world_size / group.num_ranks


def tiers_from(
    rows: Sequence[BandwidthRow],
    device_type: str,
    ranks_per_node: int,
    world_size: int,
    source: str,
) -> tuple[Tier, ...]:
    """The links with their curves, for a Cluster; the planner reads our algorithms' there too.

    Groups with several ranks on each of several nodes are composed by the planner: their rows stand
    in the table only.
    """
    inside = "loopback" if device_type == "cpu" else "node"
    tiers = []
    for name, links, num_devices in (
        (inside, "inside", ranks_per_node),
        ("network", "across", world_size),
    ):
        curves: dict[str, tuple[CollectiveCurve, ...]] = {}
        for (op, algorithm, where, num_ranks), of_curve in by_curve(rows).items():
            if where == links:
                key = op if algorithm == "backend" else f"{op}.{algorithm}"
                curves[key] = (*curves.get(key, ()), _as_curve(num_ranks, of_curve, source))
        if curves:
            tiers.append(tier_of(name, num_devices, curves, source))
    return tuple(tiers)


def _as_curve(num_ranks: int, rows: Sequence[BandwidthRow], source: str) -> CollectiveCurve:
    return CollectiveCurve(
        num_ranks=num_ranks,
        bytes=tuple(float(row.num_bytes) for row in rows),
        seconds=tuple(row.seconds for row in rows),
        source=source,
    )
