"""Gate: a run waits there between two of its turns, so that its twin has the machine to itself.

A gate stands before the first step and wherever a profiled window has closed, where a run pauses
anyway to write its traces; so no recorded time of a step holds a wait. Who opens it is `twins`.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from paceline.observe.profile import ProfiledWindows

_LOOK_EVERY_S = 0.05


class Gate:
    """One rank's side: it says how far it has come, and waits until it may go on."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._said, self._may = folder / f"gate-{rank}", folder / "go"
        self._number = 0
        self._pids: list[int] = []

    def runs_in_turn(self, pid: int) -> None:
        """Stop another process whenever this one waits."""
        self._pids.append(pid)

    def wait(self) -> None:
        """Wait for the next turn."""
        self._tell_others(signal.SIGSTOP)
        self._said.write_text(str(self._number))
        while _number_in(self._may) < self._number:
            time.sleep(_LOOK_EVERY_S)
        self._number += 1
        self._tell_others(signal.SIGCONT)

    def _tell_others(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def stand(self) -> None:
        """Put it where it belongs: before the first window, and after each."""
        enter, close = ProfiledWindows.__enter__, ProfiledWindows._close

        def enter_in_turn(windows: ProfiledWindows) -> ProfiledWindows:
            self.wait()
            return enter(windows)

        def close_and_wait(windows: ProfiledWindows, profiler: Any) -> Any:
            account = close(windows, profiler)
            self.wait()
            return account

        ProfiledWindows.__enter__ = enter_in_turn
        ProfiledWindows._close = close_and_wait


def last_gate(folder: Path, num_ranks: int) -> int:
    """The gate that all ranks have reached, -1: not even the first one."""
    return min(_number_in(folder / f"gate-{rank}") for rank in range(num_ranks))


def open_gate(folder: Path, number: int) -> None:
    """Let all ranks go on from their gate of this number (from 0)."""
    draft = folder / "go.tmp"
    draft.write_text(str(number))
    draft.replace(folder / "go")


def _number_in(file: Path) -> int:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):  # not yet, or half written
        return -1
