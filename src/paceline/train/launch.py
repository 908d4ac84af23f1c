"""Put a process on every device of this machine, watch them, and end them together.

A rank that runs a function comes from the warm forkserver, one that runs a program is started as
such. They meet in a folder that nobody else may enter, so that no port is opened for it, and there
a rank that fails leaves why (`train.failure`). With the first that does, or that dies, the others
are ended, and with each rank whatever it started itself.

Signals are this file's business too: they become the Run's stop file, which every rank looks at.

Not here: ranks that may be lost (`elastic.local_ranks`), who is missing when a collective fails
(`elastic.peer_failure`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

from paceline.comm.rendezvous import MEETING, exit_rank
from paceline.config.elastic import Elastic
from paceline.config.errors import EXIT_SAVED, InputError, RunError, StoppedInTimeError
from paceline.elastic.local_ranks import exit_text
from paceline.elastic.signals import SignalListener, asking, blocked
from paceline.observe.run import Run
from paceline.train.failure import FILE, Failure, report
from paceline.train.stopping import ask_by_file, exit_with_parent

Entry = Callable[[], object] | Sequence[str]
"""What a rank runs: a function, or a program with its arguments."""
LAUNCHED_RUN = "PACELINE_LAUNCHED_RUN"
"""The variable that tells a rank the directory of its Run."""
_LAUNCHER = "PACELINE_LAUNCHER_PID"
_LOOK_S = 0.05
# Ranks that stop in time do so together, but for what each of them closes.
_SAVED_GRACE_S = 30.0
# After the first failure: time for others to say that theirs was earlier, and to write their logs.
_GRACE_S = 2.0
# One signal may arrive twice, from a wrapper that passes it on and from whoever sent it to a group.
_AGAIN_S = 1.0
_STOPPED_AT_ONCE = 130


def launch(run: Run, num_ranks: int, entry: Entry, elastic: Elastic | None = None) -> None:
    """Run `entry` in `num_ranks` processes of this machine and wait for them.

    A rank that dies takes the others down within seconds. SIGINT and SIGTERM ask the ranks to stop
    after their step; a second one ends them at once, or only a second SIGINT where the run is to be
    started again.

    Args:
        entry: a function is pickled.
        elastic: the Job's; none: what a Job without such settings has.

    Raises:
        InputError: a rank found wrong input.
        RunError: a rank died, or the ranks agreed that the run can't go on.
        StoppedInTimeError: the ranks were stopped, and the run is to be started again.
    """
    with tempfile.TemporaryDirectory() as folder, stop_on_signals(run, elastic):
        ranks = [
            RankProcess(run, rank, num_ranks, Path(folder), entry) for rank in range(num_ranks)
        ]
        try:
            failed = _first_to_fail(ranks)
        finally:
            terminate(ranks)
        if failed is not None:
            raise failed.why()
        if any(rank.exitcode == EXIT_SAVED for rank in ranks):
            raise StoppedInTimeError


class RankProcess:
    """The process of one rank, and what it left when it failed."""

    def __init__(
        self,
        run: Run,
        rank: int,
        num_ranks: int,
        folder: Path,
        entry: Entry,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it.

        Args:
            num_ranks: how many there are, all on this machine.
            folder: where ranks meet, and leave why they failed; nobody else may enter it.
            told: variables of its environment besides.
        """
        self.rank, self.log = rank, run.log_folder / f"rank{rank}.log"
        self._file = folder / f"failure-{rank}.json"
        self._file.unlink(missing_ok=True)  # of the process before
        place = {"RANK": rank, "LOCAL_RANK": rank}
        place |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, _LAUNCHER: os.getpid()}
        environment = {name: str(value) for name, value in place.items()}
        environment |= {MEETING: str(folder), FILE: str(self._file), LAUNCHED_RUN: str(run.path)}
        environment |= told
        self._process: subprocess.Popen[bytes] | BaseProcess
        if callable(entry):
            process = get_context("forkserver").Process(target=_be, args=(environment, entry))
            process.start()
            self._process = process
        else:
            self._process = start_program(entry, {**os.environ, **environment})

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    @property
    def exitcode(self) -> int | None:
        """None while it runs; the negative number of a signal that killed it."""
        if isinstance(self._process, BaseProcess):
            return self._process.exitcode
        return self._process.poll()

    @property
    def failure(self) -> Failure | None:
        """What it says itself, None where it hasn't failed or could not say anything."""
        return Failure.read(self._file)

    @property
    def has_failed(self) -> bool:
        """Whether it said so, or ended otherwise than well."""
        return self.failure is not None or self.exitcode not in (None, 0, EXIT_SAVED)

    def why(self) -> Exception:
        """The exception that its failure is for whoever started the run."""
        failure, code = self.failure, self.exitcode
        if failure is not None and failure.kind == "input":
            return InputError(failure.text)
        if failure is not None and failure.kind != "program":
            return RunError(failure.text)
        how = "failed" if failure else f"ended {exit_text(code or 0)}"
        sentence = (
            f"rank {self.rank} (pid {self.pid}) {how} and took the run down; its log is "
            f"{self.log}. Start it again to go on from the last checkpoint."
        )
        return RunError(f"{sentence}\n\n{failure.text}" if failure else sentence)

    def kill(self) -> None:
        """End it, and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()


def start_program(program: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, as `_be` starts a function."""
    with blocked():  # a rank lets signals through when it can follow them
        return subprocess.Popen(program, env=env, start_new_session=True)


