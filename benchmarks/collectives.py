"""Collectives by our algorithms against gloo's: seconds, bytes on the wire, and both as predicted.

How it works: ranks run in the network laboratory (`benchmarks.netlab`), so that the counters of
their interfaces count nothing else. Before each op the ranks' links are measured as `paceline
bench` does it, since what a small message takes drifts within minutes; from these curves the
planner's price of every algorithm is asked, which stands beside what was measured. Algorithms
alternate, in blocks as long as the bench's; what is told is the median over blocks of the slowest
rank. The set-ups:
- one host, over loopback: where ours wins against gloo's without any slow link;
- two hosts with two ranks each and a slow link between: hierarchical against flat. Its bytes over
  the link must be the theoretical minimum, 2 (m - 1) / m of the buffer per node. Sums that are
  scattered to shards are also sent as int8, by all ranks and between the hosts only
  (`comm.compress.shards`);
- two hosts with one rank each: one step of FSDP2, whose bytes must be (n - 1) / n of what it
  gathers and scatters.

It needs root, `ip` and `tc`.

    python -m benchmarks.collectives [--rate 200mbit] [--quick]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from benchmarks.netlab import Laboratory, rate_text, read_rate
from benchmarks.provenance import folder_of, keep, parser_of, taken_with
from paceline.bench.clock import RankTimer
from paceline.bench.collectives import Group, all_groups, measure_tiers
from paceline.comm.algorithms import ALGORITHMS, OPS
from paceline.comm.collectives import Collectives
from paceline.comm.compress.codecs import codec_of
from paceline.comm.compress.shards import CodedRow as ShardRow
from paceline.comm.compress.shards import CodedShards, PayloadBuffers, Payloads
from paceline.comm.rendezvous import Ranks, connect, exit_rank, ranks_from_env
from paceline.config.comm import codec, coded_bits
from paceline.config.hardware import Cluster, Figure
from paceline.machine.discovery import this_machine
from paceline.parallel import fsdp
from paceline.parallel.shard_collectives import ShardAlgorithm
from paceline.plan.collectives import collective_s
from paceline.plan.price.compress import scattering_s

HERE = Path(__file__).resolve().parent
LOCAL = (2**12, 2**16, 2**20, 2**24)
SLOW = (2**18, 2**20, 2**22)
MOST_CALLS = 200
"""Of a block."""
LEAST_BYTES = 2**18
"""Of what is counted: below, the counters see more of barriers and acknowledgements."""

Row = dict[str, Any]


# ---- on each rank --------------------------------------------------------------------------------


def run_rank(task: str, sizes: Sequence[int], blocks: int, file: Path) -> None:
    """A rank's part of a set-up; rank 0 writes what was found."""
    ranks = ranks_from_env("cpu")
    assert ranks is not None
    torch.set_num_threads(1)
    connect(ranks, timeout_s=120)
    found = {"exchanges": exchanges, "fsdp": fsdp_steps}[task](ranks, sizes, blocks)
    if ranks.is_first:
        file.write_text(json.dumps(found))
    dist.barrier()
    exit_rank()


def exchanges(ranks: Ranks, sizes: Sequence[int], blocks: int) -> list[Row]:
    """Every op by every algorithm at every size."""
    # Links of the laboratory let a burst through at once: only longer blocks see their rate.
    is_shaped = ranks.local_world_size < ranks.world_size
    clock = RankTimer(ranks, 0.3, 3) if is_shaped else RankTimer(ranks, 0.03, 15)
    groups = all_groups(ranks)
    rows = []
    for op in OPS:
        cluster = _measured(clock, groups, op, max(sizes))
        for size in sizes:
            rows += _at_size(op, size, blocks, clock, cluster)
    if is_shaped:
        cluster = _measured(clock, groups, "all_to_all", max(sizes))
        for size in sizes:
            rows += _coded(size, blocks, clock, cluster)
    return rows


def _measured(clock: RankTimer, groups: Sequence[Group], op: str, largest: int) -> Cluster:
    """The links as they are now, by what the prices of an op are made of."""
    ranks, sizes = clock.ranks, tuple(2**power for power in range(9, largest.bit_length(), 2))
    ops = (op, "send_recv")
    tiers = measure_tiers(clock, groups, (*sizes, largest), "this run", lambda _: None, ops)
    here = this_machine()
    return here.replace(
        device=here.device.replace(memory_bytes_per_s=_adding_rate(clock)),
        devices_per_node=ranks.local_world_size,
        num_nodes=ranks.world_size // ranks.local_world_size,
        tiers=tiers,
    )


def _adding_rate(clock: RankTimer) -> Figure:
    """Bytes/s that are read and written by adding one buffer to another."""
    sums, values = torch.zeros(2**21), torch.ones(2**21)
    seconds = clock.seconds(lambda: sums.add_(values))
    return Figure(value=3 * sums.nbytes / seconds, origin="measured", source="this run")


