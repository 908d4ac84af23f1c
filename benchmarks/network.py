"""What crosses the wires, and what it costs: ways of exchanging gradients on links of many rates.

How it works: the hosts are namespaces of this machine (benchmarks/netlab), with one rank and one
core each where there are as many. A cell is a number of hosts and a rate of their links. Within a
cell all ways take turns in one process group (network_cell.py): PyTorch's DDP in fp32, with its
fp16 hook and its PowerSGD hook; ours through Paceline's own Trainer, a Job setting each; and, as
the control, the same steps without any exchange. Step times are medians over all steps, with the
least and most block median; ratios are taken within a round, then their median. Bytes are what a
host's interface counted. Efficiency is the control's step time over that of the way.

A rank's micro-batch is 8 x 128 tokens and a step has one of them; the decoder has 12.2 M
parameters. With more hosts than cores the hosts share the cores, the control as well.

`--loss` is another part: the loss of each way after as many tokens, on three seeds, links unshaped.

It says nothing about latency (there is none) or GPUs. Leave the machine alone meanwhile.

    python -m benchmarks.network [--quick] [--hosts 2] [--rate 200mbit] [--ways DDP none int8]
    python -m benchmarks.network --loss [--steps 300]
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from benchmarks.netlab import Laboratory, read_rate, why_not
from benchmarks.network_cell import Block, Way
from benchmarks.network_cluster import MeasuringError, measured_clusters
from benchmarks.network_table import (
    CONTROL,
    PEER,
    cell_lines,
    loss_lines,
    markdown,
    place_of,
    rows,
    summary,
)
from paceline.bench.command import to_text
from paceline.comm.topology import num_cores, this_machine
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_cluster, read_job, to_raw, to_toml
from paceline.plan.points import Setting
from paceline.plan.price.step import predict
from paceline.plan.resolve import resolve
from paceline.plan.search.choose import plan_job
from paceline.train.data import prepare

ROOT = Path(__file__).resolve().parents[1]
HOSTS = (2, 4)
RATES = ("50mbit", "200mbit", "1gbit", "none")
SEEDS = (0, 1, 2)
_STEPS = 10_000
"""Of the timed Jobs' schedule, not that they were done."""
_CELL_LIMIT_S = 3600
_WARM_LIMIT_S = 900
_COMPRESS = ("none", "bf16", "int8", "int4", "onebit", "topk:0.01", "powersgd:4", "auto")
_WARM_UP = {"powersgd:4": {"comm.warmup_steps": 2}}
"""PyTorch's hook begins exactly as well."""
WAYS = (
    Way(CONTROL, "alone"),
    Way(PEER, "ddp", settings={"layout.bucket_mib": 25.0}),
    Way("DDP fp16 hook", "ddp", "fp16"),
    Way("DDP PowerSGD 1", "ddp", "powersgd:1"),
    Way("DDP PowerSGD 4", "ddp", "powersgd:4"),
    *(
        Way(mode, "paceline", settings={"comm.dp.compress": mode, **_WARM_UP.get(mode, {})})
        for mode in _COMPRESS
    ),
)
"""All of them; what this version of Paceline refuses is left out, and said."""
MODEL = {
    "family": "decoder",
    "vocab_size": 4096,
    "hidden_size": 384,
    "ffn_size": 1024,
    "num_layers": 6,
    "num_heads": 6,
    "num_kv_heads": 6,
    "max_seq_len": 128,
    "tie_embeddings": True,
}


SMALL_MODEL = {
    **MODEL,
    "hidden_size": 96,
    "ffn_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
}
"""Of the losses, unless the whole one is asked for: they take many steps."""


class CellError(Exception):
    """A cell ended badly: the text is the end of what its ranks wrote."""


def job_of(
    way: Way,
    num_hosts: int,
    steps: int,
    seed: int = 0,
    *,
    cluster: Cluster | None = None,
    model: Mapping[str, Any] = MODEL,
) -> Job:
    """The concrete Job of a way: one rank on each host.

    Args:
        way: which one.
        num_hosts: with a rank each.
        steps: of its schedule.
        seed: of weights and batches.
        model: of the Job.
        cluster: a measured one, by which the planner chooses; None: simple rules do.

    Raises:
        InputError: this version of Paceline can't do it.
    """
    sets = {
        "name": "network",
        "cluster.num_nodes": num_hosts,
        "cluster.devices_per_node": 1,
        "layout.dp": num_hosts,
        "layout.micro_batch": 8,
        "layout.precision": "fp32",
        "layout.compile": False,
        "layout.recompute": "none",
        "train.global_batch": 8 * num_hosts,
        "train.seq_len": 128,
        "train.steps": steps,
        "train.seed": seed,
        **{f"model.{key}": value for key, value in model.items()},
        **way.settings,
    }
    text = [f"{key}={json.dumps(value)}" for key, value in sets.items()]
    job = read_job(None, text)
    if cluster is not None:
        return plan_job(job, cluster).job
    return resolve(job, this_machine().replace(num_nodes=num_hosts, devices_per_node=1)).job


