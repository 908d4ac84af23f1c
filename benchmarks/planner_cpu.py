"""How right the planner is about training on the cores of this machine.

How it works: for 1, 2 and 4 ranks, `paceline bench` measures the machine; then random small Jobs
(decoders of various widths, lengths and batches; dp, fsdp with every ZeRO stage, tp, cp, pipeline
schedules, accumulation, recomputing) are predicted with what it wrote, and run. All Jobs of a
number of ranks run in one start of the ranks, in turns, so that a busy moment hits all alike; the
bench and the Jobs share no Job. The step is the median of all timed ones; the peak of memory is
counted from the allocator's events (`benchmarks.step_memory`), on the rank that holds most.

Then the choice: for a few models, every layout of a small space is run as well. How much longer
than the best measured step does the layout take that is predicted to be the fastest?

It says nothing about GPUs or networks: it checks the planner's own arithmetic, from measuring over
predicting to choosing, where everybody can run it. Leave the machine alone meanwhile.

    python -m benchmarks.planner_cpu [--jobs 30] [--seed 0] [--quick]
"""

import argparse
import math
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.step_memory import step_peak_bytes
from benchmarks.tables import markdown, terminal_table
from paceline.bench.clock import RankTimer
from paceline.bench.command import with_ranks
from paceline.bench.measure import BenchRequest, Part, calibrated, measure
from paceline.bench.rank_pool import RankProgress, TellProgress, counted_progress, run_on_ranks
from paceline.bench.reference import small_job
from paceline.bench.step import MeasuredStep, measure_jobs, num_measurements
from paceline.comm.forkserver_start import MEASURING, warm_up_ranks
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.schedule import DEMANDS
from paceline.machine.discovery import this_machine
from paceline.plan.points import Setting
from paceline.plan.price.step import predict

RANKS = (1, 2, 4)
_PARTS: tuple[Part, ...] = ("device", "collectives", "step")
MOST_FLOPS = 2e10
"""Of a step: a fraction of a second on two cores."""
TARGETS = {"step": 0.10, "memory": 0.05, "choice": 0.05}
"""Median error of the step, of the peak of memory; how much longer the chosen layout may take."""


# ---- the Jobs ----------------------------------------------------------------------------------


def random_jobs(cluster: Cluster, count: int, seed: int) -> list[Job]:
    """Small Jobs that can run, drawn by a seed: the same on every machine of as many ranks."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < count:
        try:
            job = _drawn(cluster, f"job-{len(jobs) + 1}", draw)
        except InputError:
            continue  # this combination can't run: draw another
        if _flops(job) <= MOST_FLOPS:
            jobs.append(job)
    return jobs


def _flops(job: Job) -> float:
    tokens = job.train.global_batch * job.train.seq_len
    return tokens * job.model.train_flops_per_token(job.train.seq_len)


def _drawn(cluster: Cluster, name: str, draw: random.Random) -> Job:
    ranks = cluster.devices_per_node
    hidden = draw.choice((64, 96, 128, 192, 256, 384))
    model = {
        "hidden_size": hidden,
        "ffn_size": hidden * draw.choice((2, 3, 4)),
        "num_heads": draw.choice((4, 8)),
        "num_layers": draw.choice((2, 4, 6, 8)),
        "vocab_size": draw.choice((512, 1024, 4096)),
    }
    layout = _drawn_layout(ranks, draw)
    share = layout["micro_batch"] * draw.choice((1, 2, 4))
    batch = share * layout["dp"] * layout["fsdp"]
    return small_job(cluster, name, model, draw.choice((64, 128, 256)), batch, layout)


def _drawn_layout(ranks: int, draw: random.Random) -> dict[str, Any]:
    sizes = dict.fromkeys(("dp", "fsdp", "tp", "pp", "cp"), 1)
    while ranks > 1:  # axes of 2, which may fall together
        sizes[draw.choice(tuple(sizes))] *= 2
        ranks //= 2
    layout: dict[str, Any] = {**sizes, "micro_batch": draw.choice((1, 2, 4))}
    layout["recompute"] = draw.choice(("none", "none", "full", "selective"))
    if sizes["fsdp"] > 1:
        layout["zero"] = draw.choice((1, 2, 3))
    if sizes["tp"] > 1:
        layout["sequence_parallel"] = draw.choice((True, False))
    if sizes["pp"] > 1:
        layout["schedule"] = draw.choice(tuple(DEMANDS))
    return layout


CHOICES: tuple[tuple[dict[str, int], int, int], ...] = (
    ({"hidden_size": 128, "num_heads": 4, "num_layers": 4, "vocab_size": 1024}, 128, 16),
    ({"hidden_size": 320, "num_heads": 4, "num_layers": 4, "vocab_size": 512}, 64, 8),
)
"""Model, tokens of a sample, samples of a step."""


def all_layouts(cluster: Cluster, number: int) -> list[Job]:
    """Every way of a small space to run one of CHOICES: which axis all ranks are on, the size of a
    micro-batch, and on one rank recomputing or not."""
    ranks = cluster.devices_per_node
    model, seq_len, batch = CHOICES[number]
    shapes = {**model, "ffn_size": 3 * model["hidden_size"]}
    jobs = []
    for axis in ("dp", "fsdp", "tp", "pp", "cp") if ranks > 1 else ("dp",):
        for micro_batch in (1, 4):
            for recompute in ("none",) if ranks > 1 else ("none", "full"):
                layout = {axis: ranks, "micro_batch": micro_batch, "recompute": recompute}
                name = f"choice-{number + 1}-{len(jobs) + 1}"
                with suppress(InputError):  # not enough samples for this
                    jobs.append(small_job(cluster, name, shapes, seq_len, batch, layout))
    return jobs


# ---- measuring and predicting ------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One Job: predicted and measured."""

    ranks: int
    name: str
    layout: str
    predicted_s: float
    measured_s: float
    spread: float
    """Half of what the middle half of the steps differs by, over the median."""
    predicted_bytes: float
    measured_bytes: float | None
    terms_s: dict[str, float]
    terms_bytes: dict[str, float]

    @property
    def step_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less one; not a number where it wasn't counted."""
        return self.predicted_bytes / (self.measured_bytes or math.nan) - 1


