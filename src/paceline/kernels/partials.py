"""Sums over rows on many programs, the same in every run: how many programs share the rows.

Each program walks over its rows and keeps its sum in registers; a second, small pass adds up the
programs' sums in a fixed order. Adding to one place with atomics would be shorter, and differ from
run to run.
"""

from functools import lru_cache

import torch

_WARPS = 16
"""On a processor at a time: they fit it with up to 128 registers a thread, and a program that had
to wait for another's end would double the time."""
_BLOCKS = 32
"""Blocks of rows that a program should have before another shares its processor: what it writes
for the second pass is then a few percent of what it reads."""
_INTERPRETED = 2


def num_programs(blocks: int, num_warps: int, device: torch.device) -> int:
    """How many programs should share so many blocks of rows.

    Args:
        blocks: 1 at least.
        num_warps: of a program.
        device: without processors (in the interpreter) there are two programs.
    """
    processors = num_processors(device)
    most = processors * max(_WARPS // num_warps, 1)
    return min(most, max(blocks // _BLOCKS, processors), blocks)


@lru_cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