def predicted_s(way: Way, job: Job) -> float | None:
    """Step time of a way by the planner; None: it knows nothing of PyTorch's hooks."""
    if way.hook != "none":
        return None
    if way.kind == "alone":
        job = _on_one_rank(job)
    return predict(Setting.of(job), job.layout).step_s


def _on_one_rank(job: Job) -> Job:
    """What a rank of the Job computes, without the others."""
    return job.replace(
        cluster=job.cluster.replace(num_nodes=1, tiers=()),
        layout=job.layout.replace(dp=1),
        train=job.train.replace(global_batch=job.layout.micro_batch),
    )


def form_of(way: Way, job: Job) -> str:
    """What our gradients travel as."""
    if way.kind != "paceline":
        return ""
    return f"{job.comm.dp.compress}, {job.layout.bucket_mib:g} MiB"


def possible(ways: Sequence[Way], num_hosts: int, say: Callable[[str], None]) -> list[Way]:
    """The ways that Paceline can go, and a line for each that it can't."""
    found = []
    for way in ways:
        try:
            job_of(way, num_hosts, _STEPS)
        except InputError as error:
            say(f"left out: {way.name} ({error})")
        else:
            found.append(way)
    return found


def run_cell(
    part: str,
    ways: Sequence[tuple[Way, Job]],
    num_hosts: int,
    rate_bits_per_s: float | None,
    num_rounds: int,
) -> Any:
    """Run network_cell.py on hosts of a laboratory of its own.

    Args:
        part: "times" or "loss".
        ways: with their Jobs.
        num_hosts: with a rank each.
        rate_bits_per_s: of the links, from the end of the warm-up on; None: unshaped.
        num_rounds: turns of each way.

    Returns:
        what rank 0 wrote.

    Raises:
        CellError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as place, Laboratory(num_hosts) as lab:
        folder = Path(place)
        plan = {"part": part, "num_rounds": num_rounds, "ways": [asdict(way) for way, _ in ways]}
        (folder / "plan.json").write_text(json.dumps(plan))
        for at, (_, job) in enumerate(ways):
            (folder / f"{at}.toml").write_text(to_toml(job))
        command = [sys.executable, "-m", "benchmarks.network_cell", folder]
        with lab.start(command, folder=ROOT) as ranks:
            deadline = time.monotonic() + _WARM_LIMIT_S
            while part == "times" and not (folder / "warm").exists():
                if not ranks.are_running or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            lab.set_rate(rate_bits_per_s)
            (folder / "shaped").touch()
            finished = ranks.wait(_CELL_LIMIT_S)
        bad = [rank for rank in finished if rank.code != 0]
        if bad:
            raise CellError("\n".join(f"rank {r.rank}: {r.output[-2000:]}" for r in bad))
        return json.loads((folder / "result.json").read_text())


def measure_times(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All cells; the table grows on the terminal. Cells of earlier runs stay with --add."""
    file = options.folder / "network.json"
    cells = json.loads(file.read_text())["cells"] if options.add and file.exists() else []
    for num_hosts in options.hosts:
        clusters = clusters_of(num_hosts, options.rate, options.folder / "network_clusters")
        ways = possible(_chosen(options), num_hosts, say)
        for text in options.rate:
            cell = measure_cell(num_hosts, text, ways, clusters[text], options.rounds)
            cells = [each for each in cells if place_of(each) != place_of(cell)] + [cell]
            for line in cell_lines(cell):
                say("  ".join(line))
    cells.sort(key=place_of)
    return {"cells": cells, "markdown": summary(cells)}


def clusters_of(num_hosts: int, rates: Sequence[str], folder: Path) -> dict[str, Cluster]:
    """Clusters by rate: those measured before, and the others measured now and kept."""
    files = {rate: folder / f"{num_hosts}x{rate}.toml" for rate in rates}
    missing = [rate for rate, file in files.items() if not file.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob(f"{num_hosts}x*.toml"))
        known = read_cluster(earlier[0]) if earlier else None
        for rate, cluster in measured_clusters(num_hosts, missing, known).items():
            files[rate].write_text(to_text(cluster))
    return {rate: read_cluster(file) for rate, file in files.items()}


