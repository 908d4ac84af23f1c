"""`paceline launch`, `jobs`, `logs`, `stop` and `why`: what they print, and what one writes.

A launch is written into a folder of its own, which goes away again where the submission fails.
"""

import json
import shutil
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path
from paceline.config.site import site_named
from paceline.launch.check_site import check_site
from paceline.launch.choose import table
from paceline.launch.contract import (
    Attempt,
    Explains,
    Observation,
    Reason,
    SilentError,
    State,
    Submitted,
    Wish,
)
from paceline.launch.engines import engine_named
from paceline.launch.prepare import Prepared
from paceline.launch.records import (
    JOB,
    LIVE,
    PATCH,
    RECORD_TYPE,
    REQUEST,
    Engines,
    Launch,
    launch_numbers,
    launches_of_each,
    newest_launch,
)
from paceline.launch.release import release_idle
from paceline.observe.run import write_atomic
from paceline.render.figures import amount_text, date_text, duration_text, plural
from paceline.render.table import Table

_CONSOLE = Console(highlight=False, soft_wrap=True, markup=False)
_LOOK_S, _LONGEST_WAIT_S = 0.5, 5.0
_CHUNK = 1 << 16
_MOST_LAST_BYTES = 2000
_RUNS = Path("runs")

REASONS: Mapping[Reason, str] = {
    "resources": "not enough machines are free",
    "priority": "jobs with a higher priority come first",
    "quota": "the account has used up what it may hold at once",
    "limit": "a limit on the number or size of jobs is reached",
    "dependency": "a job that must finish before has not finished",
    "held": "somebody holds it back: release it with the scheduler's own command",
    "begin_time": "it is not to begin before a set time",
    "requeued": "it was given back its place in the queue, and starts again soon",
    "node_down": "a machine that it needs does not answer",
    "unschedulable": "it can never start as it is: stop it, and launch it with another size",
    "starting": "it has its machines, which get ready",
    "unknown": "the engine does not say why",
}
_STATES: Mapping[State, str] = {
    "queued": "waits",
    "running": "runs",
    "finished": "has finished",
    "saved": "has saved a checkpoint, and nobody starts it again: launch it again to go on",
    "failed": "has failed: `paceline logs` shows what it wrote",
    "cancelled": "was stopped",
    "lost": "is lost: launch it again to go on from its newest checkpoint",
    "unknown": "stands as nobody can tell now",
}


# ---- launch --------------------------------------------------------------------------------------


def launch_command(prepared: Prepared, *, is_dry: bool, as_json: bool) -> None:
    """Show what was chosen, and submit it.

    Args:
        is_dry: print the files instead.

    Raises:
        InputError: the engine refused it; nothing is left of it.
    """
    request, record = prepared.record.request, prepared.record
    if len(prepared.sizes) > 1 and prepared.chosen is not None:
        _CONSOLE.print(table(prepared.sizes, prepared.chosen))
        for size in prepared.sizes:
            if size.refused:
                _CONSOLE.print(f"{size.text}: {size.refused}")
        if prepared.chosen.run_s is None:
            _CONSOLE.print(
                f"how long it runs can't be predicted, so {prepared.chosen.text} is taken, the "
                "smallest: --nodes asks for another."
            )
    if is_dry:
        print_files(prepared)
        return
    job = submit(prepared)
    devices = request.num_nodes * request.devices_per_node
    _CONSOLE.print(
        f"{prepared.run} is launched on {record.site_name}: "
        f"{plural(request.num_nodes, 'node')}, {plural(devices, 'device')}, id {job.id}"
    )
    if record.run_s is not None:
        price = "" if record.usd is None else f" and {amount_text(record.usd)} USD"
        _CONSOLE.print(f"expected: {duration_text(record.run_s)}{price} from its start")
    name = prepared.run.name
    _CONSOLE.print(f"paceline jobs | paceline logs {name} -f | paceline why {name}")
    if as_json:
        print(json.dumps({"run": str(prepared.run), "launch": prepared.number, "id": job.id}))


def print_files(prepared: Prepared) -> None:
    """Show what a submission would write."""
    folder = prepared.record.request.folder
    for name, text in prepared.rendered.files.items():
        print(f"==> {folder / name} <==\n{text}")
    if prepared.job_text is not None:
        print(f"==> {folder / JOB} <==\n{prepared.job_text}")