def case_of(measured: MeasuredStep, cluster: Cluster, peak_bytes: float | None = None) -> Case:
    """Predict what was measured; of the rank that holds most, its peak where it was counted."""
    job = measured.job
    prediction = predict(Setting.of(job.replace(cluster=cluster)), job.layout)
    times = sorted(measured.steps_s)
    quarter = len(times) // 4
    return Case(
        cluster.devices_per_node,
        job.name,
        describe(job),
        prediction.step_s,
        measured.step_s,
        (times[-1 - quarter] - times[quarter]) / 2 / measured.step_s,
        prediction.peak_memory_bytes,
        peak_bytes,
        {term: s for term, s in prediction.time_s.items() if s},
        {term: b for term, b in prediction.heaviest.terms.items() if b},
    )


def describe(job: Job) -> str:
    """What matters of a Job, in a line."""
    layout: Layout = job.layout
    axes = [f"{axis}{getattr(layout, axis)}" for axis in ("dp", "fsdp", "tp", "pp", "cp")]
    parts = [name for name in axes if not name.endswith(("dp1", "tp1", "pp1", "cp1"))] or ["one"]
    if layout.zero:
        parts.append(f"zero{layout.zero}")
    if layout.sequence_parallel:
        parts.append("sp")
    if layout.schedule != "none":
        parts.append(str(layout.schedule))
    if layout.recompute != "none":
        parts.append(str(layout.recompute))
    model, train = job.model, job.train
    sizes = f"h{model.hidden_size} L{model.num_layers} s{train.seq_len} b{train.global_batch}"
    return f"{sizes} mb{layout.micro_batch} {' '.join(parts)}"


def steps_of(
    jobs: Sequence[Job], num_rounds: int, ranks: Ranks, tell: TellProgress
) -> list[MeasuredStep]:
    """What every rank does."""
    say = counted_progress(tell, "jobs", num_measurements(len(jobs), num_rounds))
    return measure_jobs(ranks, jobs, num_rounds=num_rounds, steps_per_round=3, say=say)


def peaks_of(jobs: Sequence[Job], ranks: Ranks, tell: TellProgress) -> list[float]:
    """The peak of each Job, of the rank that holds most; what every rank does."""
    say, clock, peaks = counted_progress(tell, "memory", len(jobs)), RankTimer(ranks), []
    for job in jobs:
        peaks.append(clock.most(step_peak_bytes(job, ranks)))
        say(job.name)
    return peaks


def measured_cluster(num_ranks: int, *, quick: bool, hear: TellProgress) -> Cluster:
    """What `paceline bench` would write."""
    wish = BenchRequest(with_ranks(this_machine(), num_ranks), _PARTS, "planner_cpu.py", quick)
    return calibrated(run_on_ranks(num_ranks, "cpu", partial(measure, wish), hear), wish.source)


def measured_jobs(
    num_ranks: int, jobs: Sequence[Job], num_rounds: int, hear: TellProgress
) -> list[MeasuredStep]:
    """Run Jobs in turns, in one start of the ranks."""
    return run_on_ranks(num_ranks, "cpu", partial(steps_of, jobs, num_rounds), hear)


@dataclass(frozen=True)
class Choice:
    """Which layout of a small space is predicted to be the fastest, and which one is."""

    ranks: int
    number: int
    chosen: str
    best: str
    regret: float
    """Measured step of the chosen layout over that of the best, less one."""

    @classmethod
    def of(cls, number: int, cases: Sequence[Case]) -> "Choice":
        """Compare all layouts of one of CHOICES."""
        chosen = min(cases, key=lambda case: case.predicted_s)
        best = min(cases, key=lambda case: case.measured_s)
        regret = chosen.measured_s / best.measured_s - 1
        return cls(chosen.ranks, number, chosen.layout, best.layout, regret)