def _at_size(op: str, size: int, blocks: int, clock: RankTimer, cluster: Cluster) -> list[Row]:
    ranks, n = clock.ranks, clock.ranks.world_size
    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // n)
    names = ("backend", *ALGORITHMS[op])
    if ranks.local_world_size == n:
        names = tuple(name for name in names if name != "hierarchical")
    todo: dict[str, Callable[[], None]] = {}
    for name in names:
        among = Collectives(dist.group.WORLD, name, ranks.local_world_size)
        todo[name] = {
            "all_reduce": lambda among=among: among.all_reduce(whole),
            "reduce_scatter": lambda among=among: among.reduce_scatter(part, whole),
            "all_gather": lambda among=among: among.all_gather(whole, part),
        }[op]
    predicted = {
        name: collective_s(cluster, op if name == "backend" else f"{op}.{name}", size, n, 1)
        for name in names
    }
    return _rows(op, size, blocks, clock, todo, predicted)


def _coded(size: int, blocks: int, clock: RankTimer, cluster: Cluster) -> list[Row]:
    """A sum that is scattered to shards: by the backend, and as int8 with error feedback."""
    ranks = clock.ranks
    n, inside = ranks.world_size, ranks.local_world_size
    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // n)
    form = codec("int8")
    payloads = Payloads(codec_of(form), ShardRow.of([(len(part), True)]), torch.float32)
    backend = Collectives(dist.group.WORLD, "backend")
    todo: dict[str, Callable[[], None]] = {"backend": lambda: backend.reduce_scatter(part, whole)}
    predicted = {"backend": collective_s(cluster, "reduce_scatter", size, n, 1)}
    coded_bytes = size // 4 * coded_bits(form) / 8
    for name, by, taken in (
        ("int8", "pairwise", 1),
        ("int8 between nodes", "hierarchical", inside),
    ):
        shards = CodedShards(Collectives(dist.group.WORLD, by, inside), PayloadBuffers())
        errors = torch.zeros(len(shards.others), len(part))
        todo[name] = lambda shards=shards, errors=errors: shards.reduce_scatter(
            payloads, part, whole, errors
        )
        device, ones = cluster.device, np.ones(1)
        predicted[name] = (
            collective_s(cluster, "reduce_scatter.halving_doubling", size, taken, 1)
            + collective_s(cluster, "all_to_all", coded_bytes / taken, n // taken, taken)
            + scattering_s(device, form, size / 4 / taken * ones, n / taken * ones)
        )
    return _rows("coded reduce_scatter", size, blocks, clock, todo, predicted)


def _rows(
    op: str,
    size: int,
    blocks: int,
    clock: RankTimer,
    todo: dict[str, Callable[[], None]],
    predicted: dict[str, Any],
) -> list[Row]:
    """Time calls in turns, and set what was predicted beside it."""
    usual_s = clock.mean(median(float(np.squeeze(each)) for each in predicted.values()))
    found = _alternating(todo, blocks, max(1, min(MOST_CALLS, round(clock.block_s / usual_s))))
    n = clock.ranks.world_size
    return [
        {"op": op, "bytes": size, "ranks": n, "nodes": n // clock.ranks.local_world_size}
        | {"algorithm": name, "seconds": seconds, "wire": wire}
        | {"predicted_s": float(np.squeeze(predicted[name]))}
        for name, (seconds, wire) in found.items()
    ]


def _alternating(
    todo: dict[str, Callable[[], None]], blocks: int, calls: int
) -> dict[str, tuple[float, Row]]:
    """Median seconds of a call on the slowest rank, and bytes that left this host by interface."""
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    wire: dict[str, list[Row]] = {name: [] for name in todo}
    for number in range(blocks + 1):  # the first connects
        for name, call in todo.items():
            dist.barrier()
            before = sent_bytes()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            taken = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            after = sent_bytes()
            if number:
                seconds[name].append(taken.item())
                wire[name].append({key: (after[key] - before[key]) / calls for key in after})
    return {
        name: (
            median(seconds[name]),
            {key: median(each[key] for each in wire[name]) for key in wire[name][0]},
        )
        for name in todo
    }


def sent_bytes() -> dict[str, int]:
    """Bytes that left by each interface of this host's namespace, since it is up."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    columns = [line.replace(":", " ").split() for line in lines]
    return {column[0]: int(column[9]) for column in columns}


class _Block(nn.Module):
    """Something to shard."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def fsdp_steps(ranks: Ranks, sizes: Sequence[int], blocks: int) -> list[Row]:
    """Forward and backward passes of FSDP2 (ZeRO 1: one gathering and one scattering a step)."""
    todo, number = {}, 0
    for name in ("backend", "pairwise", "halving_doubling"):
        torch.manual_seed(0)
        layers = [_Block(256) for _ in range(4)]
        module = nn.Sequential(*layers)
        number = sum(each.numel() for each in module.parameters())
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        algorithm = None if name == "backend" else ShardAlgorithm(name, ranks.local_world_size)
        options = (1, MixedPrecisionPolicy(), OffloadPolicy(), algorithm)
        fsdp.shard(module, layers, mesh, *options)
        todo[name] = _step_of(module)
    found = _alternating(todo, blocks, 1)
    n = ranks.world_size
    least = 2 * 4 * number * (n - 1) // n * ranks.local_world_size
    return [
        {"op": "fsdp step", "algorithm": name, "ranks": n, "seconds": seconds, "wire": wire}
        | {"least_bytes": least}
        for name, (seconds, wire) in found.items()
    ]


def _step_of(module: nn.Module) -> Callable[[], None]:
    def step() -> None:
        fsdp.prepare_micro_batch(module, 1, is_last=True, reduces=True)
        module(torch.ones(8, 256)).sum().backward()
        module.zero_grad()

    return step


# ---- the driver ----------------------------------------------------------------------------------


def measure(task: str, hosts: int, per_host: int, rate: float | None, *wish: Any) -> list[Row]:
    """Rows of a set-up, from ranks in a laboratory of their own."""
    sizes, blocks = wish
    with tempfile.TemporaryDirectory() as folder, Laboratory(hosts, rate) as lab:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.collectives", "--worker", task]
        command += ["--file", file, "--blocks", blocks, "--sizes", *map(str, sizes)]
        ended = lab.run(command, timeout_s=900, ranks_per_host=per_host, folder=HERE.parent)
        for each in ended:
            if each.code:
                raise SystemExit(f"rank {each.rank} ended with {each.code}:\n{each.output}")
        return json.loads(file.read_text())


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """A table of rows; the fastest of each op and size is bold."""
    table = Table(title=title, title_justify="left")
    for name in ("op", "MiB", "algorithm", "ms", "of gloo's", "predicted", "wire MB", "of least"):
        table.add_column(name, justify="left" if name in ("op", "algorithm") else "right")
    for row in rows:
        same = [r for r in rows if (r["op"], r.get("bytes")) == (row["op"], row.get("bytes"))]
        gloo = next(each for each in same if each["algorithm"] == "backend")
        style = "bold" if row["seconds"] == min(each["seconds"] for each in same) else ""
        wire, least = wire_bytes(row), least_bytes(row)
        table.add_row(
            row["op"],
            f"{row['bytes'] / 2**20:.4g}" if "bytes" in row else "",
            row["algorithm"],
            f"{row['seconds'] * 1e3:.3g}",
            f"{row['seconds'] / gloo['seconds']:.2f}",
            f"{row['predicted_s'] / row['seconds'] - 1:+.0%}" if "predicted_s" in row else "",
            f"{wire / 1e6:.4g}",
            f"{wire / least:.3f}" if least >= LEAST_BYTES else "",
            style=style,
        )
    console.print(table)


def wire_bytes(row: Row) -> float:
    """Bytes over a host's link, or over loopback where there is one host."""
    return row["wire"]["eth0"] if row.get("nodes", 2) > 1 else row["wire"]["lo"]


def least_bytes(row: Row) -> float:
    """The theoretical minimum of what `wire_bytes` counts."""
    if "least_bytes" in row:
        return row["least_bytes"]
    parts = row["nodes"] if row["nodes"] > 1 else row["ranks"]
    passes = 2 if row["op"] == "all_reduce" else 1
    each = passes * (parts - 1) / parts * row["bytes"]
    return each if row["nodes"] > 1 else each * row["ranks"]


def misfit(rows: Sequence[Row]) -> dict[str, float]:
    """Median absolute error of the predicted seconds, of all rows and by algorithm."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        off = abs(row["predicted_s"] / row["seconds"] - 1)
        for name in ("all", row["algorithm"]):
            errors.setdefault(name, []).append(off)
    return {name: median(each) for name, each in errors.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", default="200mbit", help="of the slow link, as tc writes it")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and blocks: two minutes")
    for hidden in ("--worker", "--blocks", "--file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="*", type=int, default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        run_rank(given.worker, given.sizes, int(given.blocks), Path(given.file))
    about, rate = taken_with("benchmarks.collectives"), read_rate(given.rate)
    blocks, skip = (5, 2) if given.quick else (15, 1)
    slow, console = rate_text(rate), Console(width=110)
    found = {
        "2 ranks of one host": measure("exchanges", 1, 2, None, LOCAL[::skip], blocks),
        "4 ranks of one host": measure("exchanges", 1, 4, None, LOCAL[::skip], blocks),
        f"2 hosts with 2 ranks, {slow}": measure(
            "exchanges", 2, 2, rate, SLOW[::skip], max(3, blocks // 3)
        ),
        f"2 hosts with 1 rank, {slow}": measure("fsdp", 2, 1, rate, (), max(3, blocks // 3)),
    }
    for title, rows in found.items():
        show(console, title, rows)
        if "predicted_s" in rows[0]:
            told = ", ".join(f"{name} {off:.0%}" for name, off in misfit(rows).items())
            console.print(f"median error of the predicted seconds: {told}\n")
    priced = [row for rows in found.values() for row in rows if "predicted_s" in row]
    console.print(f"of all {len(priced)} predicted seconds: {misfit(priced)['all']:.0%}")
    file = keep(folder_of(given.results, about), "collectives", {"facts": about, "rows": found})
    console.print(f"results: {file}")


if __name__ == "__main__":
    main()
