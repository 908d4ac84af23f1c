"""How a run is asked to stop after the step it is in: by a signal, or by a file named "stop".

The launcher turns SIGINT and SIGTERM into the file, because a signal sent to one process does not
reach the others; ranks that torchrun or srun started get the signal themselves. The file also lets
a person stop a run on a machine they have no shell on.
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


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(self, file: Path, *, catch_signals: bool) -> None:
        self.file = file
        self._signalled = False
        self._before: dict[int, Any] = {}
        if catch_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Give signals back the meaning they had before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._signalled or self.file.exists()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True


def end_with(launcher_pid: int) -> None:
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
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
