"""What crosses the wires, and what it costs: ways of exchanging gradients on links of many rates.

How it works: the hosts are namespaces of this machine (benchmarks/netlab), with one rank and one
core each where there are as many. A cell is a number of hosts and a rate of their links. Within a
cell all ways take turns in one process group (network_cell.py): PyTorch's DDP in fp32, with its
fp16 hook and its PowerSGD hook; ours through Paceline's own Trainer, a Job setting each; and, as
the control, the same steps without any exchange. Step times are medians over all steps, with the
least and most block median; ratios are taken within a round, then their median. Bytes are what a
host's interface counted. Efficiency is the control's step time over that of the way.

The ways named "shards" are FSDP2 at ZeRO-2 over all hosts, the others replicas.

Workers under local updates (DiLoCo, streaming) meet in some steps only: their turn is one whole
round of exchanges, as many steps as there are between two, and its mean is the step time. (The
control's blocks are then as long, and its median is that of more steps.) `--no-local` leaves them
out where a cell has to be quick.

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
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from benchmarks.netlab import Laboratory, read_rate, why_not
from benchmarks.network_cell import Block, Way
from benchmarks.network_cluster import MeasuringError, measured_clusters
from benchmarks.network_table import (
    CONTROL,
    LEFT,
    PEER,
    cell_lines,
    loss_lines,
    place_of,
    rows,
    summary,
)
from benchmarks.network_ways import (
    LOCAL,
    MODEL,
    SHARDS,
    SMALL_MODEL,
    STEPS,
    WAYS,
    form_of,
    job_of,
    possible,
    predicted_s,
)
from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.bench.command import to_text
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_cluster, to_raw, to_toml
from paceline.train.data import prepare

HOSTS = (2, 4)
RATES = ("50mbit", "200mbit", "1gbit", "none")
SEEDS = (0, 1, 2)
_CELL_LIMIT_S = 4 * 3600
_WARM_LIMIT_S = 900


class CellError(Exception):
    """A cell ended badly: the text is the end of what its ranks wrote."""


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
    """All cells; the table grows on the terminal. With --add cells and Clusters of earlier runs
    stay; else both are measured in this run, of one quiet hour or one busy one."""
    file = options.folder / f"{_result_name(options)}.json"
    cells = json.loads(file.read_text())["cells"] if options.add and file.exists() else []
    for num_hosts in options.hosts:
        folder = options.folder / "network_clusters"
        clusters = clusters_of(num_hosts, options.rate, folder, anew=not options.add)
        ways = possible(_chosen(options), num_hosts, say)
        for text in options.rate:
            cell = measure_cell(num_hosts, text, ways, clusters[text], options.rounds)
            cells = [each for each in cells if place_of(each) != place_of(cell)] + [cell]
            for line in cell_lines(cell):
                say("  ".join(line))
    cells.sort(key=place_of)
    return {"cells": cells, "markdown": summary(cells)}


def clusters_of(
    num_hosts: int, rates: Sequence[str], folder: Path, *, anew: bool
) -> dict[str, Cluster]:
    """Clusters by rate: those measured before, unless anew; the others are measured and kept."""
    files = {rate: folder / f"{num_hosts}x{rate}.toml" for rate in rates}
    missing = [rate for rate, file in files.items() if anew or not file.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [] if anew else sorted(folder.glob(f"{num_hosts}x*.toml"))
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
    jobs = {way: job_of(way, num_hosts, STEPS, cluster=cluster) for way in ways}
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
    text = f"{markdown(titles, loss_lines(found), LEFT)}\n{about}"
    return {"curves": curves, "found": found, "markdown": text}


def _chosen(options: argparse.Namespace) -> list[Way]:
    asked = (CONTROL, PEER, *(options.ways or (way.name for way in WAYS)))
    left_out = LOCAL if options.no_local else ()
    return [way for way in WAYS if way.name in asked and way not in left_out]


def _result_name(options: argparse.Namespace) -> str:
    """Workers alone have a file of their own: their control's turns are as long as their rounds;
    and shards alone, beside which the ways of replicas needn't be measured again."""
    if options.loss:
        return "network_loss"
    names = {way.name for way in _chosen(options)} - {CONTROL, PEER}
    for result, ways in (("network_workers", LOCAL), ("network_shards", SHARDS)):
        if names and names <= {way.name for way in ways}:
            return result
    return "network"


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were taken with and on."""
    job = job_of(WAYS[1], options.hosts[0], STEPS)
    prepare(job.data)  # tokenised once, not by every rank
    about = {"num_params": job.model.num_params, "job": to_raw(job)}
    return {**taken_with("benchmarks.network"), **about}


def write_results(folder: Path, name: str, about: dict[str, Any], result: dict[str, Any]) -> Path:
    """Write <name>.json with every block, and <name>.md with the table."""
    text = result.pop("markdown")
    size = f"{about['num_params'] / 1e6:.1f} M parameters, hosts share"
    page = f"{text}\n{size} {signature(about)}\n"
    return keep(folder, name, {"facts": about, **result}, page)


def main() -> None:
    options = _options()
    console = Console(highlight=False)
    if problem := why_not():
        sys.exit(problem)
    about = facts(options)
    options.folder = folder_of(options.results, about)
    try:
        work = measure_losses if options.loss else measure_times
        result = work(options, console.print)
    except (CellError, MeasuringError, InputError) as failure:
        sys.exit(str(failure))
    file = write_results(options.folder, _result_name(options), about, result)
    console.print(f"results: {file}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 hosts, 2 rates, no workers")
    parser.add_argument("--hosts", type=int, nargs="+", default=[*HOSTS])
    parser.add_argument("--rate", nargs="+", default=[*RATES], help="10mbit, 1gbit, none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", help="names of ways beside the control and DDP fp32")
    parser.add_argument("--no-local", action="store_true", help="no workers that meet seldom")
    parser.add_argument("--add", action="store_true", help="keep earlier cells and Clusters")
    parser.add_argument("--loss", action="store_true", help="the loss, not the time")
    parser.add_argument("--steps", type=int, default=300, help="of --loss, 20 or more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS], help="of --loss")
    parser.add_argument("--whole", action="store_true", help="--loss with the network of the times")
    options = parser.parse_args()
    if options.quick:
        options.hosts, options.rate, options.rounds = [2], ["200mbit", "none"], 3
        options.no_local = True
    return options


if __name__ == "__main__":
    main()
