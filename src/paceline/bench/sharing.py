"""Sharing: how much faster a CPU rank computes while others of its machine wait.

How it works: some ranks work, the others stand at the barrier that ends a block of the clock, as
the stages of a pipeline wait for each other. First one works, then two, four and so on, last all.
The work is a piece of a network: products, passes over memory and Python between them.

It says nothing about several machines, and is measured on one only.
"""

import torch
from torch import Tensor
from torch.nn import functional

from paceline.bench.clock import Call, Clock
from paceline.config.curves import SharingCurve

# Rows and columns of the work: as in a block of a network that a core trains.
_ROWS, _COLUMNS, _WIDE = 256, 192, 384
# Sets of operands, which are gone through in turn: 4 MB of weights.
_NUM_COPIES = 8


def measure_sharing(clock: Clock, source: str) -> SharingCurve | None:
    """Measure it; every rank must call this.

    Returns:
        none for one rank, for ranks with devices of their own, and on several machines.
    """
    ranks = clock.ranks
    if ranks.device_type != "cpu" or not 1 < ranks.world_size == ranks.local_world_size:
        return None
    counts = [*_doubling(ranks.world_size)]
    seconds = [_seconds(clock, count) for count in counts]
    return SharingCurve(
        num_ranks=tuple(map(float, counts)),
        pace=tuple(seconds[-1] / each for each in seconds),
        source=source,
    )


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({*(count for count in powers if count < most), most})


def _seconds(clock: Clock, num_working: int) -> float:
    """Seconds of the work while so many ranks do it."""
    works = clock.ranks.rank < num_working
    return clock.seconds(*(_piece() if works else _nothing for _ in range(_NUM_COPIES)))


def _nothing() -> None:
    """What ranks do that wait."""


def _piece() -> Call:
    """Forward and backward through a pair of layers."""
    x = torch.randn(_ROWS, _COLUMNS, requires_grad=True)
    up = torch.randn(_WIDE, _COLUMNS, requires_grad=True)
    down = torch.randn(_COLUMNS, _WIDE, requires_grad=True)
    grad = torch.randn(_ROWS, _COLUMNS)

    def call() -> tuple[Tensor, ...]:
        hidden = functional.silu(functional.linear(x, up))
        y = x + functional.linear(hidden, down)
        return torch.autograd.grad(y, (x, up, down), grad)

    return call
