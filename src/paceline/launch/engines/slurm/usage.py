"""What a job held, and for how long.

Slurm's accounting says it to the second. Where a site keeps none, the nodes' records do: they lack
what Slurm does before and after the command, about a second.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from pydantic import TypeAdapter

from paceline.config import files
from paceline.launch.contract import Attempt, Submitted
from paceline.launch.engines.slurm.job_state import JobState, Row
from paceline.launch.engines.slurm.script import SHAPE_FILE
from paceline.launch.node_records import NodeRecord, exit_code_of, recorded_attempts

_CURE = "launch the job again, since its folder is damaged"
# Slurm's numbers of jobs come again, after months; clocks of its machines differ by less.
_OLDER_JOB_S = 86_400.0


@dataclass(frozen=True)
class _Shape:
    """What stands beside the batch script."""

    devices_per_node: int


def attempts(
    job: Submitted,
    entries: Sequence[Row],
    records: Sequence[NodeRecord],
    now: JobState | None,
) -> tuple[Attempt, ...]:
    """Every attempt, the oldest first.

    One that went on without a lost node is two of the same number, each with its nodes.

    Args:
        entries: of Slurm's accounting; none: it keeps none, or has not heard of the job yet.
        records: of the nodes.
        now: as the controller knows it.

    Raises:
        InputError: the job's folder is damaged.
    """
    if not entries and not records and now is None:
        return ()
    shape = files.read_json(job.folder / SHAPE_FILE, TypeAdapter(_Shape), _CURE)
    submitted = (job.folder / SHAPE_FILE).stat().st_mtime
    of_job = [row for row in entries if row.submitted > submitted - _OLDER_JOB_S]
    by_number = {
        number: list(group) for number, group in groupby(records, lambda each: each.attempt)
    }
    codes = {number: exit_code_of(group) for number, group in by_number.items()}
    devices = shape.devices_per_node
    if not of_job:
        return tuple(_recorded(records, devices, submitted, now))
    rows = _caught_up(of_job, now)
    newest = max(by_number, default=1)
    if now is not None:
        newest = now.restarts + _is_current(rows[-1], now)
    held = list(_accounted(rows, newest, codes, devices))
    seen = {one.number for one in held}
    unseen = [record for record in records if record.attempt not in seen]
    held += [_in_seconds(one) for one in _recorded(unseen, devices, submitted, None)]
    return tuple(sorted(held, key=lambda one: (one.number, one.submitted)))


def _in_seconds(one: Attempt) -> Attempt:
    """One that was put back in the second of its submission: accounting has lost it, since it knows
    entries by that second."""
    submitted, started, ended = (
        None if time is None else math.floor(time)
        for time in (one.submitted, one.started, one.ended)
    )
    return replace(one, submitted=submitted or 0, started=started, ended=ended)


def _caught_up(rows: Sequence[Row], now: JobState | None) -> list[Row]:
    """With what the controller knows: accounting hears of it some seconds later."""
    known = list(rows)
    if now is None or now.word == "COMPLETING":
        return known
    start = None if now.word == "PENDING" else now.start
    seen = Row(now.word, now.exit_code, now.submitted, start, now.end, now.nodes, None)
    if not _is_current(known[-1], now):
        known.append(seen)
    elif known[-1].ended is None:
        held = known[-1].num_devices
        known[-1] = replace(seen, submitted=known[-1].submitted, num_devices=held)
    for at, (row, after) in enumerate(pairwise(known)):
        # Slurm gives what is left of a job after a change of size the end of the next attempt.
        if row.ended is None or row.ended > after.submitted:
            known[at] = replace(row, state="REQUEUED", ended=after.submitted)
    return known


def _is_current(row: Row, now: JobState) -> bool:
    """Whether an entry is of the attempt that the controller has now."""
    is_its_start = row.started is not None and row.started == now.start
    return row.submitted >= now.submitted or is_its_start


def _goes_on(before: Row, row: Row) -> bool:
    """Whether an entry is the rest of the one before, after a change of size: Slurm gives it the
    same start."""
    is_later = row.started is not None and before.ended is not None and row.started > before.ended
    return before.state == "RESIZING" and not is_later


def _accounted(
    rows: Sequence[Row], newest: int, codes: dict[int, int | None], devices: int
) -> Iterator[Attempt]:
    """The attempts of entries of which the last is the newest attempt's."""
    goes_on = [False, *(_goes_on(*pair) for pair in pairwise(rows))]
    number = max(1, newest - goes_on[1:].count(False))
    for at, row in enumerate(rows):
        number += at > 0 and not goes_on[at]
        held = len(row.nodes) * devices
        if row.num_devices is not None and not goes_on[at]:
            held = row.num_devices
        is_own_end = row.state in ("COMPLETED", "FAILED") and number not in codes
        code = row.exit_code if is_own_end else codes.get(number)
        yield Attempt(
            number,
            row.submitted,
            rows[at - 1].ended if goes_on[at] else row.started,
            row.ended,
            row.nodes,
            held if row.started is not None else 0,
            None if row.state == "RESIZING" else code,
            row.state,
        )


def _recorded(
    records: Sequence[NodeRecord], devices: int, submitted: float, now: JobState | None
) -> Iterator[Attempt]:
    words = {"finished": "COMPLETED", "lost": "NODE_FAIL"}
    for one in recorded_attempts(records, devices, submitted):
        is_now = now is not None and one.number == records[-1].attempt
        word = now.word if now is not None and is_now else words.get(one.state, "FAILED")
        yield replace(one, state=word)
        submitted = one.ended or one.started or submitted
    if now is not None and now.word == "PENDING":
        yield Attempt(now.restarts + 1, submitted, None, None, (), 0, None, now.word)
