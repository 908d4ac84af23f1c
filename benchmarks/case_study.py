"""The steps of docs/case-study.md, small and real: a ResNet on two hosts of two ranks each.

How it works: the hosts are namespaces of this machine (benchmarks/netlab) with a core each where
there are enough, and a link of a chosen rate between them. Every step of the study is a Job through
Paceline's own Trainer, on top of the steps before it: fp32 as PyTorch comes (the baseline), bf16,
compiled blocks (which fuse batch norm, residual sum and ReLU on a CPU), small buckets, all-reduces
in two tiers, 8-bit gradients. All of them live in one process group and take turns in short blocks
(case_study_cell.py). Step times are medians over all steps, with the least and most block median;
gains are taken within a round, then their median. Bytes are what a host's interface counted.
"compute only" is the baseline without any exchange.

Compiled blocks are timed on top of bf16 but not carried on: the table says what they gave.

Predictions are the planner's, by a Cluster that the same processes measured; no constant is fitted
to these steps.

Nothing here says what a GPU gains. Leave the machine alone meanwhile; it takes about five minutes.

    python -m benchmarks.case_study [--rate 1gbit] [--rounds 5]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmarks.netlab import Laboratory, rate_text, read_rate, why_not
from benchmarks.network import CellError
from benchmarks.network_cell import Block, Way
from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_cluster, read_job, to_raw, to_toml
from paceline.config.vision import ResNet
from paceline.machine.discovery import this_machine
from paceline.plan.convnet import predict_convnet
from paceline.plan.resolve import resolve

HOSTS, RANKS_PER_HOST = 2, 2
_LIMIT_S, _WARM_LIMIT_S = 1800, 1200
CONTROL, BASELINE = "compute only", "baseline"
_BF16 = {"layout.precision": "bf16"}
_SMALL_BUCKETS = {**_BF16, "layout.bucket_mib": 2.0}
WAYS = (
    Way(CONTROL, "alone"),
    Way(BASELINE, "paceline"),
    Way("bf16", "paceline", settings=_BF16),
    Way("compiled blocks", "paceline", settings={**_BF16, "layout.compile": True}),
    Way("buckets of 2 MiB", "paceline", settings=_SMALL_BUCKETS),
    Way(
        "hierarchical all-reduce",
        "paceline",
        settings={**_SMALL_BUCKETS, "comm.dp.algorithm": "hierarchical"},
    ),
    Way("8-bit gradients", "paceline", settings={**_SMALL_BUCKETS, "comm.dp.compress": "int8"}),
)
ON_TOP_OF = {
    CONTROL: None,
    BASELINE: None,
    "bf16": BASELINE,
    "compiled blocks": "bf16",
    "buckets of 2 MiB": "bf16",
    "hierarchical all-reduce": "buckets of 2 MiB",
    "8-bit gradients": "buckets of 2 MiB",
}
"""What each step is compared with besides the baseline."""
_JOB = """
name = "case-study"
[model]
family = "resnet"
depth = 18
image_size = 64
num_classes = 100
[data]
source = "images"
[layout]
precision = "fp32"
compile = false
bucket_mib = 25.0
[train]
steps = 10000
global_batch = 64
"""


@dataclass(frozen=True)
class Row:
    """A step of the study."""

    way: str
    step_s: tuple[float, float, float]
    """Median over all steps; least and most median of a block."""
    sent_bytes: float
    """By a host, per step."""
    over_baseline: float
    """How many times as fast."""
    over_before: float | None
    """Than what it is on top of."""
    predicted_s: float


def job_of(way: Way, num_hosts: int = HOSTS, ranks_per_host: int = RANKS_PER_HOST) -> Job:
    """The concrete Job of a step of the study."""
    machine = this_machine().replace(num_nodes=num_hosts, devices_per_node=ranks_per_host)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(_JOB)
        job = read_job(file, [f"{key}={json.dumps(value)}" for key, value in way.settings.items()])
    return resolve(job, machine).job


def rows(blocks: Sequence[Block], predicted: Mapping[str, float]) -> list[Row]:
    """The table's rows, in the order of WAYS."""
    typical = {(block.way, block.round): median(block.steps_s) for block in blocks}
    rounds = sorted({block.round for block in blocks})

    def over(other: str, name: str) -> float:
        return median(typical[other, number] / typical[name, number] for number in rounds)

    table = []
    for name in predicted:
        mine = [block for block in blocks if block.way == name]
        of_blocks = [typical[name, number] for number in rounds]
        step_s = median(step for block in mine for step in block.steps_s)
        before = ON_TOP_OF[name]
        table.append(
            Row(
                name,
                (step_s, min(of_blocks), max(of_blocks)),
                mean(block.sent_bytes for block in mine),
                over(BASELINE, name),
                None if before is None else over(before, name),
                predicted[name],
            )
        )
    return table


