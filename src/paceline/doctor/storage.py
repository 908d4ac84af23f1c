"""Storage: free space of a folder, and how fast a file of bounded size is written and read there.

What is written is random (a file system that compresses would lie about zeros) and flushed to the
disk before the clock stops. Before it is read, the kernel is told to forget it; where a file system
doesn't listen (memory ones), the read is of memory, so its rate is an upper bound.
"""

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.config.errors import InputError

_MOST_BYTES = 256 * 2**20
_MOST_S = 3.0
"""Of writing: a slow disk is known to be slow before all is written."""
_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class Storage:
    """Of the file system that a folder is on."""

    folder: str
    free_bytes: int
    total_bytes: int
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


def measure(folder: Path) -> Storage:
    """Write and read a file there; it is gone afterwards.

    Raises:
        InputError: the folder isn't there, is full, or can't be written to.
    """
    try:
        usage = shutil.disk_usage(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".paceline-doctor-") as file:
            size = min(_MOST_BYTES, usage.free // 2) // _BLOCK * _BLOCK
            if not size:
                return Storage(str(folder), usage.free, usage.total)
            written, write_s = _write(file.fileno(), size)
            read_s = _read(file.fileno(), written)
    except OSError as error:
        raise InputError(
            f"--folder {folder} can't be written to ({error.strerror}): give a folder that the "
            "run's checkpoints will go to."
        ) from None
    return Storage(str(folder), usage.free, usage.total, written / write_s, written / read_s)


def _write(file: int, size: int) -> tuple[int, float]:
    """(bytes, seconds), flushed."""
    block = os.urandom(_BLOCK)
    written, start = 0, time.perf_counter()
    while written < size and time.perf_counter() - start < _MOST_S:
        written += os.write(file, block)
        os.fdatasync(file)
    return written, time.perf_counter() - start


def _read(file: int, size: int) -> float:
    """Seconds."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
    start, at = time.perf_counter(), 0
    while at < size and time.perf_counter() - start < _MOST_S:
        at += len(os.pread(file, _BLOCK, at))
    return (time.perf_counter() - start) * size / at


def text(storage: Storage) -> str:
    """As JSON."""
    return json.dumps(asdict(storage))
