"""What exact sums cost: the same decoder with `elastic.exact` and without, in turns.

How it works: gloo ranks on this machine make two trainers of one Job, and step them alternately, so
that whatever disturbs the machine disturbs both. The ratio is the median over pairs of steps, with
its quartiles; bytes are what the loopback interface counted in a step, all ranks together.

It is no measure of networks, and of small models: there sums are a larger part of a step.

    python -m benchmarks.exact [--steps 20] [--layouts dp=2 fsdp=2,zero=3] [--hidden-size 256]
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown, terminal_table
from paceline.comm.rendezvous import Ranks
from paceline.config.device import Device
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_job
from paceline.plan.resolve import resolve
from paceline.train.families import task_without_data
from paceline.train.trainer import Trainer

CPU = Device(name="CPU", kind="cpu", precisions=("fp32",))
LAYOUTS = ("dp=2", "fsdp=2,zero=1", "fsdp=2,zero=3", "pp=2,schedule=1f1b")
TITLES = ["layout", "plain, ms", "exact, ms", "ratio", "quartiles", "MB plain", "MB exact"]
EXACT = ("elastic.min_nodes=1", "elastic.exact=true")


class Pair(NamedTuple):
    """A step of each kind, without and with exact sums."""

    seconds: tuple[float, float]
    sent_bytes: tuple[int, int]


def job_of(layout: str, options: argparse.Namespace, *more: str) -> Job:
    """A decoder with 4 blocks, and 4 micro-batches on each of two ranks."""
    width, parts = options.hidden_size, layout.split(",")
    settings = [
        *(f"layout.{part}" for part in parts),
        *("layout.micro_batch=1", "layout.precision=fp32", "model.num_layers=4"),
        *(f"model.hidden_size={width}", f"model.ffn_size={4 * width}", "model.num_heads=4"),
        *("train.seq_len=256", "model.max_seq_len=256", "train.global_batch=8", *more),
    ]
    machine = Cluster(device=CPU, devices_per_node=2, num_nodes=1)
    return resolve(read_job(None, settings), machine).job


def _measured(rank: int, layout: str, options: argparse.Namespace) -> list[Pair]:
    ranks = Ranks(rank, 2, rank, 2)
    trainers = []
    for more in ((), EXACT):
        job = job_of(layout, options, *more)
        task = task_without_data(job, ranks)
        trainers.append((Trainer.of(job, ranks, task), task.steps_from(0)))

    def one(index: int, which: int) -> tuple[float, int]:
        trainer, steps = trainers[which]
        batches = next(steps)
        dist.barrier()
        before, began = _loopback_bytes(), time.perf_counter()
        trainer.step(index, batches)()
        dist.barrier()
        return time.perf_counter() - began, _loopback_bytes() - before

    pairs = []
    for index in range(options.steps + 2):
        order = (0, 1) if index % 2 else (1, 0)
        found = {which: one(index, which) for which in order}
        pairs.append(Pair((found[0][0], found[1][0]), (found[0][1], found[1][1])))
    return pairs[2:]  # the first make buffers and connections


def _loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def _rank_main(
    end: Connection, rank: int, folder: str, layout: str, options: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        end.send(_measured(rank, layout, options))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        end.send(traceback.format_exc())


def measure(layout: str, options: argparse.Namespace) -> list[Pair]:
    """Pairs of steps of a layout on two ranks, as rank 0 saw them."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, folder, layout, options)
            processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        try:
            found = [end.recv() for end in ends]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failed = [each for each in found if isinstance(each, str)]
    if failed:
        sys.exit(f"a rank failed:\n{failed[0]}")
    return list(found[0])


def row(layout: str, pairs: list[Pair]) -> list[str]:
    """Of the table."""
    ratios = [exact / plain for (plain, exact), _ in pairs]
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    plain_ms, exact_ms = (1e3 * median(pair.seconds[i] for pair in pairs) for i in (0, 1))
    plain_mb, exact_mb = (median(pair.sent_bytes[i] for pair in pairs) / 1e6 for i in (0, 1))
    times = [f"{plain_ms:.1f}", f"{exact_ms:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
    return [layout, *times, f"{plain_mb:.1f}", f"{exact_mb:.1f}"]


def main() -> None:
    """Run the benchmark, show the table and write the results."""
    options = _options()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    console, about = Console(highlight=False), taken_with("benchmarks.exact")
    found = {layout: measure(layout, options) for layout in options.layouts}
    rows = [row(layout, pairs) for layout, pairs in found.items()]
    console.print(terminal_table("A step with exact sums and without", TITLES, rows, ["layout"]))
    data: dict[str, Any] = {
        "taken": about,
        "hidden_size": options.hidden_size,
        "pairs": {layout: [pair._asdict() for pair in pairs] for layout, pairs in found.items()},
    }
    page = f"# Exact sums\n\n{markdown(TITLES, rows)}\n\n{signature(about)}\n"
    console.print(f"results: {keep(folder_of(options.results, about), 'exact', data, page)}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps of a layout")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="settings of two ranks")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the decoder")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


if __name__ == "__main__":
    main()
