"""Measure: all that `paceline bench collectives` does on the ranks, in one call of each."""

import socket
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from paceline.bench.clock import RankTimer
from paceline.bench.collectives import all_groups, group_of_all
from paceline.bench.network.bandwidth import BandwidthRow
from paceline.bench.network.pairs import Pairs, measure_pairs, num_rounds
from paceline.bench.network.sizes import Bounds
from paceline.bench.network.sweep import SkippedSizes, planned, sweep
from paceline.bench.rank_pool import TellProgress, counted_progress
from paceline.comm.records import all_gather
from paceline.comm.rendezvous import Ranks

# Of a pair's large message: a bandwidth, not a burst (a token bucket lets some 256 KiB through).
_PAIR_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
_QUICK_PAIR_BYTES = {"cuda": 16 << 20, "cpu": 2 << 20}
_MEMORY_SHARE = 0.5  # of what is free, over all ranks of a host


@dataclass(frozen=True)
class NetworkRequest:
    """What to measure, and how thoroughly."""

    sizes: tuple[int, ...]
    budget_s: float
    """For the collectives; pairs are short."""
    backend: str
    """gloo, nccl or mpi."""
    with_pairs: bool = True
    quick: bool = False

    def clock(self, ranks: Ranks) -> RankTimer:
        """How long each size is looked at; percentiles want more blocks than a median."""
        return (
            RankTimer(ranks, block_s=0.02, num_blocks=3)
            if self.quick
            else RankTimer(ranks, num_blocks=7)
        )


@dataclass(frozen=True)
class NetworkMeasurement:
    """What was measured."""

    rows: tuple[BandwidthRow, ...]
    left: tuple[SkippedSizes, ...]
    """What was not, for lack of time or memory."""
    pairs: Pairs | None
    hosts: tuple[str, ...]
    """Of each rank."""
    ranks_per_node: int


def measure_network(
    request: NetworkRequest, ranks: Ranks, tell: TellProgress
) -> NetworkMeasurement:
    """Measure what is wished; every rank must call it.

    Raises:
        RunError: a collective gave a wrong result.
    """
    hosts = tuple(all_gather(socket.gethostname()))
    if ranks.world_size == 1:
        return NetworkMeasurement((), (), None, hosts, 1)
    groups = all_groups(ranks, request.backend)
    everybody = group_of_all(ranks, request.backend)
    if 1 < ranks.local_world_size < ranks.world_size:
        groups.append(everybody)
    curves = planned(groups, ranks.device_type)
    bounds = Bounds(request.sizes, request.budget_s, _memory_bytes(ranks))
    rows, left = sweep(
        request.clock(ranks), curves, bounds, counted_progress(tell, "collectives", len(curves))
    )
    pairs = None
    if request.with_pairs:
        number = (_QUICK_PAIR_BYTES if request.quick else _PAIR_BYTES)[ranks.device_type]
        say = counted_progress(tell, "pairs", num_rounds(ranks.world_size))
        of_all = everybody.process_group
        pairs = measure_pairs(ranks, hosts, number, 3 if request.quick else 7, say, of_all)
    return NetworkMeasurement(tuple(rows), tuple(left), pairs, hosts, ranks.local_world_size)


def _memory_bytes(ranks: Ranks) -> float:
    """What a rank's buffers may take; the least of all ranks, so that all decide alike."""
    if ranks.device_type == "cuda":
        free = torch.cuda.mem_get_info()[0] * _MEMORY_SHARE
    else:
        free = psutil.virtual_memory().available * _MEMORY_SHARE / ranks.local_world_size
    least = torch.tensor(free, dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()
