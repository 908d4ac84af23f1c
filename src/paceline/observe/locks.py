"""Locks of a Run: whether somebody trains in it, and keeping others from it for a moment; and of
a folder with many, which one process has at a time.

A run that is no elastic one is held by its first rank (`.lock`), an elastic one by the agent of
each node (`agents/<node>.lock`). Agents begin one after the other (`agents/.begin`).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path
from paceline.observe.run import Run

RUN_LOCK = ".lock"
BEGIN_LOCK = ".begin"
"""In the folder of agents."""
_PATIENCE_S = 2.0


def is_held(lock: Path) -> bool:
    """Whether a process that lives holds a lock; asks without making the file."""
    try:
        number = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def is_live(run: Run) -> bool:
    """Whether somebody trains in a Run now, as far as this machine's file system tells."""
    locks = (run.path / "agents").glob("*.lock")
    return any(map(is_held, (run.path / RUN_LOCK, *locks)))


@contextmanager
def kept_from_others(run: Run) -> Iterator[None]:
    """Let nobody begin to train in a Run meanwhile.

    Raises:
        InputError: somebody does already.
    """
    agents = run.path / "agents"
    locks = [run.path / RUN_LOCK, *([agents / BEGIN_LOCK] if agents.is_dir() else [])]
    with ExitStack() as held:
        try:
            for lock in locks:
                held.enter_context(FileLock(lock, timeout=0))
        except Timeout:
            raise _in_use(run) from None
        if any(map(is_held, agents.glob("*.lock"))):
            raise _in_use(run)
        yield


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own the folder that a command's --out names, made where it isn't there.

    Raises:
        InputError: another live process has it, or it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / RUN_LOCK, timeout=_PATIENCE_S)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"--out {folder} is in use by another live process: wait for it, or give another "
            "folder."
        ) from None
    except OSError as error:
        raise InputError(
            f"--out {folder} can't be written: {error.strerror}; give a folder that can."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _in_use(run: Run) -> InputError:
    return InputError(
        f"{shown_path(run.path)} is in use by a live process: wait for it, or stop it."
    )
