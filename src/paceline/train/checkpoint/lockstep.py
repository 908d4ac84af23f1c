"""Ranks that succeed or fail together.

A disk fills up on one machine while the others go on; whoever then enters the next collective waits
for a rank that left. So each step of a save or a load runs as an attempt, its failure is a message
like any other, and all ranks raise or none does.

All messages are records (`comm.records`) and go over a gloo group of their own: they never
interleave with the collectives of training, and they need no device. Without a process group the
same code runs alone.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from paceline.comm import records
from paceline.comm.rendezvous import collective_timeout
from paceline.config.errors import InputError
from paceline.train.checkpoint.files import DamagedError

T = TypeVar("T")

EXPECTED: dict[str, type[Exception]] = {
    "input": InputError,
    "damaged": DamagedError,
    "system": OSError,
}


@dataclass(frozen=True)
class LockstepRanks:
    """All ranks of this job, or the one process where there are no others."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @staticmethod
    def alone() -> "LockstepRanks":
        """This process, whatever others there are."""
        return LockstepRanks(0, 1, None)

    @staticmethod
    def of_this_job() -> "LockstepRanks":
        """Make the group. Every rank calls this."""
        if not (dist.is_available() and dist.is_initialized()):
            return LockstepRanks.alone()
        group = dist.new_group(backend="gloo", timeout=collective_timeout())
        return LockstepRanks(dist.get_rank(), dist.get_world_size(), group)

    def together(self, attempt: Callable[[], T]) -> T:
        """Run it on every rank. Returns this rank's result if all succeeded, else all raise.

        Raises:
            InputError, DamagedError, OSError: the first rank's failure, if it is one of these.
            RuntimeError: any other failure, with the traceback of the rank it happened on.
        """
        result, failure = None, None
        try:
            result = attempt()
        except Exception as error:
            failure = self._describe(error)
        for first in self.all_gather(failure):
            if first is not None:
                kind, text = first
                raise EXPECTED.get(kind, RuntimeError)(text)
        return cast(T, result)

    def on_first(self, attempt: Callable[[], T]) -> T:
        """Run it on rank 0 and give every rank its result, or let every rank raise its failure."""
        result = self.together(lambda: attempt() if self.rank == 0 else cast(T, None))
        return result if self.group is None else records.broadcast(result, self.group)

    def all_gather(self, item: T) -> list[T]:
        """Give every rank a small record of every rank, in rank order."""
        if self.group is None:
            return [item]
        return records.all_gather(item, self.group)

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Whether some rank has each of the flags, of which every rank passes as many."""
        if self.group is None or not flags:
            return flags
        mask = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(mask, dist.ReduceOp.MAX, group=self.group)
        return mask.bool().tolist()

    def gather(self, item: T) -> list[T]:
        """Give rank 0 the record of every rank, in rank order; the others get an empty list."""
        if self.group is None:
            return [item]
        return records.gather(item, self.group)

    def scatter(self, items: list[T]) -> T:
        """Give each rank its entry of rank 0's list; what the others pass is not looked at."""
        if self.group is None:
            return items[0]
        return records.scatter(items, self.group)

    def _describe(self, error: Exception) -> tuple[str, str]:
        where = f"rank {self.rank}: " if self.size > 1 else ""
        for name, kind in EXPECTED.items():
            if isinstance(error, kind):
                is_local = kind is OSError  # the other two read the same on whichever rank
                return name, f"{where if is_local else ''}{error}"
        return "program", f"{where}{''.join(traceback.format_exception(error))}"