def submit(prepared: Prepared) -> Submitted:
    """Write the launch down and hand it to its engine.

    Raises:
        InputError: the engine refused it; nothing is left of it.
    """
    request, folder = prepared.record.request, prepared.record.request.folder
    with _alone(prepared):
        try:
            folder.mkdir(parents=True)
            text = RECORD_TYPE.dump_json(prepared.record, indent=1).decode()
            write_atomic(folder / REQUEST, f"{text}\n")
            if prepared.job_text is not None:
                write_atomic(folder / JOB, prepared.job_text)
            if prepared.patch:
                (folder / PATCH).write_bytes(prepared.patch)
            return engine_named(prepared.record.site.engine).submit(request, prepared.rendered)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _alone(prepared: Prepared) -> Iterator[None]:
    """Keep others from launching the same run meanwhile; no empty folder is left behind."""
    launches = prepared.record.request.folder.parent
    made = [path for path in (launches, *launches.parents) if not path.exists()]
    launches.mkdir(parents=True, exist_ok=True)
    lock = FileLock(launches / ".lock", timeout=0)
    try:
        with lock:
            if 1 + max(launch_numbers(prepared.run), default=0) != prepared.number:
                raise Timeout(str(launches))
            yield
    except Timeout:
        raise InputError(
            f"{prepared.run} is being launched by another process: see `paceline jobs`."
        ) from None
    finally:
        if next(launch_numbers(prepared.run), None) is None:
            with suppress(OSError):
                (launches / ".lock").unlink(missing_ok=True)
                for path in made:
                    path.rmdir()


# ---- what was launched ---------------------------------------------------------------------------


def jobs_command(runs: Path, *, is_all: bool, as_json: bool) -> None:
    """The newest launch of each run, or all of them, the newest last.

    Raises:
        InputError: there is no such folder.
    """
    _must_be_there(runs)
    of_each, damaged = launches_of_each(runs)
    found = [launch for launches in of_each for launch in launches[0 if is_all else -1 :]]
    found.sort(key=lambda launch: launch.record.time)
    engines = Engines()
    seen = [(launch, *look(launch, engines)) for launch in found]
    if seen:
        _CONSOLE.print(_jobs_table(seen))
    elif not damaged:
        _CONSOLE.print(f"nothing was launched in {runs}: paceline launch my.toml --on SITE")
    tell_unknown((launch, now) for launch, now, _ in seen)
    for sentence in damaged:
        _CONSOLE.print(sentence)
    if as_json:
        print(json.dumps([_as_json(*one) for one in seen]))


def release_idle_command(runs: Path, least_s: float) -> None:
    """Give back what the newest launches hold for nothing, for so long at least; say what.

    Raises:
        InputError: there is no such folder.
    """
    _must_be_there(runs)
    of_each, damaged = launches_of_each(runs)
    told: list[str | None] = [*damaged]
    engines = Engines()
    for launch in (launch for launches in of_each for launch in launches[-1:]):
        try:
            now = engines.ask(launch, Launch.observe)
            told.append(release_idle(launch, now, least_s, time.time()))
        except InputError as error:
            told.append(f"{launch.run.name}: {error}")
    for sentence in filter(None, told):
        _CONSOLE.print(sentence)
    if not any(told):
        _CONSOLE.print(f"nothing was held for nothing for {duration_text(least_s)}")


def _must_be_there(runs: Path) -> None:
    """Refuse a folder that was named and isn't there; the usual one comes with the first run."""
    if runs != _RUNS and not runs.is_dir():
        raise InputError(f"--runs {shown_path(runs)} is not there: give the folder that has runs.")


def look(launch: Launch, engines: Engines) -> tuple[Observation, tuple[Attempt, ...]]:
    """How it stands, and its attempts; "unknown" where its engine can't say."""
    try:
        return engines.ask(launch, lambda one: (one.observe(), one.engine.usage(one.job)))
    except InputError as error:
        return Observation("unknown", said=str(error)), ()


def tell_unknown(seen: Iterable[tuple[Launch, Observation]]) -> None:
    """Say why an engine couldn't tell how a launch stands, once for all that it didn't know."""
    why: dict[str, list[str]] = {}
    for launch, now in seen:
        if now.state == "unknown":
            why.setdefault(now.said, []).append(launch.run.name)
    for said, names in why.items():
        more = f" and {len(names) - 1} more" if names[1:] else ""
        _CONSOLE.print(f"{names[0]}{more}: {said}")


def _jobs_table(seen: list[tuple[Launch, Observation, tuple[Attempt, ...]]]) -> Table:
    rows = []
    for launch, now, attempts in seen:
        times = map(duration_text, waited_and_ran(attempts))
        is_known = now.state != "unknown"
        request = launch.record.request
        rows.append(
            (
                f"{launch.run.name} {launch.number}",
                launch.record.site_name,
                now.state if now.reason is None else f"{now.state}: {now.reason}",
                f"{request.num_nodes} x {request.devices_per_node}",
                *((str(now.attempt), *times) if is_known else ("–",) * 3),
                "" if now.exit_code is None else str(now.exit_code),
            )
        )
    heads = ("run", "site", "state", "devices", "attempt", "waited", "ran", "exit")
    return Table(heads, rows, words=(0, 1, 2))


def waited_and_ran(attempts: tuple[Attempt, ...]) -> tuple[float, float]:
    """Seconds of all attempts without machines, and with them."""
    waited = ran = 0.0
    for one in attempts:
        end = time.time() if one.ended is None else one.ended
        began = end if one.started is None else one.started
        waited += max(0.0, began - one.submitted)
        ran += max(0.0, end - began)
    return waited, ran


