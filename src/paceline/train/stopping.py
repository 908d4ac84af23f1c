"""How a run is asked to stop after the step it is in: by a signal, or by a file named "stop".

Every process of a run that gets SIGINT or SIGTERM asks for the same stop, for they may reach one of
them or all at once: the launcher makes the file, a rank says so in the exchange of its step.
Processes that help a rank (`comm.forkserver_process`, servers, data workers) ignore them. The file
also lets a person stop a run on a machine they have no shell on.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.utils.data._utils import signal_handling


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._signalled = False
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        _spare_data_workers()

    def close(self) -> None:
        """Give signals back the meaning they had before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._signalled or self.file.exists()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True


def _spare_data_workers() -> None:
    """Let the worker processes of torch's DataLoaders, forked from now on, ignore signals that ask
    for a stop: they end with their loader. torch gives them handlers of its own, under which
    SIGTERM kills one, and that ends the rank."""
    give_handlers = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]
    if getattr(give_handlers, "spares_workers", False):
        return

    def spared() -> None:
        give_handlers()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    spared.spares_workers = True  # type: ignore[attr-defined]
    signal_handling._set_worker_signal_handlers = spared  # type: ignore[attr-defined]


def shield_compile_workers() -> None:
    """The same for the processes in which torch's compiler compiles, and what these start: a rank
    whose compiler is gone can't take the step after which it would stop.

    They inherit a mask that blocks the signals: unlike a handler, any thread may set it, and this
    process loses no signal meanwhile.
    """
    from torch._inductor.compile_worker.subproc_pool import SubprocPool  # takes a second

    start = SubprocPool.__init__
    if getattr(start, "spares_workers", False):
        return

    def spared(pool: SubprocPool, *arguments: Any, **settings: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            start(pool, *arguments, **settings)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    spared.spares_workers = True  # type: ignore[attr-defined]
    SubprocPool.__init__ = spared  # type: ignore[method-assign, assignment]


def exit_with_parent(launcher_pid: int) -> None:
    """Make this process end when its launcher is gone, even by kill -9.

    A rank that outlives its launcher would hold its device and write into a Run that a new start
    may already own. Neither the parent's id nor a closed pipe tells: the parent is
    multiprocessing's fork server, which lives as long as its children, and a killed launcher may
    stay a zombie.
    """
    launcher = psutil.Process(launcher_pid)

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):  # gone between the two questions
            while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.5)
        if os.getpgrp() == os.getpid():  # with all that was started from here
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
