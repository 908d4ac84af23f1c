"""`paceline doctor`: look, judge, show."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.config.errors import InputError
from paceline.config.files import read_bytes
from paceline.doctor import readings, storage
from paceline.doctor.checks import GROUPS, examine
from paceline.doctor.checks.verdict import Check, Verdict
from paceline.doctor.facts import as_data, facts_of
from paceline.observe.run import Run
from paceline.render.table import Table

_COLOURS = {"problem": "bold red", "warning": "yellow", "ok": "green", "not checked": "dim"}
_CONSOLE = Console(highlight=False)


@dataclass(frozen=True)
class DoctorOptions:
    """The options of the command line."""

    folder: Path = Path()
    nccl_log: Path | None = None
    saved: Path | None = None
    save: Path | None = None
    run: Path | None = None


def doctor_command(asked: DoctorOptions) -> dict[str, Any]:
    """Examine this machine, or what another one said, and show it.

    Returns:
        "facts", "checks" (status, seen, fix by name), "problems" and "warnings" (how many).

    Raises:
        InputError: a file is not there or not what it should be.
    """
    run = None if asked.run is None else _run(asked.run)
    said = _said(asked)
    if asked.save is not None:
        readings.save(said, asked.save)
    facts = facts_of(said)
    verdicts = examine(facts)
    for group, checks in GROUPS.items():
        _CONSOLE.print(_shown(group, checks, verdicts))
    _CONSOLE.print(_summary(verdicts), markup=False)
    found = {
        "facts": as_data(facts),
        "checks": {name: asdict(verdict) for name, verdict in verdicts.items()},
        "problems": _count(verdicts, "problem"),
        "warnings": _count(verdicts, "warning"),
    }
    if run is not None:
        run.write_json("doctor.json", found)
    return found


def _run(path: Path) -> Run:
    run = Run(path)
    if not run.exists:
        raise InputError(f"--run {path} is no run: give a run's directory, as runs/demo.")
    return run


def _said(asked: DoctorOptions) -> dict[str, str]:
    """The readings, with what the options bring."""
    if asked.saved is not None:
        said = readings.saved(asked.saved)
    else:
        said = readings.here() | {"storage.json": storage.text(storage.measure(asked.folder))}
    if asked.nccl_log is not None:
        cure = "give as --nccl-log the output of a job that ran with NCCL_DEBUG=INFO"
        said["nccl.log"] = read_bytes(asked.nccl_log, cure, 1 << 30).decode(errors="replace")
    return said


def _shown(group: str, checks: Sequence[Check], verdicts: dict[str, Verdict]) -> Table:
    """What needs doing with its reason and fix, then what is well, then what wasn't checked."""
    rows = [
        (Text(status, colour), Text(names, "bold"), said)
        for status, colour in _COLOURS.items()
        for names, said in _lines(
            [check for check in checks if verdicts[check.name].status == status], verdicts
        )
    ]
    return Table(("", "", ""), rows, (0, 1, 2), title=group, ruled=True, widths=(11, 16))


def _lines(checks: Sequence[Check], verdicts: dict[str, Verdict]) -> Iterator[tuple[str, Text]]:
    """Names and text of rows; checks that were not made for one reason share theirs."""
    unmade: dict[str, list[str]] = {}
    for check in checks:
        verdict = verdicts[check.name]
        if verdict.status == "not checked":
            unmade.setdefault(verdict.seen, []).append(check.name)
            continue
        said = Text(verdict.seen)
        if verdict.fix:
            said.append(f"\nWhy: {check.why}.", style="dim")
            said.append(f"\nDo:  {verdict.fix}")
        yield check.name, said
    for reason, names in unmade.items():
        yield "\n".join(names), Text(reason)


def _summary(verdicts: dict[str, Verdict]) -> str:
    counted = {status: _count(verdicts, status) for status in _COLOURS}
    return (
        f"{len(verdicts)} checks: {counted['problem']} problems, {counted['warning']} warnings, "
        f"{counted['ok']} in order, {counted['not checked']} could not be looked at."
    )


def _count(verdicts: dict[str, Verdict], status: str) -> int:
    return sum(verdict.status == status for verdict in verdicts.values())