def _as_json(launch: Launch, now: Observation, attempts: tuple[Attempt, ...]) -> dict[str, Any]:
    return {
        "run": str(launch.run),
        "launch": launch.number,
        "site": launch.record.site_name,
        "engine": launch.record.site.engine,
        "id": launch.job.id,
        **asdict(now),
        "attempts": [asdict(one) for one in attempts],
    }


def logs_command(run: Path, *, is_following: bool) -> None:
    """Print what the nodes of the newest launch wrote, and what they go on to write.

    Raises:
        InputError: nothing was launched there.
    """
    launch = newest_launch(run)
    logs: dict[Path, _Log] = {}
    shown: Path | None = None
    is_live, has_waited = is_following, False
    ask_at, wait_s = 0.0, _LOOK_S
    while True:
        if is_live and time.monotonic() >= ask_at:
            with suppress(SilentError):  # what the nodes write comes all the same
                state = launch.observe().state
                is_live = state in LIVE
                if state == "queued" and shown is None and not has_waited:
                    print(f"{run} waits: `paceline why {run.name}` says why", file=sys.stderr)
                    has_waited = True
            # Schedulers are asked seldom: one serves many people.
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            ask_at = time.monotonic() + wait_s
        for file in launch.engine.logs(launch.job):
            for part in logs.setdefault(file, _Log(file)).new_parts():
                if file != shown:
                    print(f"==> {file} <==", flush=True)
                    shown = file
                print(part, end="", flush=True)
        if not is_live:
            break
        time.sleep(_LOOK_S)
    if shown is None:
        print(f"{run} has written nothing: see `paceline why {run.name}`", file=sys.stderr)


class _Log:
    """A file that may still grow."""

    def __init__(self, file: Path) -> None:
        self._file, self._done = file, 0
        # A letter may be half written, or stand across two parts.
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def new_parts(self) -> Iterator[str]:
        """What it has that was not read yet."""
        with suppress(FileNotFoundError), self._file.open("rb") as source:
            source.seek(self._done)
            while part := source.read(_CHUNK):
                self._done = source.tell()
                yield self._decoder.decode(part)


def stop_command(run: Path, *, is_saving: bool) -> None:
    """Stop the newest launch for good, or have it save and wait for machines again.

    Raises:
        InputError: it has ended, or its engine can't be reached.
    """
    launch = newest_launch(run)
    now = launch.observe()
    if now.state not in LIVE:
        raise InputError(f"{run} is {now.state} already: there is nothing to stop.")
    wish: Wish = "save" if is_saving else "stop"
    launch.engine.signal(launch.job, wish)
    grace = duration_text(launch.record.request.grace_s)
    _CONSOLE.print(
        f"{run} is asked to save, and to go on when it has machines again"
        if is_saving
        else f"{run} is asked to stop: it has {grace} to save"
    )


def why_command(run: Path) -> None:
    """Say how the newest launch stands, and why.

    Raises:
        InputError: nothing was launched there, or its engine can't say.
    """
    launch = newest_launch(run)
    now = launch.observe()
    _CONSOLE.print(f"{run} (launch {launch.number}, id {launch.job.id}) {_STATES[now.state]}")
    if now.reason is not None:
        _CONSOLE.print(f"why: {REASONS[now.reason]}")
    if now.nodes:
        _CONSOLE.print(f"on: {', '.join(now.nodes)} (attempt {now.attempt})")
    if now.exit_code is not None:
        _CONSOLE.print(f"exit code: {now.exit_code}")
    if now.said:
        _CONSOLE.print(f"the engine says: {now.said}")
    if now.state == "failed":
        for line in _last_lines(launch):
            _CONSOLE.print(line)
    if now.expected_start is not None:
        _CONSOLE.print(f"expected to start: {date_text(now.expected_start)}")
    engine = launch.engine
    if isinstance(engine, Explains):
        for sentence in engine.why(launch.job, launch.record.request, launch.record.site):
            _CONSOLE.print(sentence)


def _last_lines(launch: Launch) -> Iterator[str]:
    """What the nodes of the newest attempt wrote last: mostly why they failed."""
    logs = launch.engine.logs(launch.job)
    told = set()
    for file in logs:
        if file.name.partition("-")[0] == logs[-1].name.partition("-")[0]:
            with suppress(OSError), file.open("rb") as source:
                source.seek(max(0, file.stat().st_size - _MOST_LAST_BYTES))
                lines = source.read(_MOST_LAST_BYTES).decode(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "")
                if last and last not in told:
                    yield f"{file.stem} wrote last: {last.strip()}"
                told.add(last)


# ---- sites ---------------------------------------------------------------------------------------


def site_command(name: str, *, as_json: bool) -> bool:
    """Check a site and print what was found; whether all is well.

    Raises:
        InputError: there is no such site, or its file is wrong.
    """
    found = check_site(site_named(name), Path.cwd())
    for one in found:
        _CONSOLE.print(f"{'ok     ' if one.is_ok else 'PROBLEM'} {one.text}")
    if as_json:
        print(json.dumps({"site": name, "findings": [asdict(one) for one in found]}))
    return all(one.is_ok for one in found)
