"""Which collectives of several ranks are one and the same, and who came last to each.

The ranks of a group start its collectives in the same order. So the n-th all-reduce of a step over
a group is one collective for all of its ranks. Where a trace doesn't say which ranks take part,
nothing is matched.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]

# Collectives that no rank leaves before all have come.
SYNCHRONISING = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "dispatch",
    "combine",
)

MEETING = np.dtype(
    [
        ("row", "i8"),  # of the table of collectives
        ("rank", "i4"),
        ("step", "i8"),
        ("meeting", "i8"),  # the same for all ranks of one collective
        ("start_ns", "i8"),
        ("end_ns", "i8"),
    ]
)


def match(collectives: _Array, names: tuple[str, ...]) -> _Array:
    """Return the rows of synchronising collectives that several recorded ranks took part in.

    Args:
        collectives: dtype `account.COLLECTIVE`, of several ranks.
        names: that it indexes.

    Returns:
        dtype MEETING, in order of meeting.
    """
    ids = [number for number, name in enumerate(names) if name in SYNCHRONISING]
    rows = np.flatnonzero(np.isin(collectives["name"], ids) & (collectives["members"] >= 0))
    rows = rows[np.argsort(collectives["start_ns"][rows], kind="stable")]
    found = collectives[rows]
    kind = _code(found["step"], found["members"], found["name"])
    nth = _nth(_code(kind, found["rank"]))
    table = np.empty(len(rows), MEETING)
    table["row"], table["meeting"] = rows, _code(kind, nth)
    table["rank"], table["step"] = found["rank"], found["step"]
    table["start_ns"] = found["start_ns"]
    table["end_ns"] = found["start_ns"] + found["duration_ns"]
    table = table[np.argsort(table["meeting"], kind="stable")]
    counts = np.bincount(table["meeting"], minlength=1)
    return table[counts[table["meeting"]] > 1]


def arrivals(meetings: _Array) -> tuple[_Array, _Array]:
    """Return, for each row, when the last rank came to its meeting, and which rank that was."""
    order = np.lexsort((meetings["start_ns"], meetings["meeting"]))
    ordered = meetings[order]
    last = np.append(ordered["meeting"][1:] != ordered["meeting"][:-1], True)[: len(order)]
    group = np.cumsum(last) - last
    when, who = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    when[order] = ordered["start_ns"][last][group]
    who[order] = ordered["rank"][last][group]
    return when, who


def _code(*keys: _Array) -> _Array:
    """Number the combinations of some columns, from 0."""
    code = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        _, number = np.unique(key, return_inverse=True)
        code = code * (int(number.max(initial=0)) + 1) + number
    return np.unique(code, return_inverse=True)[1]


def _nth(kind: _Array) -> _Array:
    """Return of each row how many of its kind stand before it."""
    order = np.argsort(kind, kind="stable")
    first = np.searchsorted(kind[order], kind[order], "left")
    nth = np.empty(len(kind), np.int64)
    nth[order] = np.arange(len(kind)) - first
    return nth
