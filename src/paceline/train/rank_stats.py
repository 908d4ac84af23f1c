"""Rank stats: what each rank says of itself in the exchange that a step has anyway.

Every rank has places of its own in the vector of numbers that all ranks sum up, and zeros in
everybody else's, so the sum holds what each said: 24 bytes a rank more in one all-reduce, and not a
message more. Beyond 512 ranks not every step has it, so that a step carries 12 KiB on average at
most.
"""

from functools import lru_cache

import psutil
import torch
from torch import Tensor

from paceline.comm.busy_clock import BusyClock
from paceline.comm.rendezvous import Ranks
from paceline.machine.core_clock import CoreClock
from paceline.observe.rank_spread import FIGURES
from paceline.train.checkpoint.memory import Recovered

_RANKS_IN_EVERY_STEP = 512


class Watch:
    """Is told where this rank is, as `elastic.link.RankLink` is; here by nobody."""

    def enter(self, section: str) -> None:
        """Another section of the step begins, one of `elastic.verdict.SECTIONS`."""

    def at(self, step: int) -> None:
        """So many steps are done."""

    def compare(self, busy_s: list[float], rank: int) -> None:
        """How long each rank was at work in a step, and which of them this one is."""

    def joined(self, step: int, recovered: Recovered | None) -> None:
        """This rank goes on after step `step`, perhaps with what ranks had in their memory."""


UNWATCHED = Watch()


class RankStats:
    """This rank's clocks, and what it says of itself."""

    def __init__(self, ranks: Ranks) -> None:
        self.clock, self.watch = BusyClock(), UNWATCHED
        self._cores, self._ranks = CoreClock(), ranks

    def take(self, index: int) -> Tensor:
        """This rank's part of the vector; laps end here, from one step's exchange to the next.

        Returns:
            (3 * world_size,) fp64, in host memory; empty where there is nobody to tell, or where
            the step has none.
        """
        ranks = self._ranks
        num_ranks = ranks.world_size
        if num_ranks == 1 or index % -(-num_ranks // _RANKS_IN_EVERY_STEP):
            return torch.empty(0, dtype=torch.float64)
        each = torch.zeros(len(FIGURES), num_ranks, dtype=torch.float64)
        own = [self.clock.lap(), self._cores.lap(), memory_bytes(ranks.device)]
        each[:, ranks.rank] = torch.tensor(own)
        return each.flatten()


def figures_of_ranks(values: list[float]) -> dict[str, list[float]]:
    """What every rank said, by figure: empty where the step has none."""
    num_ranks = len(values) // len(FIGURES)
    parts = [values[at * num_ranks : (at + 1) * num_ranks] for at in range(len(FIGURES))]
    return dict(zip(FIGURES, parts, strict=True)) if values else {}


def memory_bytes(device: torch.device) -> int:
    """Peak reserved memory of this rank's device; on a CPU what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _process().memory_info().rss


@lru_cache
def _process() -> psutil.Process:
    return psutil.Process()
