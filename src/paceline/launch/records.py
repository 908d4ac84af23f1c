"""What stands in a Run directory of its launches: runs/<name>/launch/<k>/, k from 1.

request.json    what was asked of which site, with which code and which expectations
job.toml        the Job, where one was launched and not a script
code.patch      what was not committed
id              the engine's; a folder without it was never submitted
log/, nodes/    what the start script writes (`launch.start_script`); the engine's files besides
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import (
    ID_FILE,
    Engine,
    Observation,
    Request,
    SilentError,
    Submitted,
)
from paceline.launch.engines import engine_named
from paceline.observe.run import Run

T = TypeVar("T")

REQUEST, JOB, PATCH = "request.json", "job.toml", "code.patch"
LIVE = ("queued", "running")
_NUMBER = re.compile(r"[1-9]\d{0,8}")
_MOST_ID_BYTES = 4096


@dataclass(frozen=True)
class LaunchRecord:
    """One launch, as it was asked for."""

    time: float
    """When, Unix seconds."""
    site_name: str
    site: Site
    request: Request
    commit: str = ""
    """Of the project; "": it is in no repository."""
    uncommitted: tuple[str, ...] = ()
    """Files that differed from it; their difference is in code.patch."""
    run_s: float | None = None
    """Predicted, from its start to its end."""
    usd: float | None = None
    """Predicted."""
    trial: Mapping[str, Any] = field(default_factory=dict)
    """Of a trial of a sweep: the settings in which it differs from the sweep's Job."""


RECORD_TYPE = TypeAdapter(LaunchRecord)


@dataclass(frozen=True)
class Launch:
    """One launch that was submitted."""

    run: Path
    number: int
    record: LaunchRecord
    job: Submitted

    @property
    def engine(self) -> Engine:
        """Which has it."""
        return engine_named(self.record.site.engine)

    def observe(self) -> Observation:
        """How it stands.

        Raises:
            InputError: the engine can't say.
        """
        return self.engine.observe(self.job)


class Engines:
    """The engines of many launches: one that does not answer is waited for once, not at each."""

    def __init__(self) -> None:
        self._silent: dict[str, SilentError] = {}

    def ask(self, launch: Launch, question: Callable[[Launch], T]) -> T:
        """What an engine says of a launch.

        Raises:
            InputError: it can't say.
        """
        site = launch.record.site_name
        if site in self._silent:
            raise self._silent[site]
        try:
            return question(launch)
        except SilentError as error:
            self._silent[site] = error
            raise


def launches_of(run: Path) -> list[Launch]:
    """Those of a Run directory, the oldest first; none where nothing was launched.

    Raises:
        InputError: a record is damaged.
    """
    return [_launch(run, number) for number in submitted_numbers(run)]


def launches_of_each(runs: Path) -> tuple[list[list[Launch]], list[str]]:
    """Of each Run directory that has launches, the oldest first; and a sentence for each that has a
    damaged record instead: the others are no worse for it."""
    found, damaged = [], []
    for run in launched_runs(runs):
        try:
            found.append(launches_of(run))
        except InputError as error:
            damaged.append(f"{run.name} is left out: {error}")
    return found, damaged


def newest_launch(run: Path) -> Launch:
    """The newest one of a Run directory.

    Raises:
        InputError: nothing was launched there, or its record is damaged.
    """
    found = launches_of(run)
    if not found:
        raise InputError(f"{run} was not launched: give a run of `paceline jobs`.")
    return found[-1]


def launch_numbers(run: Path) -> Iterator[int]:
    """Of all folders, also of what was never submitted."""
    folder = Run(run).launch_folder
    if folder.is_dir():
        yield from (int(one.name) for one in folder.iterdir() if _NUMBER.fullmatch(one.name))


def submitted_numbers(run: Path) -> list[int]:
    """Of what an engine took, from the oldest."""
    folder = Run(run).launch_folder
    return [one for one in sorted(launch_numbers(run)) if (folder / str(one) / ID_FILE).is_file()]


def launched_runs(runs: Path) -> list[Path]:
    """Run directories with launches of their name, by name. One that a script made links to the
    script's."""
    if not runs.is_dir():
        return []

    def is_launched(run: Path) -> bool:
        folder = Run(run).launch_folder
        return any(not (folder / str(number)).is_symlink() for number in launch_numbers(run))

    return sorted(filter(is_launched, runs.iterdir()))


def _launch(run: Path, number: int) -> Launch:
    folder = (Run(run).launch_folder / str(number)).absolute()
    cure = "put back a copy of it, or remove the folder"
    record = files.read_json(folder / REQUEST, RECORD_TYPE, cure)
    name = files.read_text(folder / ID_FILE, cure, _MOST_ID_BYTES).strip()
    return Launch(run, number, record, Submitted(name, folder))