# ---- figures -----------------------------------------------------------------------------------


def verdict(cases: Sequence[Case], choices: Sequence[Choice]) -> dict[str, float]:
    """The figures that TARGETS are for."""
    return {
        "step": median(abs(case.step_error) for case in cases),
        "memory": median(abs(case.memory_error) for case in cases),
        "choice": max((choice.regret for choice in choices), default=0.0),
    }


COLUMNS = ("ranks", "job", "predicted", "measured", "error", "spread", "MB", "measured", "error")


def rows(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """Cells of COLUMNS."""
    return [
        (
            str(case.ranks),
            case.layout,
            f"{1e3 * case.predicted_s:.1f} ms",
            f"{1e3 * case.measured_s:.1f} ms",
            f"{case.step_error:+.1%}",
            f"{case.spread:.1%}",
            f"{case.predicted_bytes / 1e6:.1f}",
            "" if case.measured_bytes is None else f"{case.measured_bytes / 1e6:.1f}",
            "" if case.measured_bytes is None else f"{case.memory_error:+.1%}",
        )
        for case in cases
    ]


def sentences(cases: Sequence[Case], choices: Sequence[Choice]) -> list[str]:
    """What the figures say."""
    found = verdict(cases, choices)
    text = [
        f"{name}: {found[name]:.1%}, wanted {wanted:.0%} or less"
        for name, wanted in TARGETS.items()
    ]
    return text + [
        f"{choice.ranks} ranks, choice {choice.number + 1}: {choice.chosen}; best {choice.best}; "
        f"{choice.regret:+.1%}"
        for choice in choices
    ]


def write_results(
    folder: Path, about: dict[str, Any], cases: Sequence[Case], choices: Sequence[Choice]
) -> Path:
    """Write planner_cpu.json with every figure, and planner_cpu.md with the table."""
    figures = {
        "facts": about,
        "verdict": verdict(cases, choices),
        "cases": [asdict(case) for case in cases],
        "choices": [asdict(choice) for choice in choices],
    }
    table = markdown(COLUMNS, rows(cases), ["job"])
    found = [f"- {each}" for each in sentences(cases, choices)]
    text = "\n".join([table, *found, "", signature(about)])
    return keep(folder, "planner_cpu", figures, text + "\n")


def run(options: argparse.Namespace, about: dict[str, Any], console: Console) -> None:
    """Measure, predict and compare for every number of ranks; the results grow with each."""
    cases: list[Case] = []
    choices: list[Choice] = []
    folder = folder_of(options.results, about)
    shares = {ranks: options.jobs // len(options.ranks) for ranks in options.ranks}
    for ranks in options.ranks:
        with console.status("") as status:
            hear = partial(_show, console, status, ranks)
            cluster = measured_cluster(ranks, quick=options.quick, hear=hear)
            jobs = random_jobs(cluster, shares[ranks], options.seed + ranks)
            spaces = [all_layouts(cluster, number) for number in range(len(CHOICES))]
            measured = [
                each
                for some in (jobs, *spaces)
                for each in measured_jobs(ranks, some, options.rounds, hear)
            ]
            names = [job.name for job in jobs]
            counted = run_on_ranks(ranks, "cpu", partial(peaks_of, jobs), hear)
            peaks = dict(zip(names, counted, strict=True))
            found = {
                each.job.name: case_of(each, cluster, peaks.get(each.job.name)) for each in measured
            }
        cases += [found[name] for name in names]
        choices += [
            Choice.of(number, [found[job.name] for job in space])
            for number, space in enumerate(spaces)
        ]
        console.print(terminal_table(f"{ranks} ranks", COLUMNS, rows([*found.values()]), ["job"]))
        stack = cluster.stack
        console.print({} if stack is None else dict(stack.constants))
        console.print("\n".join(sentences(cases, choices)))
        console.print(f"results: {write_results(folder, about, cases, choices)}")


def _show(console: Console, status: Any, ranks: int, news: RankProgress) -> None:
    text = f"{ranks} ranks, {news.part} {news.done}/{news.total}: {news.what}"
    if console.is_terminal:
        status.update(text)
    else:
        console.print(datetime.now(UTC).strftime("%H:%M:%S"), text)


def main() -> None:
    """Run the benchmark, show the tables and write the results."""
    options = _options()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are CPU processes, wherever this runs
    warm_up_ranks(MEASURING)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    about = taken_with("benchmarks.planner_cpu", "numpy")
    run(options, about, console)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=30, help="random Jobs over all ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--rounds", type=int, default=4, help="turns of three timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    if options.jobs < len(options.ranks):
        parser.error("--jobs must be at least one for each number of ranks")
    return options


if __name__ == "__main__":
    main()
