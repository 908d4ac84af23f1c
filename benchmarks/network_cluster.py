"""A laboratory measured as `paceline bench` does: a Cluster for each rate of its links.

How it works: on unshaped links the ranks measure devices, codecs and the reference steps, all at
once as everywhere. Then the links get one rate after another, and those collectives are measured
that gradients of replicas need. Blocks are long and buffers large: what fits into the token bucket
of a link tells nothing about its rate.

This file is both the program of a rank, and what starts it on the hosts (`measured_clusters`).
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.netlab import Laboratory, rate_text, read_rate
from paceline.bench.clock import RankTimer
from paceline.bench.collectives import all_groups, measure_curves, tier_of
from paceline.bench.command import to_text
from paceline.bench.measure import BenchRequest, calibrated, measure
from paceline.bench.rank_pool import RankProgress
from paceline.comm.rendezvous import Ranks, connect, exit_rank, ranks_from_env
from paceline.config.hardware import Cluster
from paceline.config.job import read_cluster
from paceline.config.stack import Stack
from paceline.machine.discovery import num_cores, this_machine
from paceline.machine.freed_memory import keep_freed_memory

OPS = ("all_reduce", "all_to_all", "all_gather", "send_recv")
"""What replicas use, and what the planner reads a link's latency and bandwidth from."""
_SIZES = (512, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_BLOCK_S, _NUM_BLOCKS = 0.3, 2
_LIMIT_S = 900
_OF_LINKS = ("comm_time_inside", "comm_time_across")
_KNOWN = "known.toml"
_SOURCE = "benchmarks/network_cluster.py"


class MeasuringError(Exception):
    """A rank failed: the text is the end of what it wrote."""


def measured_clusters(
    num_hosts: int, rates: Sequence[str], known: Cluster | None = None
) -> dict[str, Cluster]:
    """Measure a laboratory of its own: rate -> Cluster.

    Args:
        num_hosts: with a rank each.
        rates: "200mbit", "none".
        known: what an earlier call found: only the links are measured.

    Raises:
        MeasuringError: a rank failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as place, Laboratory(num_hosts) as lab:
        folder = Path(place)
        (folder / "rates.json").write_text(json.dumps(list(rates)))
        if known is not None:
            (folder / _KNOWN).write_text(to_text(known))
        command = [sys.executable, "-m", "benchmarks.network_cluster", folder]
        with lab.start(command, folder=Path(__file__).resolve().parents[1]) as ranks:
            for number, rate in enumerate(rates):
                deadline = time.monotonic() + _LIMIT_S
                while not (folder / f"{number}.ready").exists():
                    if not ranks.are_running or time.monotonic() > deadline:
                        break
                    time.sleep(0.05)
                lab.set_rate(read_rate(rate))
                (folder / f"{number}.shaped").touch()
            finished = ranks.wait(_LIMIT_S)
        bad = [rank for rank in finished if rank.code != 0]
        if bad:
            raise MeasuringError("\n".join(f"rank {r.rank}: {r.output[-2000:]}" for r in bad))
        return {rate: read_cluster(folder / f"{at}.toml") for at, rate in enumerate(rates)}


def main() -> None:
    """One rank."""
    folder = Path(sys.argv[1])
    ranks = ranks_from_env("cpu")
    assert ranks is not None, "measured_clusters starts this program on the hosts of a laboratory"
    torch.set_num_threads(num_cores())
    keep_freed_memory()
    connect(ranks)
    known = folder / _KNOWN
    cluster = read_cluster(known) if known.exists() else _without_links(ranks)
    for number, rate in enumerate(json.loads((folder / "rates.json").read_text())):
        _wait_for(folder, number, ranks)
        at_rate = _with_links(cluster, ranks, rate)
        if ranks.is_first:
            (folder / f"{number}.toml").write_text(to_text(at_rate))
    exit_rank()


def _without_links(ranks: Ranks) -> Cluster:
    """Everything but the rates; what is fitted needs collectives, too."""
    machine = this_machine().replace(num_nodes=ranks.world_size, devices_per_node=1)
    parts = ("device", "codecs", "collectives", "step")
    outcome = measure(BenchRequest(machine, parts, _SOURCE, quick=True), ranks, _silent)
    return calibrated(outcome, _SOURCE) if ranks.is_first else outcome.cluster


def _wait_for(folder: Path, number: int, ranks: Ranks) -> None:
    """Until the links have the next rate; the first rank says when all may change."""
    clock = RankTimer(ranks)
    clock.mean(0)  # a barrier: nobody measures any more
    if ranks.is_first:
        (folder / f"{number}.ready").touch()
    deadline = time.monotonic() + _LIMIT_S
    while not (folder / f"{number}.shaped").exists():
        assert time.monotonic() < deadline, "measured_clusters shapes the links"
        time.sleep(0.05)


def _with_links(cluster: Cluster, ranks: Ranks, rate: str) -> Cluster:
    groups = [group for group in all_groups(ranks) if group.num_ranks == ranks.world_size]
    clock = RankTimer(ranks, block_s=_BLOCK_S, num_blocks=_NUM_BLOCKS)
    source = f"{_SOURCE}, {rate_text(read_rate(rate))}"
    curves = measure_curves(clock, groups, _SIZES, source, lambda _: None, OPS)
    tier = tier_of("network", ranks.world_size, curves, source)
    return cluster.replace(tiers=(tier,), stack=_of_any_link(cluster.stack))


def _of_any_link(stack: Stack | None) -> Stack | None:
    """Without what was fitted to the unshaped links: it says nothing about wires of a rate."""
    if stack is None:
        return None
    kept = {name: value for name, value in stack.constants.items() if name not in _OF_LINKS}
    return stack.replace(constants=kept)


def _silent(_news: RankProgress) -> None:
    """Nobody looks on."""


if __name__ == "__main__":
    main()
