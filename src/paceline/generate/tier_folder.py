"""A folder for what one process keeps on disk: raw bytes that nobody else may read.

It is removed by `remove`, with its object, at the end of the process, or, after a crash, by whoever
uses the same place next: a lock tells whether its owner lives.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.config.errors import InputError

_PREFIX, _LOCK = "paceline-tier-", "owner.lock"


@dataclass(frozen=True)
class File:
    """Bytes on disk."""

    path: Path
    num_bytes: int
    checksum: int

    def read_to(self, data: Tensor) -> None:
        """Fill (num_bytes,) uint8, as far as the file can be read: the checksum tells."""
        with suppress(OSError), self.path.open("rb", buffering=0) as file:
            left = data.numpy().data
            while left and (count := file.readinto(left)):
                left = left[count:]


class OwnFolder:
    """A folder of this process alone.

    Args:
        place: where it is made; there may be others' beside it.

    Raises:
        InputError: none can be made there.
    """

    def __init__(self, place: Path) -> None:
        try:
            place.mkdir(parents=True, exist_ok=True)
            for left in place.glob(f"{_PREFIX}*"):
                _remove_left(left)
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
            lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody finds it without its lock.
            self.path = hidden.rename(place / hidden.name.removeprefix("."))
        except OSError as error:
            raise InputError(
                f"{place} can't hold what is kept on disk ({error.strerror}): choose another "
                "serve.disk_folder."
            ) from None
        self._num_files = 0
        self.remove = weakref.finalize(self, _remove, self.path, lock)

    def write(self, data: Tensor, checksum: int) -> File:
        """Write (num_bytes,) uint8.

        Raises:
            OSError: they can't be written.
        """
        file = File(self._new_path(), data.numel(), checksum)
        number = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(number, "wb", buffering=0) as opened:
                left = data.numpy().data
                while left:
                    left = left[opened.write(left) :]
        except OSError:
            file.path.unlink(missing_ok=True)
            raise
        return file

    def mapped(self, num_bytes: int) -> mmap.mmap:
        """A file of so many bytes, as memory; it has no name, and goes with the object.

        Raises:
            InputError: the disk has no room for it.
        """
        path = self._new_path()
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(number, 0, num_bytes)
            return mmap.mmap(number, num_bytes)
        except OSError as error:
            raise InputError(
                f"{path} can't have {num_bytes / 1e9:.3g} GB ({error.strerror}): choose another "
                "serve.disk_folder."
            ) from None
        finally:
            path.unlink()
            os.close(number)

    def _new_path(self) -> Path:
        self._num_files += 1
        return self.path / str(self._num_files)


def _remove_left(folder: Path) -> None:
    """Remove a folder whose owner has died; of others' nothing is touched."""
    with suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
