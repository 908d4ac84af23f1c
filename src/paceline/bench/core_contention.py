"""Core contention: how much faster a CPU rank computes while others of its machine wait, and how
unevenly while all compute.

How it works: some ranks work, the others stand at the barrier that ends a block of the clock, as
the stages of a pipeline wait for each other. First one works, then two, four and so on, last all.
That goes round a few times, so that a machine which is slower for a while is so for each number.
The work is a piece of a network: products, passes over memory and Python between them.

How uneven it is, is seen from one pass of such pieces to the next, by the mean square of successive
differences (von Neumann 1941, https://doi.org/10.1214/aoms/1177731677): a machine that is slow for
seconds is so for all ranks, and doesn't count.

It says nothing about several machines, and is measured on one only.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

import torch
from torch import Tensor
from torch.nn import functional

from paceline.bench.clock import Call, RankTimer
from paceline.config.curves import SharingCurve

# Rows and columns of the work: as in a block of a network that a core trains.
_ROWS, _COLUMNS, _WIDE = 256, 192, 384
# Sets of operands, which are gone through in turn: 4 MB of weights.
_NUM_COPIES = 8
_NUM_ROUNDS = 7
# Passes as long as those of a small pipeline's stage, without a meeting of the ranks between them.
_PASS_S = 0.025
_NUM_PASSES = 60


def measure_sharing(clock: RankTimer, source: str) -> SharingCurve | None:
    """Measure it; every rank must call this.

    Returns:
        none for one rank, for ranks with devices of their own, and on several machines.
    """
    ranks = clock.ranks
    if ranks.device_type != "cpu" or not 1 < ranks.world_size == ranks.local_world_size:
        return None
    counts = [*_doubling(ranks.world_size)]
    rounds = [[_seconds(clock, count) for count in counts] for _ in range(_NUM_ROUNDS)]
    paces = [[each[-1] / seconds for seconds in each] for each in rounds]
    return SharingCurve(
        num_ranks=tuple(map(float, counts)),
        pace=tuple(median(each) for each in zip(*paces, strict=True)),
        spread=min(1.0, clock.mean(_spread(clock, median(each[-1] for each in rounds)))),
        source=source,
    )


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({*(count for count in powers if count < most), most})


def _seconds(clock: RankTimer, num_working: int) -> float:
    """Seconds of the work while so many ranks do it."""
    works = clock.ranks.rank < num_working
    return clock.seconds(*(_piece() if works else (lambda: None) for _ in range(_NUM_COPIES)))


def _spread(clock: RankTimer, piece_s: float) -> float:
    """Standard deviation of this rank's passes over their mean, while all ranks compute."""
    pieces = [_piece() for _ in range(_NUM_COPIES)]
    per_pass = max(1, round(_PASS_S / piece_s))
    clock.most(0.0)  # all begin together
    ends = [time.perf_counter()]
    for _ in range(_NUM_PASSES):
        for number in range(per_pass):
            pieces[number % _NUM_COPIES]()
        ends.append(time.perf_counter())
    return successive_spread([end - begin for begin, end in pairwise(ends)])


def successive_spread(seconds: Sequence[float]) -> float:
    """Standard deviation over the mean, by differences between neighbours.

    Args:
        seconds: of equal passes, in their order; at least two.
    """
    squares = [(one - other) ** 2 / 2 for one, other in pairwise(seconds)]
    return fmean(squares) ** 0.5 / fmean(seconds)


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
