"""Read an Account of traces: which files there are, and the ranks brought together."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe.account import COLLECTIVE, GAP, KERNEL, SYNC, Account
from paceline.observe.accounting import Owners, complement, intersection, owners, union
from paceline.observe.caveats import Caveat, joined
from paceline.observe.clocks import ClockOffset, align
from paceline.observe.critical_path import critical_path
from paceline.observe.kineto.read import read_recording
from paceline.observe.kineto.spans import timeline_of
from paceline.observe.meetings import arrivals, match
from paceline.observe.origin import Origin, exchanged, require_one_job
from paceline.observe.tables.collectives import collectives
from paceline.observe.tables.gaps import gaps, syncs
from paceline.observe.tables.kernels import kernels, launch_delays
from paceline.observe.tables.names import Names
from paceline.observe.terms import EXPOSED_IDS, TERM_ID, TERMS
from paceline.observe.timeline import STEP

_Array = npt.NDArray[Any]
# As our profiler names its windows.
_WINDOW = re.compile(r"rank(\d+)-step(\d+)\.json")
_OUR_PREDICTION = "predicted"


@dataclass(frozen=True, eq=False)
class _Part:
    """What is kept of one rank's trace."""

    origin: Origin
    host_name: str | None
    is_device: bool
    steps: _Array
    owners: Owners
    kernels: _Array
    collectives: _Array
    gaps: _Array
    syncs: _Array
    delays_ns: _Array
    caveats: tuple[Caveat, ...]

    @property
    def rank(self) -> int:
        """Whose trace it is."""
        return self.origin.rank


def read_account(paths: Path | Sequence[Path], axis: str | None = None) -> Account:
    """Read traces: a file, several (one per rank), or a folder of them.

    Args:
        paths: of one window of steps; of a folder with several windows the last one counts.
        axis: the mesh axis of collectives whose group doesn't tell theirs.

    Raises:
        InputError: nothing there is a trace, or one is damaged.
    """
    names = Names()
    parts = [_part(path, names, axis) for path in trace_files(paths)]
    parts.sort(key=lambda part: part.rank)
    require_one_job([part.origin for part in parts])
    account = _joined(parts, names)
    return account if len(parts) < 2 else _together(account, parts)


def _joined(parts: list[_Part], names: Names) -> Account:
    """Put the tables of ranks one after another, each rank on its own clock."""

    def table(field: str, dtype: Any) -> _Array:
        return np.concatenate([np.empty(0, dtype), *(getattr(part, field) for part in parts)])

    return Account(
        any(part.is_device for part in parts),
        table("steps", STEP),
        np.concatenate([_terms(part.owners, part.steps) for part in parts]),
        table("kernels", KERNEL),
        table("collectives", COLLECTIVE),
        table("gaps", GAP),
        table("syncs", SYNC),
        tuple(names),
        launch_delays_ns=table("delays_ns", np.int64),
        caveats=joined(caveat for part in parts for caveat in part.caveats),
        devices={part.rank: part.origin.device for part in parts if part.origin.device is not None},
    )


def _terms(line: Owners, steps: _Array) -> _Array:
    rows = [line.within(start, end) for _, _, start, end in steps.tolist()]
    return np.array(rows, np.int64).reshape(-1, len(TERMS))


def _together(account: Account, parts: list[_Part]) -> Account:
    """Bring the ranks' clocks together, and tell waiting for a rank from communication."""
    meetings = match(account.collectives, account.names)
    clocks = align(meetings, {part.rank: part.host_name for part in parts})
    steps, collectives, gaps, syncs = (
        _shifted(table, clocks)
        for table in (account.steps, account.collectives, account.gaps, account.syncs)
    )
    meetings = match(collectives, account.names)
    came, last = arrivals(meetings)
    waits = np.clip(came, meetings["start_ns"], meetings["end_ns"]) - meetings["start_ns"]
    collectives["wait_ns"][meetings["row"]] = waits
    lines = {
        part.rank: _with_stragglers(
            part.owners.shifted(clocks[part.rank].offset_ns),
            collectives[collectives["rank"] == part.rank],
        )
        for part in parts
    }
    terms = [_terms(lines[part.rank], steps[steps["rank"] == part.rank]) for part in parts]
    exposed = _waits_that_count(meetings, waits, last, lines)
    return replace(
        account,
        steps=steps,
        terms_ns=np.concatenate(terms),
        collectives=collectives,
        gaps=gaps,
        syncs=syncs,
        clocks=clocks,
        path=critical_path(steps, lines, *exposed),
    )


def _with_stragglers(line: Owners, collectives: _Array) -> Owners:
    """Call the exposed time in which nothing could be sent yet a wait for the last rank."""
    start = collectives["start_ns"]
    came, end = start + collectives["wait_ns"], start + collectives["duration_ns"]
    waiting, sending = union(start, came), union(came, end)
    if not len(waiting.starts):
        return line
    idle = complement(sending, int(start.min()), int(end.max()))
    return line.give(intersection(waiting, idle), EXPOSED_IDS, TERM_ID["straggler_wait"])


def _waits_that_count(
    meetings: _Array, waits: _Array, last: _Array, lines: Mapping[int, Owners]
) -> tuple[_Array, _Array]:
    """Return the waits that a rank's step was longer for, and who was waited for."""
    late = TERM_ID["straggler_wait"]
    chosen = [
        index
        for index in np.flatnonzero((waits > 0) & (meetings["rank"] != last)).tolist()
        if lines[int(meetings["rank"][index])].within(
            int(meetings["start_ns"][index]), int(meetings["start_ns"][index] + waits[index])
        )[late]
    ]
    found = meetings[chosen]
    found["end_ns"] = found["start_ns"] + waits[chosen]
    return found, last[chosen]


def _shifted(table: _Array, clocks: Mapping[int, ClockOffset]) -> _Array:
    """Return a table on the first rank's clock."""
    result = table.copy()
    for rank, clock in clocks.items():
        for field in ("start_ns", "end_ns"):
            if field in (table.dtype.names or ()):
                result[field][table["rank"] == rank] += clock.offset_ns
    return result


def _part(path: Path, names: Names, axis: str | None) -> _Part:
    recording = read_recording(path, rank_in(path), axis)
    steps, met = recording.windows, collectives(recording, names)
    return _Part(
        Origin(
            path,
            recording.rank,
            recording.trace.about.get("distributedInfo") or {},
            recording.device_properties,
            steps,
            exchanged(met, tuple(names), len(steps)),
        ),
        recording.host_name,
        recording.pieces is None,
        steps,
        owners(timeline_of(recording), recording.rank),
        kernels(recording, names),
        met,
        gaps(recording, names),
        syncs(recording, names),
        launch_delays(recording),
        recording.caveats,
    )


def trace_files(paths: Path | Sequence[Path]) -> list[Path]:
    """Return the trace files: of a folder, those of its last window."""
    if not isinstance(paths, (str, Path)):
        return [Path(path) for path in paths]
    path = Path(paths)
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.iterdir()
        if file.name.endswith((".json", ".json.gz")) and not file.name.startswith(_OUR_PREDICTION)
    )
    if not found:
        raise InputError(
            f"{path} has no trace (.json or .json.gz); give a folder with one trace of each rank."
        )
    windows = {file: int(match[2]) for file in found if (match := _WINDOW.match(file.name))}
    last = max(windows.values(), default=None)
    return [file for file in found if windows.get(file) == last] if windows else found


def rank_in(path: Path) -> int | None:
    """Return the rank that our profiler put into a file's name; foreign traces say it inside."""
    match = _WINDOW.match(path.name)
    return int(match[1]) if match else None
