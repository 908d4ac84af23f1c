"""What the C library does with memory that this process has freed."""

import ctypes

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX = -3, -1, -8


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of activations instead of giving it back after every step.

    The kernel would clear it again, page by page, in the next one (33,000 page faults a step, 2-4 %
    of its time, see docs/decisions/overhead.md; more than a third of the time of a forward pass
    that makes texts). Other C libraries have no such switch and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def share_freed_memory() -> None:
    """Let every thread take memory that another one has freed, which glibc keeps apart.

    Weights that one thread reads in the place of another's would be in memory twice. Call it before
    there are other threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
