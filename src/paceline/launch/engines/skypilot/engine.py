"""The engine: see the package."""

import shlex
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paceline.config import files
from paceline.config.errors import EXIT_SAVED, InputError
from paceline.config.site import Site
from paceline.launch.contract import (
    ID_FILE,
    Attempt,
    Observation,
    Reason,
    Rendered,
    Request,
    State,
    Submitted,
    Wish,
)
from paceline.launch.engines.skypilot.client import (
    ManagedJob,
    cancel,
    controller_log,
    job_named,
    launch,
)
from paceline.launch.engines.skypilot.node_script import ATTEMPTS, NODES, SAVE, STOPPED
from paceline.launch.engines.skypilot.task import PLACE_FILE, TASK, probe_task, rendered
from paceline.launch.job_folder import job_folder, job_name
from paceline.launch.node_records import whole_attempts
from paceline.launch.start_script import LOG_FOLDER
from paceline.observe.run import write_atomic

_CURE = "launch the job again, since its folder is damaged"
_PROBE_S, _LOOK_S = 1800.0, 2.0
_WAITS: Mapping[str, Reason] = {
    "PENDING": "limit",
    "SUBMITTED": "starting",
    "STARTING": "starting",
    "RECOVERING": "requeued",
}
"""Why a job has no machines, by SkyPilot's status. PENDING: so many jobs are managed at once."""
_NO_CAPACITY = "ALIVE_BACKOFF"


@dataclass(frozen=True)
class _Place:
    """What stands in PLACE_FILE."""

    num_nodes: int
    devices_per_node: int


class SkyPilotEngine:
    """See `paceline.launch.contract.Engine`."""

    @property
    def name(self) -> str:
        """As sites call it."""
        return "skypilot"

    def render(self, request: Request, site: Site) -> Rendered:
        """The task, and the scripts of a machine."""
        return rendered(request, site)

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """Nobody knows where machines are to be had."""
        return None

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """The id is written first, since the name is known: a submission that dies leaves nothing
        that nobody knows of."""
        folder, name = request.folder, job_name(request)
        with job_folder(request, rendered):
            write_atomic(folder / ID_FILE, name)
            launch(name, folder)
        return Submitted(name, folder)

    def observe(self, job: Submitted) -> Observation:
        """By SkyPilot's queue, and what its machines wrote."""
        row, number = job_named(job.id), _newest(job.folder)[0]
        if row is None or row.is_over:
            return self._over(job, row, number)
        if row.status in _WAITS:
            no_room = row.schedule_state == _NO_CAPACITY
            reason = "resources" if no_room else _WAITS[row.status]
            return Observation("queued", reason, row.said, (), number)
        known = self.usage(job)
        if not known:
            return Observation("queued", "starting", "its machines are set up", (), number)
        nodes = () if known[-1].ended is not None else _nodes(job.folder)
        return Observation("running", None, row.said, nodes, number)

    def _over(self, job: Submitted, row: ManagedJob | None, number: int) -> Observation:
        known = self.usage(job)
        code = known[-1].exit_code if known else None
        if (job.folder / STOPPED).exists():
            return Observation("cancelled", attempt=number, exit_code=code)
        if row is None:
            return Observation("lost", said="SkyPilot has no job of this name", attempt=number)
        states: dict[str, State] = {"SUCCEEDED": "finished", "CANCELLED": "cancelled"}
        is_saved = row.status == "FAILED" and code == EXIT_SAVED
        ended: State = "saved" if is_saved else "failed"
        return Observation(states.get(row.status, ended), None, row.said, (), number, code)

    def signal(self, job: Submitted, wish: Wish) -> None:
        """Machines look into the job's folder: SkyPilot itself would take them away at once."""
        row = job_named(job.id)
        if row is None or row.is_over:
            return
        if wish == "save":
            if (newest := _newest(job.folder)[1]) is not None:
                (newest / SAVE).touch()
            return
        mark = job.folder / STOPPED
        mark.touch()
        if row.status != "RUNNING":
            try:
                cancel(job.id)
            except InputError:
                mark.unlink(missing_ok=True)
                raise

    def logs(self, job: Submitted) -> tuple[Path, ...]:
        """One file for each attempt and machine."""
        return tuple(sorted((job.folder / LOG_FOLDER).glob("*.log")))

    def usage(self, job: Submitted) -> tuple[Attempt, ...]:
        """By the records of the machines, which lack what these take to get ready."""
        file = job.folder / PLACE_FILE
        place = files.read_json(file, TypeAdapter(_Place), _CURE)
        submitted = file.stat().st_mtime
        return whole_attempts(job.folder, place.num_nodes, place.devices_per_node, submitted)

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """On a machine without devices that is rented for it, which takes minutes."""
        name = f"paceline-probe-{uuid.uuid4().hex[:8]}"
        folder = Path(site.shared) / f".{name}"
        answer = folder / "answer"
        run = f"bash -c {shlex.quote(script)} >{shlex.quote(str(answer))}"
        task = probe_task(site, name, run)
        folder.mkdir()
        try:
            write_atomic(folder / TASK, task)
            launch(name, folder)
            row = _ended(name)
            if not answer.exists():
                raise InputError(
                    f"a machine of the site did not answer ({row.said}): see `sky jobs logs "
                    f"--name {name}`."
                )
            return {name: answer.read_text(errors="replace")}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def why(self, job: Submitted, request: Request, site: Site) -> tuple[str, ...]:
        """What SkyPilot wrote last of how it looks for machines."""
        return tuple(f"SkyPilot: {line}" for line in controller_log(job.id))


def _newest(folder: Path) -> tuple[int, Path | None]:
    """Number and folder of the newest attempt that machines began."""
    found = [
        (int(path.name.partition(".")[0]), path)
        for path in (folder / ATTEMPTS).glob("*.*")
        if path.name.partition(".")[0].isdecimal()
    ]
    return max(found, default=(1, None))


def _nodes(folder: Path) -> tuple[str, ...]:
    newest = _newest(folder)[1]
    if newest is None or not (newest / NODES).exists():
        return ()
    return tuple(sorted((newest / NODES).read_text().split()))


def _ended(name: str) -> ManagedJob:
    """Wait for a job's end."""
    end = time.monotonic() + _PROBE_S
    while True:
        row = job_named(name)
        if row is not None and row.is_over:
            return row
        if time.monotonic() > end:
            cancel(name)
            said = "it is in no queue" if row is None else row.said
            raise InputError(
                f"a machine of the site did not end within {_PROBE_S:.0f} s ({said}): see `sky "
                "jobs queue`."
            )
        time.sleep(_LOOK_S)
