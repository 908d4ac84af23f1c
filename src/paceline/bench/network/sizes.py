"""Sizes: which buffers are measured, as usual or as a person writes them, and within what."""

import re
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.config.frozen import whole

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_SMALLEST, _LARGEST = 2**9, 2**30  # 512 B to 1 GiB

BUFFERS = 5
"""Whole buffers that a rank holds while a size is measured: sent, received, expected, compared."""


@dataclass(frozen=True)
class Bounds:
    """What a sweep may take; it leaves out its largest sizes rather than go beyond."""

    sizes: tuple[int, ...]
    """Bytes of the whole buffer, rising."""
    seconds: float
    """For all collectives together."""
    memory_bytes: float
    """Of each rank."""

    @property
    def largest_bytes(self) -> float:
        """The largest buffer that memory allows."""
        return self.memory_bytes / BUFFERS


def usual_sizes(device_type: str, *, quick: bool) -> tuple[int, ...]:
    """512 B to 1 GiB: every power of two on CUDA, every third on CPUs, where calls take longer."""
    step = 1 if device_type == "cuda" and not quick else 3
    return tuple(2**power for power in range(9, 31, step))


def read_sizes(text: str) -> tuple[int, ...]:
    """Sizes as written: "4KiB,1MiB", "512:1GiB" (each twice the one before) or "512:1GiB:8".

    Raises:
        InputError: it says no such thing.
    """
    if ":" not in text:
        sizes = {_size(part, text) for part in text.split(",")}
        return tuple(sorted(sizes))
    parts = text.split(":")
    factor = whole(parts[2] if len(parts) == 3 else "2")
    if len(parts) > 3 or factor is None or factor < 2:
        raise _refusal(text)
    low, high = _size(parts[0], text), _size(parts[1], text)
    if low > high:
        raise _refusal(text)
    sizes_ = [low]
    while sizes_[-1] * factor <= high:
        sizes_.append(sizes_[-1] * factor)
    return tuple(sizes_)


def _size(text: str, given: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise _refusal(given)
    number = int(found[1]) * _UNITS[found[2]]
    if not _SMALLEST <= number <= 64 * _LARGEST:
        raise InputError(f"--sizes {given}: give sizes of 512 B to 64 GiB.")
    return number


def _refusal(text: str) -> InputError:
    return InputError(
        f"--sizes {text} names no sizes: give a list (4KiB,1MiB), or the smallest, the largest and "
        "the factor between neighbours (512:1GiB:8)."
    )
