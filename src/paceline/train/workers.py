"""Start the workers of a run that goes on without lost ones, and start those again.

Ranks that exchange gradients are torchrun's agent's (`train.launch`), which ends all of them with
the first that dies. Workers of local updates are on their own between rounds, so here a worker that
dies is started again, a few times, and asks the others to let it in (`comm.rounds`); whether they
are enough without it is their decision. Only the first one can't be lost. The store in which they
meet is this process's.

On several hosts there is no such process: there a person, or the cluster's manager, starts a lost
worker again, with the same command.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.observe.run import Run
from paceline.train.launch import explained, signals_stop

# A worker that dies whenever it is started would keep the others busy with handing it the state.
# Assumed.
MOST_RESTARTS = 3
# Workers end with the first one when the run does: then none is lost.
_MOMENT_S = 1.0
# What the others may still have to do when the first worker has ended well.
_GRACE_S = 10.0
_LOCALHOST = "127.0.0.1"


def launch_workers(
    run: Run, num_workers: int, entry: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Run `entry` in `num_workers` processes of this machine until the first one ends.

    SIGINT and SIGTERM are those of `launch`.

    Args:
        entry: a module-level function.
        arguments: of the entry, the same for each worker.

    Raises:
        InputError: the first worker found wrong input.
        RunError: the first worker died, or too few were left.
    """
    store = TCPStore(_LOCALHOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, signals_stop(run):
        workers = [
            _Worker(rank, num_workers, store.port, Path(folder), entry, arguments)
            for rank in range(num_workers)
        ]
        try:
            _watch(workers, run)
            _let_end(workers[1:])
        finally:
            for worker in workers:
                worker.process.kill()


class _Worker:
    """One of them, whichever process it is now."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        port: int,
        folder: Path,
        entry: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> None:
        self.rank, self.num_restarts = rank, 0
        self.error_file = folder / f"error-{rank}.json"
        self._what = (entry, tuple(arguments))
        self._place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_workers,
            "LOCAL_WORLD_SIZE": num_workers,
            "MASTER_ADDR": _LOCALHOST,
            "MASTER_PORT": port,
            # As torchrun says it: the store is there already.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_ERROR_FILE": self.error_file,
        }
        self.process = self._start()

    def _start(self) -> BaseProcess:
        place = {name: str(value) for name, value in self._place.items()}
        process = get_context("forkserver").Process(target=_be, args=(place, *self._what))
        process.start()
        return process

    def restart(self) -> None:
        """In a new process."""
        self.num_restarts += 1
        self.process = self._start()


def _be(place: dict[str, str], entry: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.environ.update(place)
    entry(*arguments)


@dataclass(frozen=True)
class After:
    """What follows from the end of a worker other than the first."""

    is_restarted: bool
    sentence: str
    """For a person."""


def after(rank: int, pid: int | None, code: int, num_restarts: int, log: Path) -> After | None:
    """Decide what to do when a worker has ended; None: nothing, it was done.

    Args:
        rank: of the worker, not the first.
        pid: of its process.
        code: its exit code, the negative number of a signal that killed it.
        num_restarts: how often it was started again before.
        log: its log.
    """
    if code == 0:
        return None
    how = f"by signal {-code}" if code < 0 else f"with {code}"
    what = f"worker {rank} (pid {pid}) ended {how}, its log is {log}; the others go on"
    if num_restarts < MOST_RESTARTS:
        again = f"it is started again ({num_restarts + 1} of {MOST_RESTARTS} times)"
        return After(is_restarted=True, sentence=f"{what}, and {again}.")
    again = f"it was started again {MOST_RESTARTS} times already"
    return After(is_restarted=False, sentence=f"{what} without it: {again}.")


def _watch(workers: Sequence[_Worker], run: Run) -> None:
    """Until the first one has ended well."""
    first, running = workers[0], list(workers)
    while first.process.exitcode is None:
        connection.wait([worker.process.sentinel for worker in running])
        for worker in [w for w in running[1:] if w.process.exitcode is not None]:
            first.process.join(_MOMENT_S)
            if first.process.exitcode is None and not _again(worker, run):
                running.remove(worker)
    if first.process.exitcode != 0:
        pid, code = first.process.pid or 0, first.process.exitcode
        raise explained(0, ProcessFailure(0, pid, code, str(first.error_file)), run)


def _again(worker: _Worker, run: Run) -> bool:
    """Say and do what follows from a worker's end; return whether it runs again."""
    code = worker.process.exitcode
    assert code is not None, "it has ended"
    log = run.log_folder / f"rank{worker.rank}.log"
    follows = after(worker.rank, worker.process.pid, code, worker.num_restarts, log)
    if follows is None:
        return False
    print(follows.sentence, file=sys.stderr, flush=True)
    if follows.is_restarted:
        worker.restart()
    return follows.is_restarted


def _let_end(workers: Sequence[_Worker]) -> None:
    end = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
