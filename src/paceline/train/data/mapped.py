"""Map several files into one stretch of memory, so that one gather reads from all of them.

Python's mmap can't say where a file goes. So it reserves the whole stretch, which it also gives
back, and the C library puts each file at its place there.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)


def map_files(files: Iterable[tuple[Path, int, int]], num_bytes: int) -> mmap.mmap:
    """Map files for reading; between them are zeros.

    Args:
        files: path, size in bytes and place of each, a multiple of the size of a page.
        num_bytes: of the whole stretch.

    Raises:
        OSError: a file can't be mapped, or has another size.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, num_bytes), flags=kind, prot=mmap.PROT_READ)
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    for path, size_bytes, place in files:
        with path.open("rb") as file:
            number = file.fileno()
            if os.fstat(number).st_size != size_bytes:
                raise OSError(errno.EIO, "has another size", str(path))
            how = (mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED)
            if _libc.mmap(begin + place, size_bytes, *how, number, 0) != begin + place:
                raise OSError(ctypes.get_errno(), "can't be mapped", str(path))
    return memory
