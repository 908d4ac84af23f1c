"""Ranks: the processes that share the network of an engine, all on this machine.

How it works: the process that serves is the first rank. The others come from the warm forkserver,
as a training's do, each with a pipe to the first (`generate.ranks`). They meet through a file in a
folder that nobody else may enter, and talk over the loopback interface alone. A rank that fails
prints its traceback and ends; the first then sees it in the pass that is under way, or is told by a
thread that watches the processes. All end with the first.
"""

import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

import torch

from paceline.comm.core_share import core_share_of
from paceline.comm.rendezvous import MEETING, Ranks, connect, disconnect, exit_rank
from paceline.config.errors import InputError, RunError
from paceline.config.model import Model
from paceline.config.serving import Serving
from paceline.elastic.local_ranks import exit_text
from paceline.generate.ranks import Others, follow, part_of
from paceline.models.decoder import Decoder
from paceline.train.failure import is_lost_peer
from paceline.train.stopping import exit_with_parent

_COLLECTIVES_S = 120.0
"""That a rank waits for others within a pass."""
_PATIENCE_S = 5.0
"""After a lost connection, for the process behind it to end; at the end, for all of them."""
_LOST_PEER = 3
"""Exit code of a rank that failed only because another one had gone."""


class Processes(Others):
    """The other ranks of this machine, which have started and met.

    Args:
        dtype: of the weights.

    Raises:
        InputError: there are fewer CUDA devices than ranks.
        RunError: a rank failed before all had met.
    """

    def __init__(self, model: Model, dtype: torch.dtype, serving: Serving) -> None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        num_ranks, num_devices = serving.num_ranks, torch.cuda.device_count()
        if device_type == "cuda" and num_devices < num_ranks:
            raise InputError(
                f"serve.tp = {serving.tp} and serve.ep = {serving.ep} need {num_ranks} devices, "
                f"and there are {num_devices}: lower them."
            )
        places = [Ranks(rank, num_ranks, rank, num_ranks, device_type) for rank in range(num_ranks)]
        self._is_over = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            what = (folder, os.getpid(), model, dtype, serving.tp, serving.ep)
            started = [_start(place, *what) for place in places[1:]]
            self._processes = [process for process, _ in started]
            super().__init__([end for _, end in started], self._lost)
            # Before multiprocessing waits for them; a process of its own runs no atexit.
            Finalize(None, self.close, exitpriority=100)
            with self.together():
                for _, end in started:
                    end.recv_bytes()  # it has imported what it needs
                self.decoder = _met(places[0], folder, model, dtype, serving.tp, serving.ep)
        """Of the first rank: its part, without values."""

    def watch(self, tell: Callable[[], object]) -> None:
        """See `Others.watch`."""

        def look() -> None:
            wait([process.sentinel for process in self._processes])
            if not self._is_over.is_set():
                tell()

        threading.Thread(target=look, name="ranks-watch", daemon=True).start()

    def close(self) -> None:
        """They end, and this process leaves their group."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        super().close()
        for process in self._processes:
            process.join(_PATIENCE_S)
            process.kill()
        disconnect()

    def _lost(self) -> RunError | None:
        """Which one has gone, or goes just now."""
        wait([process.sentinel for process in self._processes], timeout=_PATIENCE_S)
        gone = [each for each in enumerate(self._processes, 1) if each[1].exitcode is not None]
        if not gone:
            return None
        rank, process = min(gone, key=lambda each: each[1].exitcode == _LOST_PEER)
        return RunError(
            f"Rank {rank} (pid {process.pid}) ended {exit_text(process.exitcode or 0)}, and a "
            "network that is shared out needs all of its ranks: see above."
        )


def _start(place: Ranks, *what: object) -> tuple[BaseProcess, Connection]:
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be, args=(place, theirs, *what), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _be(
    place: Ranks,
    end: Connection,
    folder: str,
    first_pid: int,
    model: Model,
    dtype: torch.dtype,
    tp: int,
    ep: int,
) -> None:
    """All that another rank does."""
    os.setsid()  # Ctrl-C at the terminal is the first rank's
    exit_with_parent(first_pid)
    try:
        end.send_bytes(b"ready")
        follow(end, _met(place, folder, model, dtype, tp, ep))
    except BaseException as error:
        if is_lost_peer(error):
            exit_rank(_LOST_PEER)
        traceback.print_exception(error)
        exit_rank(1)
    exit_rank()


def _met(place: Ranks, folder: str, model: Model, dtype: torch.dtype, tp: int, ep: int) -> Decoder:
    """Meet the others, and make this rank's part of the network."""
    os.environ[MEETING] = folder
    try:
        connect(place, _COLLECTIVES_S)
    finally:
        del os.environ[MEETING]
    torch.set_num_threads(core_share_of(place).own)
    return part_of(model, dtype, tp, ep, place.device)
