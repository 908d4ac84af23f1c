"""Windows: all profiled windows of a Run as one Account.

A window has few steps, and what differs from step to step shows in many only. The newest windows
are read until there are enough bytes of them: traces of large jobs are long, and one window then
has thousands of collectives.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.account import Account
from paceline.observe.recorded import read_account

_WINDOW = re.compile(r"rank\d+-step(\d+)\.json(\.gz)?$")
_ENOUGH_BYTES = 32 << 20
# Columns that index `Account.names`.
_NAMED = ("name", "op", "group", "line", "members")


def read_windows(folder: Path, axis: str | None) -> Account | None:
    """The profiled steps of a Run's trace folder; None where it has no window.

    Raises:
        InputError: a trace is damaged.
    """
    windows: dict[int, list[Path]] = {}
    for file in sorted(folder.glob("rank*-step*.json*")):
        if found := _WINDOW.fullmatch(file.name):
            windows.setdefault(int(found[1]), []).append(file)
    most = max(map(len, windows.values()), default=0)
    read: list[Account] = []
    total = 0
    for step in sorted(windows, reverse=True):
        # A run that was stopped leaves some ranks' traces of its last window.
        if len(windows[step]) == most and (not read or total < _ENOUGH_BYTES):
            read.append(read_account(windows[step], axis))
            total += sum(file.stat().st_size for file in windows[step])
    return joined(read[::-1]) if read else None


def joined(accounts: Sequence[Account]) -> Account:
    """Accounts of different steps of the same ranks, as one."""
    first, *others = accounts
    names = {name: at for at, name in enumerate(first.names)}
    tables = {field: [getattr(first, field)] for field in _TABLES}
    for account in others:
        number = np.array([names.setdefault(name, len(names)) for name in account.names], np.int64)
        for field in _TABLES:
            tables[field].append(_renumbered(getattr(account, field), number))
    whole: dict[str, Any] = {field: np.concatenate(parts) for field, parts in tables.items()}
    order = np.argsort(whole["steps"], order=["rank", "step"], kind="stable")
    whole["steps"] = whole["steps"][order]
    whole["terms_ns"] = whole["terms_ns"][order]
    if len(whole["launch_delays_ns"]):
        whole["launch_delays_ns"] = whole["launch_delays_ns"][order]
    return replace(first, names=tuple(names), clocks=accounts[-1].clocks, **whole)


_TABLES = (
    *("steps", "terms_ns", "kernels", "collectives", "gaps", "syncs", "path"),
    "launch_delays_ns",
)


def _renumbered(table: npt.NDArray[Any], number: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The table with names as they are numbered in another list; -1 stays."""
    result = table.copy()
    for column in set(_NAMED) & set(table.dtype.names or ()):
        known = table[column] >= 0
        result[column][known] = number[table[column][known]]
    return result
