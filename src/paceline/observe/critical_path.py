"""The critical path of a step through its ranks: whose time it was that the step took.

Walking back from the end of the rank that ended last: its time counts, until the moment at which
it had waited for another rank to come to a collective. From there on it was that rank's time that
counts, and so on to the beginning. What stands on the path would have to become shorter for the
step to; what doesn't, needn't.

The idea is that of critical-path analysis of message-passing programs: C.-Q. Yang and B. P. Miller,
https://doi.org/10.1109/DCS.1988.12538.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.accounting import Owners
from paceline.observe.terms import TERMS

_Array = npt.NDArray[Any]

PATH = np.dtype([("step", "i8"), ("rank", "i4"), ("term", "i1"), ("duration_ns", "i8")])


def critical_path(
    steps: _Array, lines: Mapping[int, Owners], waits: _Array, last: _Array
) -> _Array:
    """Return what each step's length consists of.

    Args:
        steps: dtype `timeline.STEP`, on one clock.
        lines: of each rank, which term its time belongs to, on the same clock.
        waits: rows with `rank`, `start_ns` and `end_ns`: when a rank waited for another one.
        last: the rank that each of those waited for.

    Returns:
        dtype PATH; the rows of a step sum to the time from where its path begins to its end.
    """
    rows = []
    for step in np.unique(steps["step"]).tolist():
        mine = steps[steps["step"] == step]
        spent: dict[int, _Array] = {}
        for rank, start, end in _way_back(mine, waits, last):
            row = spent.setdefault(rank, np.zeros(len(TERMS), np.int64))
            row += lines[rank].within(start, end)
        rows += [
            (step, rank, term, ns)
            for rank, row in sorted(spent.items())
            for term, ns in enumerate(row.tolist())
            if ns
        ]
    return np.array(rows, PATH)


def _way_back(steps: _Array, waits: _Array, last: _Array) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, end) of the path through one step, from its end to its beginning."""
    begins = {int(row["rank"]): int(row["start_ns"]) for row in steps}
    at = int(steps["end_ns"].max())
    rank = int(steps["rank"][np.argmax(steps["end_ns"])])
    order = np.argsort(waits["end_ns"], kind="stable")
    waits, last = waits[order], last[order]
    while True:
        mine = np.flatnonzero((waits["rank"] == rank) & (waits["end_ns"] < at))
        since = int(waits["end_ns"][mine[-1]]) if len(mine) else -1
        start = begins[rank]
        if since <= start or int(last[mine[-1]]) not in begins:
            yield rank, start, max(at, start)
            return
        yield rank, since, at
        rank, at = int(last[mine[-1]]), since
