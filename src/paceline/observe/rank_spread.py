"""What a line of metrics.jsonl says of each rank, and who is late: pure functions, no torch.

A line's `ranks` holds figures by name (FIGURES), each a list with one number a rank. Of many ranks
a line holds only what a person looks for: the least, the median, the largest and whose that is. A
list of thousands in every step would be most of the file.

Busy time is the time since the exchange of the step before, less what the rank waited for others
(`comm.busy_clock`). Its lag is by how much it exceeds that of a typical rank: so long do the others
wait. The stages of a pipeline differ by design, and so do their busy times.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median_low
from typing import Any

FIGURES = ("busy_s", "core_wait_s", "memory_bytes")
"""Seconds of a step at work, those ready to work and without a core (`machine.core_clock`), memory
held. Runs of an earlier version lack the second one."""
_MOST_LISTED = 64

Figure = list[float] | dict[str, float]


@dataclass(frozen=True)
class RankSpread:
    """One figure over the ranks."""

    least: float
    median: float
    """The lower one of two: of two ranks the other one is the typical one."""
    most: float
    at: int
    """The rank that has the most."""


def record_of_ranks(values: Sequence[float]) -> Figure:
    """A figure of all ranks as a line keeps it."""
    if len(values) <= _MOST_LISTED:
        return list(values)
    spread = _spread(values)
    return {"min": spread.least, "median": spread.median, "max": spread.most, "at": spread.at}


def spread_of(figure: Figure | None) -> RankSpread | None:
    """Least, median and most of a figure as a line keeps it; None where it has none."""
    if not figure:
        return None
    if isinstance(figure, dict):
        return RankSpread(figure["min"], figure["median"], figure["max"], int(figure["at"]))
    return _spread(figure)


def slowest_rank(figure: Figure | None) -> tuple[int, float] | None:
    """The rank that others wait for, and by how many seconds; None where it isn't known.

    Args:
        figure: "busy_s" of a line, or its mean over some.
    """
    spread = spread_of(figure)
    return None if spread is None else (spread.at, spread.most - spread.median)


def mean_figure(lines: Iterable[Mapping[str, Any]], name: str) -> Figure | None:
    """A figure of each rank over some steps: its mean; of many ranks what the last line says."""
    figures = [line["ranks"][name] for line in lines if name in (line.get("ranks") or {})]
    if not figures or isinstance(figures[-1], dict):
        return figures[-1] if figures else None
    same = [figure for figure in figures if len(figure) == len(figures[-1])]
    return [mean(of_rank) for of_rank in zip(*same, strict=True)]


def _spread(values: Sequence[float]) -> RankSpread:
    most = max(values)
    return RankSpread(min(values), median_low(values), most, values.index(most))
