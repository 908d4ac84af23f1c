"""What `paceline validate` does between its options and its tables."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.config.errors import InputError
from paceline.published import PublishedRun, read_runs
from paceline.published.validate.page import write_page
from paceline.published.validate.table import show
from paceline.published.validate.validate import Calibration, Progress, Report, summary, validate

_QUIET_S = 2.0
_EVERY_S = 1.0


def validate_command(
    tables: Sequence[Path],
    calibrate_on: str | None = None,
    only: str | None = None,
    seed: int = 0,
    html: Path | None = None,
    as_json: bool = False,
) -> Report:
    """Predict the runs of some tables, and print how wrong the planner is.

    Raises:
        InputError: a table, an option or a cell of a table is wrong.
    """
    calibration = Calibration.parse(calibrate_on, seed) if calibrate_on else Calibration()
    runs = _only(read_runs(tables), only)
    console = Console(stderr=as_json)
    report = validate(runs, calibration, _progress())
    show(report, console)
    if html is not None:
        write_page(report, html)
        console.print(f"{html}: the same as a page, with every line as a point")
    if as_json:
        print(json.dumps(summary(report)))
    return report


def _only(runs: list[PublishedRun], word: str | None) -> list[PublishedRun]:
    """The lines of the sources that a word occurs in."""
    if word is None:
        return runs
    chosen = [run for run in runs if word.lower() in run.group.lower()]
    if not chosen:
        groups = ", ".join(sorted({run.group for run in runs}))
        raise InputError(f"--only {word!r} fits no source of these tables; they have {groups}.")
    return chosen


def _progress() -> Progress:
    """One line on a terminal, once the work has taken a moment; nothing anywhere else."""
    started = last = time.monotonic()

    def tell(what: str, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - started < _QUIET_S or not sys.stderr.isatty():
            return
        if share >= 1.0:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - last >= _EVERY_S:
            last = now
            print(f"\r\x1b[K{what} {share:.0%}", end="", file=sys.stderr, flush=True)

    return tell
