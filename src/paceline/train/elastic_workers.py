"""Start the workers of a run that goes on without lost ones, and start those again.

Ranks that exchange gradients end with the first that dies (`train.launch`). Workers of local
updates are on their own between rounds, so here a worker that dies is started again, a few times,
and asks the others to let it in (`elastic.membership`); whether they are enough without it is their
decision. Only the first one can't be lost.

On several hosts there is no such process: there a person, or the cluster's manager, starts a lost
worker again, with the same command.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.config.elastic import Elastic
from paceline.config.errors import EXIT_SAVED, StoppedInTimeError
from paceline.elastic.local_ranks import exit_text
from paceline.observe.run import Run
from paceline.train.launch import Entry, RankProcess, stop_on_signals, terminate

# A worker that dies whenever it is started would keep the others busy with handing it the state.
# Assumed.
MOST_RESTARTS = 3
# Workers end with the first one when the run does: then none is lost.
_MOMENT_S = 1.0
# What the others may still have to do when the first worker has ended well.
_GRACE_S = 10.0
_LOOK_S = 0.05


def launch_workers(
    run: Run, num_workers: int, entry: Entry, elastic: Elastic | None = None
) -> None:
    """Run `entry` in `num_workers` processes of this machine until the first one ends.

    Signals are those of `launch`, and so are the arguments.

    Raises:
        InputError: the first worker found wrong input.
        RunError: the first worker died, or too few were left.
        StoppedInTimeError: they were stopped, and the run is to be started again.
    """
    with tempfile.TemporaryDirectory() as folder, stop_on_signals(run, elastic):
        workers = [
            _Worker(partial(RankProcess, run, rank, num_workers, Path(folder), entry))
            for rank in range(num_workers)
        ]
        try:
            _watch(workers)
            _await(workers[1:], _GRACE_S)
        finally:
            terminate([worker.process for worker in workers])
        if workers[0].process.exitcode == EXIT_SAVED:
            raise StoppedInTimeError


class _Worker:
    """One of them, whichever process it is now."""

    def __init__(self, start: Callable[[], RankProcess]) -> None:
        self._start = start
        self.num_restarts = 0
        self.process = start()

    def restart(self) -> None:
        """In a new process."""
        self.num_restarts += 1
        self.process.kill()  # what it had started itself
        self.process = self._start()


@dataclass(frozen=True)
class RestartDecision:
    """What follows from the end of a worker other than the first."""

    is_restarted: bool
    sentence: str
    """For a person."""


def restart_decision(
    rank: int, pid: int, code: int, num_restarts: int, log: Path
) -> RestartDecision | None:
    """Decide what to do when a worker has ended; None: nothing, it was done.

    Args:
        code: its exit code, the negative number of a signal that killed it; 75: it was stopped.
        num_restarts: how often it was started again before.
    """
    if code in (0, EXIT_SAVED):
        return None
    what = f"worker {rank} (pid {pid}) ended {exit_text(code)}, its log is {log}; the others go on"
    if num_restarts < MOST_RESTARTS:
        again = f"it is started again ({num_restarts + 1} of {MOST_RESTARTS} times)"
        return RestartDecision(is_restarted=True, sentence=f"{what}, and {again}.")
    again = f"it was started again {MOST_RESTARTS} times already"
    return RestartDecision(is_restarted=False, sentence=f"{what} without it: {again}.")


def _watch(workers: Sequence[_Worker]) -> None:
    """Until the first one has ended well, or was stopped."""
    first, running = workers[0], list(workers[1:])
    while first.process.exitcode is None:
        time.sleep(_LOOK_S)
        for worker in [w for w in running if w.process.exitcode is not None]:
            _await([first], _MOMENT_S)
            if first.process.exitcode is None and not _again(worker):
                running.remove(worker)
    if first.process.has_failed:
        raise first.process.why()


def _again(worker: _Worker) -> bool:
    """Say and do what follows from a worker's end; return whether it runs again."""
    process, code = worker.process, worker.process.exitcode
    assert code is not None, "it has ended"
    follows = restart_decision(process.rank, process.pid, code, worker.num_restarts, process.log)
    if follows is None:
        return False
    print(follows.sentence, file=sys.stderr, flush=True)
    if follows.is_restarted:
        worker.restart()
    return follows.is_restarted


def _await(workers: Sequence[_Worker], most_s: float) -> None:
    """Wait for their ends, so long at most."""
    until = time.monotonic() + most_s
    while any(worker.process.exitcode is None for worker in workers) and time.monotonic() < until:
        time.sleep(_LOOK_S)