def _be(environment: Mapping[str, str], entry: Callable[[], object]) -> None:
    # A session of its own: Ctrl-C at the terminal reaches only the launcher, each rank gets its
    # share where the kernel shares the cores out by session, and what it starts ends with it.
    os.setsid()
    os.environ.update(environment)
    with launched_rank():
        entry()


@contextmanager
def launched_rank() -> Iterator[None]:
    """Around all that a rank does in a process of the launcher, with which it ends.

    A rank that fails leaves why to the launcher and is gone at once: neither a checkpoint that is
    being written nor the goodbye of process groups may keep the others waiting.
    """
    exit_with_parent(int(os.environ[_LAUNCHER]))
    try:
        yield
    except StoppedInTimeError:
        exit_rank(EXIT_SAVED)
    except BaseException as error:
        report(error)
        exit_rank(1)


def _first_to_fail(ranks: Sequence[RankProcess]) -> RankProcess | None:
    """Wait until all have ended well, or one has failed and the others had a moment to."""
    saved: float | None = None
    while not any(rank.has_failed for rank in ranks):
        if all(rank.exitcode is not None for rank in ranks):
            return None
        if saved is None and any(rank.exitcode == EXIT_SAVED for rank in ranks):
            saved = time.monotonic()
        if saved is not None and time.monotonic() - saved > _SAVED_GRACE_S:
            return None
        time.sleep(_LOOK_S)
    first = _culprit(ranks)
    until = time.monotonic() + _GRACE_S
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    is_certain = first.failure is None
    return first if is_certain else _culprit(ranks)


def _culprit(ranks: Sequence[RankProcess]) -> RankProcess:
    """Of those that failed: the first that says it did so by itself, else one that died without a
    word, else the first that lost another one."""
    said = [(failure, one) for one in ranks if (failure := one.failure) is not None]
    own = [(failure.time, one.rank) for failure, one in said if failure.is_own]
    lost = [(failure.time, one.rank) for failure, one in said if not failure.is_own]
    silent = [one for one in ranks if one.has_failed and one.failure is None]
    if silent and not own:
        return silent[0]
    return ranks[min(own or lost)[1]]


def terminate(ranks: Sequence[RankProcess]) -> None:
    """End all of them, whatever they are at."""
    for rank in ranks:
        rank.kill()


@contextmanager
def stop_on_signals(run: Run, elastic: Elastic | None = None) -> Iterator[None]:
    """Turn signals that ask for a stop into the stop file; a second one ends this process and its
    ranks, but for notices of a machine that goes away, which may come several times."""
    elastic = elastic or Elastic()
    first: float | None = None

    def on_signal(name: str) -> None:
        nonlocal first
        ends_at_once = name == "SIGINT" or not elastic.asks_again
        if first is None:
            first = time.monotonic()
            ask_by_file(run, name, elastic.save_within_s)
            again = " (again: at once)" if ends_at_once else ""
            print(f"\nstopping after this step{again}", file=sys.stderr, flush=True)
        elif ends_at_once and time.monotonic() - first > _AGAIN_S:
            os._exit(_STOPPED_AT_ONCE)  # the ranks watch their launcher

    listener = SignalListener(asking(elastic), on_signal)
    try:
        yield
    finally:
        listener.close()
