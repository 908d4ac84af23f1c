"""One rank of the small case study: it measures the laboratory, then times all steps in turns.

How it works: as `network_cell.py`, whose contenders these are, with two ranks on each host and a
Cluster measured by the same processes: devices and codecs on unshaped links, collectives when the
links have their rate, all ranks at once, so that what they share is shared.

Started by case_study.py, which says what to do in plan.json; rank 0 writes result.json and
cluster.toml.
"""

import json
import sys
import time
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network_cell import Way, contender_of, time_in_turns
from benchmarks.network_cluster import OPS
from paceline.bench.clock import RankTimer
from paceline.bench.collectives import Group, all_groups, measure_curves, tier_of
from paceline.bench.command import to_text
from paceline.bench.measure import BenchRequest, measure
from paceline.bench.rank_pool import RankProgress
from paceline.comm.rendezvous import Ranks, connect, exit_rank, ranks_from_env
from paceline.config.hardware import Cluster, Tier
from paceline.config.job import Job, decided, read_job
from paceline.machine.discovery import num_cores, this_machine
from paceline.machine.freed_memory import keep_freed_memory

_SOURCE = "benchmarks/case_study.py"
_BATCHES = 4
_SIZES = (512, 1 << 16, 1 << 20, 1 << 22)
_BLOCK_S, _NUM_BLOCKS = 0.2, 2
_PATIENCE_S = 600


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    ranks = ranks_from_env("cpu")
    assert ranks is not None, "case_study.py starts this program on the hosts of a laboratory"
    torch.set_num_threads(max(1, num_cores() // ranks.local_world_size))
    keep_freed_memory()
    connect(ranks)
    unshaped = _without_links(ranks)
    ways = [
        (Way(**way), decided(read_job(folder / f"{at}.toml")))
        for at, way in enumerate(plan["ways"])
    ]
    blocks = _times(ways, ranks, plan["num_rounds"], folder)
    cluster = unshaped.replace(tiers=_tiers(ranks))
    if ranks.is_first:
        (folder / "cluster.toml").write_text(to_text(cluster))
        (folder / "result.json").write_text(json.dumps(blocks))
    dist.barrier()
    exit_rank()


def _times(
    ways: list[tuple[Way, Job]], ranks: Ranks, num_rounds: int, folder: Path
) -> list[dict[str, Any]]:
    ready = {way.name: contender_of(way, job, ranks) for way, job in ways}
    _, task = next(iter(ready.values()))
    batches = cycle(list(islice(task.steps_from(0), _BATCHES)))
    contenders = {name: contender for name, (contender, _) in ready.items()}

    def shaped() -> None:
        if ranks.is_first:
            (folder / "warm").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while not (folder / "shaped").exists():
            assert time.monotonic() < deadline, "case_study.py shapes the links"
            time.sleep(0.05)

    return [asdict(block) for block in time_in_turns(contenders, batches, num_rounds, shaped)]


def _without_links(ranks: Ranks) -> Cluster:
    """Devices and codecs."""
    inside = ranks.local_world_size
    machine = this_machine().replace(num_nodes=ranks.world_size // inside, devices_per_node=inside)
    return measure(
        BenchRequest(machine, ("device", "codecs"), _SOURCE, quick=True), ranks, _silent
    ).cluster


def _tiers(ranks: Ranks) -> tuple[Tier, ...]:
    """Links inside a host and between them, the latter at their rate."""
    clock = RankTimer(ranks, block_s=_BLOCK_S, num_blocks=_NUM_BLOCKS)
    groups = all_groups(ranks)
    inside = [group for group in groups if not group.across]
    across = [group for group in groups if group.across]
    return (
        _tier(clock, inside, "loopback", ranks.local_world_size),
        _tier(clock, across, "network", ranks.world_size),
    )


def _tier(clock: RankTimer, groups: list[Group], name: str, num_devices: int) -> Tier:
    curves = measure_curves(clock, groups, _SIZES, _SOURCE, lambda _: None, OPS)
    return tier_of(name, num_devices, curves, _SOURCE)


def _silent(_news: RankProgress) -> None:
    """Nobody looks on."""


if __name__ == "__main__":
    main()
