"""Clock: seconds of a call while every rank makes the same one.

How it works: ranks that share cores (or a power budget) slow each other down, and train together,
so they are measured together. A time is that of a block of many calls, begun by all ranks at once;
a single short call would often run undisturbed between two turns of the scheduler and look as if a
rank had a core to itself. On one machine a block lasts until the last rank is done. The median over
blocks, then the mean over ranks, is what is reported.

On CUDA the block lies between two events, behind a kernel that sleeps until the host has launched
it all: what is seen is the device's time, not the host's.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from paceline.comm.rendezvous import Ranks

Call = Callable[[], object]

# A block is never of more calls: the queue of launched kernels holds about a thousand.
_MOST_CALLS = {"cuda": 500, "cpu": 200_000}
# About 20 ms at 1.5 GHz: the host launches 500 calls meanwhile.
_SLEEP_CYCLES = 30_000_000


@dataclass(frozen=True)
class RankTimer:
    """Measures on this rank, together with all others."""

    ranks: Ranks
    block_s: float = 0.03
    """A scheduler's turn is a few milliseconds: a block has several."""
    num_blocks: int = 5

    def seconds(self, *calls: Call) -> float:
        """Seconds of a call, mean over ranks; several calls are made in turn.

        Give several that do the same to different data, so that they don't find everything in the
        caches; all ranks must give as many.
        """
        return self.mean(median(self.blocks(*calls)))

    def in_rounds(self, calls: Iterable[Call]) -> list[float]:
        """Seconds of each call, mean over ranks. A block of each comes before the next of any, so
        that what lasts for a while is seen by all of them."""
        sized = [(call, self._calls_in_a_block((call,))) for call in calls]
        rounds = [
            [self._block((call,), number) for call, number in sized] for _ in range(self.num_blocks)
        ]
        return [self.mean(median(each)) for each in zip(*rounds, strict=True)]

    def blocks(self, *calls: Call) -> list[float]:
        """Seconds of a call in each block, as this rank saw them; arguments as in `seconds`."""
        number = self._calls_in_a_block(calls)
        return [self._block(calls, number) for _ in range(self.num_blocks)]

    def _calls_in_a_block(self, calls: tuple[Call, ...]) -> int:
        """How many calls fill a block, by trying more and more, which also warms everything up."""
        number, most = len(calls), _MOST_CALLS[self.ranks.device_type]
        self._block(calls, number)  # allocates, connects, chooses algorithms
        is_first = True
        while True:
            taken_s = self._taken_s(calls, number)
            if is_first and taken_s > self.block_s / 2:
                # Memory that a process gets for the first time costs it many times a call: a block
                # chosen by that would be of one call, and of what ranks begin it late by.
                taken_s = min(taken_s, self._taken_s(calls, number))
            if taken_s > self.block_s / 2 or number == most:
                return max(1, min(most, round(number * self.block_s / taken_s)))
            number = min(most, max(2 * number, round(number * self.block_s / taken_s / 2)))
            is_first = False

    def _taken_s(self, calls: tuple[Call, ...], number: int) -> float:
        """Seconds of a block of so many calls, on the slowest rank."""
        return self.most(self._block(calls, number)) * number

    def mean(self, value: float) -> float:
        """Mean of a number over all ranks."""
        return self._agreed(value, dist.ReduceOp.SUM) / self.ranks.world_size

    def most(self, value: float) -> float:
        """The largest of a number over all ranks."""
        return self._agreed(value, dist.ReduceOp.MAX)

    def _agreed(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.ranks.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return tensor.item()

    def _block(self, calls: tuple[Call, ...], number: int) -> float:
        """Mean seconds of `number` calls."""
        if self.ranks.world_size > 1:
            self._agreed(0.0, dist.ReduceOp.SUM)  # a barrier that also works beside NCCL
        if self.ranks.device_type == "cuda":
            return _cuda_block(calls, number)
        began = time.perf_counter()
        for index in range(number):
            calls[index % len(calls)]()
        return self._until_all_are_done(began, time.perf_counter()) / number

    def _until_all_are_done(self, began: float, ended: float) -> float:
        """Seconds from the first rank's start to the last one's end, by the clock of one machine.

        Where ranks outnumber cores, a scheduler may let some finish before others begin.
        """
        if self.ranks.world_size == self.ranks.local_world_size:
            return self.most(ended) + self.most(-began)
        return ended - began


def _cuda_block(calls: tuple[Call, ...], number: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES)
    began.record()
    for index in range(number):
        calls[index % len(calls)]()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / number