def predicted_s(way: Way, job: Job, cluster: Cluster) -> float:
    """Step time by the planner."""
    network, layout, batch = job.model, job.layout, job.train.global_batch
    assert isinstance(network, ResNet)
    if way.kind == "alone":
        batch //= layout.num_ranks
        layout = layout.replace(dp=1)
        cluster = cluster.replace(num_nodes=1, devices_per_node=1, tiers=())
    return predict_convnet(network, cluster, layout, batch, comm=job.comm).step_s


def run(ways: Sequence[Way], rate: str, num_rounds: int) -> tuple[list[Block], Cluster]:
    """Run case_study_cell.py on a laboratory of its own.

    Raises:
        CellError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as place, Laboratory(HOSTS) as lab:
        folder = Path(place)
        plan = {"num_rounds": num_rounds, "ways": [asdict(way) for way in ways]}
        (folder / "plan.json").write_text(json.dumps(plan))
        for at, way in enumerate(ways):
            (folder / f"{at}.toml").write_text(to_toml(job_of(way)))
        command = [sys.executable, "-m", "benchmarks.case_study_cell", folder]
        with lab.start(command, ranks_per_host=RANKS_PER_HOST, folder=ROOT) as ranks:
            deadline = time.monotonic() + _WARM_LIMIT_S
            while not (folder / "warm").exists():
                if not ranks.are_running or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            lab.set_rate(read_rate(rate))
            (folder / "shaped").touch()
            finished = ranks.wait(_LIMIT_S)
        bad = [rank for rank in finished if rank.code != 0]
        if bad:
            raise CellError("\n".join(f"rank {r.rank}: {r.output[-2000:]}" for r in bad))
        blocks = [Block(**block) for block in json.loads((folder / "result.json").read_text())]
        return blocks, read_cluster(folder / "cluster.toml")


_TITLES = (
    *("way", "step, s", "MB sent a host", "x baseline", "x the step before"),
    *("predicted, s", "predicted x baseline"),
)


def lines(table: Sequence[Row]) -> list[tuple[str, ...]]:
    """Rows as text."""
    first = next(row.predicted_s for row in table if row.way == BASELINE)
    return [
        (
            row.way,
            f"{row.step_s[0]:.3f} ({row.step_s[1]:.3f} – {row.step_s[2]:.3f})",
            f"{row.sent_bytes / 1e6:.1f}",
            f"{row.over_baseline:.2f}",
            "" if row.over_before is None else f"{row.over_before:.2f}",
            f"{row.predicted_s:.3f}",
            f"{first / row.predicted_s:.2f}",
        )
        for row in table
    ]


def main() -> None:
    options = _options()
    if problem := why_not():
        sys.exit(problem)
    ways = [way for way in WAYS if way.name not in options.leave_out]
    about = taken_with("benchmarks.case_study")
    began = time.monotonic()
    try:
        blocks, cluster = run(ways, options.rate, options.rounds)
    except (CellError, InputError) as failure:  # a machine may have no bf16
        sys.exit(str(failure))
    predicted = {way.name: predicted_s(way, job_of(way), cluster) for way in ways}
    table = rows(blocks, predicted)
    file = write(folder_of(options.results, about), about, options.rate, table, blocks, cluster)
    Console(highlight=False).print(file.with_suffix(".md").read_text(), soft_wrap=True)
    print(f"{time.monotonic() - began:.0f} s; results: {file}")


def write(
    folder: Path,
    about: dict[str, Any],
    rate: str,
    table: Sequence[Row],
    blocks: Sequence[Block],
    cluster: Cluster,
) -> Path:
    """Write case_study.json with every block, and case_study.md with the table."""
    job = job_of(WAYS[1])
    assert isinstance(job.model, ResNet)
    result = {
        "facts": {**about, "job": to_raw(job)},
        "rate_bits_per_s": read_rate(rate),
        "rows": [asdict(row) for row in table],
        "blocks": [asdict(block) for block in blocks],
        "cluster": to_raw(cluster),
    }
    what = (
        f"ResNet-{job.model.depth} ({job.model.num_params / 1e6:.1f} M parameters), images of "
        f"{job.model.image_size} x {job.model.image_size}, {job.micro_batch} a rank, "
        f"{HOSTS} hosts x {RANKS_PER_HOST} ranks, {rate_text(read_rate(rate))} between them; "
    )
    page = f"{markdown(_TITLES, lines(table), ['way'])}\n{what}{signature(about)}\n"
    return keep(folder, "case_study", result, page)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", default="1gbit", help="of each host's link: 200mbit, none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leave-out", nargs="*", default=[], help='names: "compiled blocks"')
    return parser.parse_args()


if __name__ == "__main__":
    main()
