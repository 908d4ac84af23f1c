"""What a call of an operator has to move and to compute: what its time is held against."""

from typing import NamedTuple


class KernelCost(NamedTuple):
    """Of one call: the least that any implementation must do."""

    bytes: int
    """Read and written in the device's memory, each tensor once."""
    flops: int = 0
    """Of matrix products; 0 where memory alone counts."""
