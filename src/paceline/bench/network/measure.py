"""Measure: all that `paceline bench collectives` does on the ranks, in one call of each."""

import socket
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from paceline.bench.clock import Clock
from paceline.bench.collectives import all_groups, group_of_all
from paceline.bench.network.bandwidth import Row
from paceline.bench.network.pairs import Pairs, measure_pairs, num_rounds
from paceline.bench.network.sizes import Bounds
from paceline.bench.network.sweep import Left, planned, sweep
from paceline.bench.ranks import Tell, counted
from paceline.comm.ranks import Ranks
from paceline.comm.records import all_gather

# Of a pair's large message: a bandwidth, not a burst (a token bucket lets some 256 KiB through).
_PAIR_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
_QUICK_PAIR_BYTES = {"cuda": 16 << 20, "cpu": 2 << 20}
_MEMORY_SHARE = 0.5  # of what is free, over all ranks of a host


@dataclass(frozen=True)
class NetworkWish:
    """What to measure, and how thoroughly."""

    sizes: tuple[int, ...]
    budget_s: float
    """For the collectives; pairs are short."""
    backend: str
    """gloo, nccl or mpi."""
    with_pairs: bool = True
    quick: bool = False

    def clock(self, ranks: Ranks) -> Clock:
        """How long each size is looked at; percentiles want more blocks than a median."""
        return (
            Clock(ranks, block_s=0.02, num_blocks=3) if self.quick else Clock(ranks, num_blocks=7)
        )


@dataclass(frozen=True)
class Measured:
    """What was measured."""

    rows: tuple[Row, ...]
    left: tuple[Left, ...]
    """What was not, for lack of time or memory."""
    pairs: Pairs | None
    hosts: tuple[str, ...]
    """Of each rank."""
    ranks_per_node: int


def measure_network(wish: NetworkWish, ranks: Ranks, tell: Tell) -> Measured:
    """Measure what is wished; every rank must call it.

    Raises:
        RunError: a collective gave a wrong result.
    """
    hosts = tuple(all_gather(socket.gethostname()))
    if ranks.world_size == 1:
        return Measured((), (), None, hosts, 1)
    groups = all_groups(ranks, wish.backend)
    everybody = group_of_all(ranks, wish.backend)
    if 1 < ranks.local_world_size < ranks.world_size:
        groups.append(everybody)
    curves = planned(groups, ranks.device_type)
    bounds = Bounds(wish.sizes, wish.budget_s, _memory_bytes(ranks))
    rows, left = sweep(wish.clock(ranks), curves, bounds, counted(tell, "collectives", len(curves)))
    pairs = None
    if wish.with_pairs:
        number = (_QUICK_PAIR_BYTES if wish.quick else _PAIR_BYTES)[ranks.device_type]
        say = counted(tell, "pairs", num_rounds(ranks.world_size))
        of_all = everybody.process_group
        pairs = measure_pairs(ranks, hosts, number, 3 if wish.quick else 7, say, of_all)
    return Measured(tuple(rows), tuple(left), pairs, hosts, ranks.local_world_size)


def _memory_bytes(ranks: Ranks) -> float:
    """What a rank's buffers may take; the least of all ranks, so that all decide alike."""
    if ranks.device_type == "cuda":
        free = torch.cuda.mem_get_info()[0] * _MEMORY_SHARE
    else:
        free = psutil.virtual_memory().available * _MEMORY_SHARE / ranks.local_world_size
    least = torch.tensor(free, dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()
