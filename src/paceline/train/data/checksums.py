"""Checksums of blocks of a file, so that what is read of it is verified, whatever its size.

How it works: beside a file stand the CRC-32 of each 64 KiB of it, the last filled up with zeros. A
reader checks a block when it first reads from it: 2.9 GB/s on one core of a machine without a GPU,
once a block and process.
"""

import errno
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 64 * 2**10


def checksums_path(path: Path) -> Path:
    """Where the checksums of a file are."""
    return path.with_suffix(".crc")


def num_blocks(num_bytes: int) -> int:
    """In so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def write_checksums(path: Path) -> None:
    """Write those of a complete file."""
    _checksums(path).tofile(checksums_path(path))


def is_as_written(path: Path, size_bytes: int) -> bool:
    """Whether a whole file has its checksums."""
    try:
        return np.array_equal(_checksums(path), read_checksums(path, size_bytes))
    except OSError:
        return False


def read_checksums(path: Path, size_bytes: int) -> NDArray[np.uint32]:
    """Those of a file of this size, one for each block.

    Raises:
        OSError: they can't be read, or are others.
    """
    beside = checksums_path(path)
    found = np.fromfile(beside, "<u4")
    if len(found) != num_blocks(size_bytes):
        raise OSError(errno.EIO, "are too few or too many", str(beside))
    return found


def _checksums(path: Path) -> NDArray[np.uint32]:
    found: list[int] = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            found.append(zlib.crc32(block.ljust(BLOCK_BYTES, b"\0")))
    return np.array(found, "<u4")


class CheckedBytes:
    """Memory of whole blocks, each of which is checked when it is first asked for."""

    def __init__(self, content: memoryview, checksums: NDArray[np.uint32]) -> None:
        """Take the content, and the checksum of each of its blocks."""
        self._content, self._checksums = content, checksums
        self._num_unread = len(checksums)
        self._unread = bytearray(b"\1" * len(checksums))
        self._is_unread = np.frombuffer(self._unread, bool)

    def were_read(self, begins: NDArray[np.int64], num_bytes: int) -> NDArray[np.bool_] | bool:
        """Of which stretches surely all blocks were checked."""
        if not self._num_unread:
            return True
        if num_bytes > BLOCK_BYTES:  # one may reach over a whole block
            return False
        last = (begins + num_bytes - 1) // BLOCK_BYTES
        return ~(self._is_unread[begins // BLOCK_BYTES] | self._is_unread[last])

    def are_good(self, begin: int, end: int) -> bool:
        """Whether the bytes begin .. end - 1 are those that were written."""
        first, last = begin // BLOCK_BYTES, num_blocks(end)
        # Of so few blocks a byte is found faster than an array's element.
        while (block := self._unread.find(1, first, last)) >= 0:
            content = self._content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if zlib.crc32(content) != self._checksums[block]:
                return False
            self._unread[block] = 0
            self._num_unread -= 1
        return True
