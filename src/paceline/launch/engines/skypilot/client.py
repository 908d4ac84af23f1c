"""Asking SkyPilot through the person's own `sky`: her clouds and credentials count.

Jobs are known by their names, which are one of a kind. Source of options and output: `sky jobs` of
SkyPilot 0.14.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from paceline.config.errors import InputError
from paceline.launch.contract import SilentError
from paceline.launch.engines.skypilot.task import TASK

_ASK_S, _LAUNCH_S = 120.0, 1800.0
"""How long an answer may take. The first launch of all rents a machine that keeps jobs."""
_LAST_LINES = 5
_NO_JOBS = "No in-progress managed jobs"
"""As which `sky jobs queue` fails where there is none."""


@dataclass(frozen=True)
class ManagedJob:
    """A row of `sky jobs queue`."""

    status: str
    job_name: str | None = None
    schedule_state: str | None = None
    details: str | None = None
    failure_reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing follows any more."""
        return self.status in ("SUCCEEDED", "CANCELLED") or self.status.startswith("FAILED")

    @property
    def said(self) -> str:
        """SkyPilot's own words for how it stands."""
        more = self.failure_reason or self.details
        return f"{self.status}: {more}" if more else self.status


_QUEUE = TypeAdapter(list[ManagedJob])


def launch(name: str, folder: Path) -> None:
    """Hand over the task of a folder as a job.

    Raises:
        InputError: SkyPilot refuses it, or is silent.
    """
    words = ("jobs", "launch", "--yes", "--detach-run", "--name", name, TASK)
    _printed(_run(*words, at=folder, limit_s=_LAUNCH_S))


def job_named(name: str) -> ManagedJob | None:
    """The job of a name; None: there is none.

    Raises:
        InputError: SkyPilot is silent, or says what is no queue.
    """
    done = _run("jobs", "queue", "--verbose", "--all", "--output", "json")
    if done.returncode and _NO_JOBS in done.stderr:
        return None
    said = _printed(done)
    # What it says of itself, such as that a newer one is out, may stand before.
    begin = max(said.find("\n[") + 1, 0) if not said.startswith("[") else 0
    try:
        rows = _QUEUE.validate_python(json.JSONDecoder().raw_decode(said[begin:])[0])
    except (ValueError, ValidationError):
        raise InputError(
            f"`sky jobs queue --output json` says {said[:80]!r}, which is no list of jobs: "
            "install SkyPilot 0.14 or a later one."
        ) from None
    return next((row for row in rows if row.job_name == name), None)


def cancel(name: str) -> None:
    """Give up the machines of a job at once.

    Raises:
        InputError: SkyPilot refuses it, or is silent.
    """
    _sky("jobs", "cancel", "--yes", "--name", name)


def controller_log(name: str) -> tuple[str, ...]:
    """The last lines of how SkyPilot fared with a job.

    Raises:
        InputError: SkyPilot refuses it, or is silent.
    """
    said = _sky("jobs", "logs", "--controller", "--no-follow", "--tail", "50", "--name", name)
    lines = [line.strip() for line in said.splitlines()]
    return tuple([line for line in lines if line][-_LAST_LINES:])


def _sky(*words: str) -> str:
    return _printed(_run(*words))


def _run(
    *words: str, at: Path | None = None, limit_s: float = _ASK_S
) -> subprocess.CompletedProcess[str]:
    program = shutil.which("sky")
    if program is None:
        raise InputError(
            "there is no sky here: install SkyPilot (pip install 'skypilot[aws]', or your "
            "cloud's), and see that `sky check` finds your cloud."
        )
    try:
        return subprocess.run(
            [program, *words],
            cwd=at,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SilentError(
            f"sky gave no answer within {limit_s:.0f} s: see that `sky jobs queue` works."
        ) from None


def _printed(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    last = said[-1].strip().rstrip(".") if said else f"exit code {done.returncode}"
    raise InputError(
        f"SkyPilot says {last[:300]!r}: see that `sky check` finds your cloud, and change the job "
        "or the site."
    )
