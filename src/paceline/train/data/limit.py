"""The cache of tokens within a limit: what was used longest ago goes, and nothing that is in use.

How it works: who reads a folder keeps a shared lock on its meta.json for as long as its process and
those forked from it live, and stamps it. What is to be removed is locked alone first, then renamed,
then deleted: for others it is complete or absent. Where a file system has no locks nothing is ever
removed.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from paceline.train.data.dataset import META_FILE

GB = 10**9
_REMOVED = ".removed"
_DAY_S = 24 * 3600
# Folder -> the descriptor that holds its lock, until this process ends.
_held: dict[Path, int] = {}


@dataclass(frozen=True)
class CachedTokens:
    """A folder of the cache."""

    folder: Path
    num_bytes: int
    used: float
    """Unix time of the last start that read it."""
    is_in_use: bool


def hold(folder: Path) -> bool:
    """Keep a folder while this process lives; False: it was removed meanwhile."""
    meta = folder / META_FILE
    if folder in _held and _is_same(_held[folder], meta):
        return True
    try:
        number = os.open(meta, os.O_RDONLY)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # without locks nobody removes it either
        fcntl.flock(number, fcntl.LOCK_SH)
    if not _is_same(number, meta):
        os.close(number)
        return False
    with suppress(OSError):  # somebody else's cache
        os.utime(meta)
    if folder in _held:
        os.close(_held[folder])  # of what was removed by hand, and made again
    _held[folder] = number
    return True


def cached_tokens(cache: Path) -> list[CachedTokens]:
    """The complete folders of a cache, what was used longest ago first."""
    found = []
    for meta in cache.glob(f"*/{META_FILE}"):
        if meta.parent.suffix:
            continue
        with suppress(FileNotFoundError):  # somebody else removes it
            size = sum(file.stat().st_size for file in meta.parent.iterdir())
            lock = _locked_alone(meta)
            if lock is not None:
                os.close(lock)
            found.append(CachedTokens(meta.parent, size, meta.stat().st_mtime, lock is None))
    return sorted(found, key=lambda one: one.used)


def too_much(cache: Path, most_gb: float) -> list[CachedTokens]:
    """What has to go for a cache to be within a limit."""
    found = cached_tokens(cache)
    over = sum(one.num_bytes for one in found) - most_gb * GB
    gone = []
    for one in found:
        if over > 0 and not one.is_in_use:
            gone.append(one)
            over -= one.num_bytes
    return gone


def keep_within(cache: Path, most_gb: float) -> list[CachedTokens]:
    """Remove what is too much; return what was removed."""
    for leftover in cache.glob(f"*{_REMOVED}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    for unfinished in cache.glob("*.partial/"):
        _remove_old(unfinished)
    return [one for one in too_much(cache, most_gb) if remove(one.folder)]


def _remove_old(unfinished: Path) -> None:
    """Remove what nobody has gone on with for a day."""
    with suppress(FileNotFoundError, Timeout), FileLock(unfinished.with_suffix(".lock"), timeout=0):
        if unfinished.stat().st_mtime < time.time() - _DAY_S:
            shutil.rmtree(unfinished, ignore_errors=True)


def remove(folder: Path) -> bool:
    """Remove a folder that nobody uses; whether it is gone."""
    lock = _locked_alone(folder / META_FILE)
    if lock is None:
        return False
    try:
        aside = folder.with_name(f"{folder.name}{_REMOVED}-{os.getpid()}-{time.time_ns()}")
        with suppress(FileNotFoundError):
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(lock)
    return True


@contextmanager
def locked_alone(folder: Path) -> Iterator[bool]:
    """Lock a folder; whether nobody uses it. Who starts to, waits meanwhile."""
    lock = _locked_alone(folder / META_FILE)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _locked_alone(meta: Path) -> int | None:
    """The descriptor of a lock that nobody else has; None: somebody has one."""
    try:
        number = os.open(meta, os.O_RDWR)  # NFS wants to write for such a lock
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def _is_same(number: int, file: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), file.stat())
    return False