def measure_cell(
    num_hosts: int, rate: str, ways: Sequence[Way], cluster: Cluster, num_rounds: int
) -> dict[str, Any]:
    """Time and predict all ways on links of a rate: what stands in the results of it."""
    bits_per_s = read_rate(rate)
    load = os.getloadavg()[0]
    jobs = {way: job_of(way, num_hosts, _STEPS, cluster=cluster) for way in ways}
    blocks = run_cell("times", [*jobs.items()], num_hosts, bits_per_s, num_rounds)
    about = {
        way.name: {"form": form_of(way, job), "predicted_s": predicted_s(way, job)}
        for way, job in jobs.items()
    }
    table = [replace(row, **about[row.way]) for row in rows([Block(**block) for block in blocks])]
    return {
        "num_hosts": num_hosts,
        "rate_bits_per_s": bits_per_s,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average_before": load,
        "rows": [asdict(row) for row in table],
        "blocks": blocks,
    }


def measure_losses(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Every way on every seed."""
    num_hosts = options.hosts[0]
    ways = [way for way in possible(_chosen(options), num_hosts, say) if way.kind != "alone"]
    model = MODEL if options.whole else SMALL_MODEL
    found: dict[str, dict[str, list[float]]] = {}
    curves = []
    for seed in options.seeds:
        jobs = [(way, job_of(way, num_hosts, options.steps, seed, model=model)) for way in ways]
        result = run_cell("loss", jobs, num_hosts, None, 1)
        curves.append(result)
        for name, of in result.items():
            last = of["losses"][-max(1, options.steps // 20) :]
            entry = found.setdefault(name, {"loss": [], "eval_loss": []})
            entry["loss"].append(mean(last))
            entry["eval_loss"].append(of["eval_loss"])
            say(f"seed {seed}  {name:<16} {mean(last):.4f}  held-out {of['eval_loss']:.4f}")
    titles = ("way", "loss, last steps", "held-out loss (seeds)", f"to {PEER}")
    about = f"{options.steps} steps, {jobs[0][1].model.num_params / 1e6:.1f} M parameters\n"
    text = f"{markdown(titles, loss_lines(found))}\n{about}"
    return {"curves": curves, "found": found, "markdown": text}


def _chosen(options: argparse.Namespace) -> list[Way]:
    return [way for way in WAYS if not options.ways or way.name in (CONTROL, PEER, *options.ways)]


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were taken with and on."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    job = job_of(WAYS[1], options.hosts[0], _STEPS)
    prepare(job.data)  # tokenised once, not by every rank
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.network", *sys.argv[1:]]),
        "commit": commit or None,
        "versions": {name: version(name) for name in ("paceline", "torch")},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "device": this_machine().known_device.name,
        "cores": num_cores(),
        "load_average_before": os.getloadavg(),
        "num_params": job.model.num_params,
        "job": to_raw(job),
    }


def write_results(folder: Path, name: str, about: dict[str, Any], result: dict[str, Any]) -> Path:
    """Write <name>.json with every block, and <name>.md with the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = result.pop("markdown")
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"facts": about, **result}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(
        f"{text}\n{about['num_params'] / 1e6:.1f} M parameters, {about['cores']} cores of "
        f"{about['device']} shared by the hosts, load {about['load_average_before'][0]:.1f} "
        f"before; {about['date']}, commit {about['commit']}, torch {about['versions']['torch']}: "
        f"`{about['command']}`\n"
    )
    return file


def main() -> None:
    options = _options()
    console = Console(highlight=False)
    if problem := why_not():
        sys.exit(problem)
    about = facts(options)
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    options.folder = options.results / f"{device}-{num_cores()}-cores"
    try:
        work = measure_losses if options.loss else measure_times
        result = work(options, console.print)
    except (CellError, MeasuringError, InputError) as failure:
        sys.exit(str(failure))
    name = "network_loss" if options.loss else "network"
    console.print(f"results: {write_results(options.folder, name, about, result)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 hosts, 200 Mbit/s and unshaped")
    parser.add_argument("--hosts", type=int, nargs="+", default=[*HOSTS])
    parser.add_argument("--rate", nargs="+", default=[*RATES], help="50mbit, 1gbit, none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", help="names of ways beside the control and DDP fp32")
    parser.add_argument("--add", action="store_true", help="keep cells of earlier runs")
    parser.add_argument("--loss", action="store_true", help="the loss, not the time")
    parser.add_argument("--steps", type=int, default=300, help="of --loss, 20 or more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS], help="of --loss")
    parser.add_argument("--whole", action="store_true", help="--loss with the network of the times")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    if options.quick:
        options.hosts, options.rate, options.rounds = [2], ["200mbit", "none"], 3
    return options


if __name__ == "__main__":
    main()
