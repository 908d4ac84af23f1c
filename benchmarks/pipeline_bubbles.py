"""How long a pipeline's ranks wait: every schedule, run as it trains, against its own theory.

How it works: stages whose computing is a sleep of known length, forward, gradient of the input and
gradient of the weights each by itself. Sleeping ranks need no core, so eight of them run side by
side on two; all the rest is real: the schedule's list, the runtime, autograd's split backward
passes, the transfers over gloo. A rank's share of the model takes the same whatever the schedule:
where it is cut into two stages, each of them sleeps half as long.

Per case the table has three bubbles, each in percent of the time without any: measured, that of
this very list with free transfers (`plan.schedules.makespan`), and the published formula. The step
is from the first rank's start to the last rank's end; figures are medians over a few steps, behind
one without sleeps that makes the connections.

Beside the theory stands the simulator's step: the same list, with what an action and a transfer
cost this machine besides. Those two constants are fitted to the steps of 1F1B alone.

It is no measure of networks or of kernels: transfers are tiny, and nothing is computed. It needs
little of the processor, but at once: on a machine that is busy with other things, ranks wake up
late. Where that can't be helped, `chrt --rr 5` before the command lets them go first.

    python -m benchmarks.pipeline_bubbles [--steps 3] [--quick] [--pp 4 --micro-batches 8]
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.published_bubbles import bubble_fraction_published
from benchmarks.tables import markdown, terminal_table
from paceline.config.schedule import DEMANDS, Schedule, refusal
from paceline.parallel.pp import Pipeline
from paceline.plan.schedules import build_schedule, equal_cost, makespan

PP = (2, 4, 8)
MICRO_BATCHES = (4, 8, 16, 32)
TOLERANCE = 0.05
SIMULATED_TOLERANCE = 0.03
BASELINE = "1f1b"
ZERO_BUBBLE = ("zb_h1", "interleaved_zb", "zbv", "dualpipev", "dualpipe")


class Sleeps(NamedTuple):
    """Seconds that a rank's share of the model takes for one micro-batch."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float


EQUAL = Sleeps(0.04, 0.04, 0.04)
"""Twice 20 ms: where a rank has two stages, each sleeps 20 ms."""
UNEQUAL = Sleeps(0.04, 0.056, 0.04)
"""Attention has no weights: the gradient of the input takes longer than that of the weights."""
QUICK = Sleeps(0.004, 0.004, 0.004)


class Costs(NamedTuple):
    """What running a list costs a machine besides the sleeps."""

    action_s: float
    """Of each action: waking up, Python, autograd."""
    hop_s: float
    """From the end of an action to when another rank has its result."""


class Case(NamedTuple):
    """One schedule on one pipeline."""

    name: str
    pp: int
    micro_batches: int
    sleeps: Sleeps

    @property
    def stages_per_rank(self) -> int:
        """Two where the schedule leaves it open."""
        return DEMANDS[self.name].stages_per_rank or 2

    def schedule(self) -> Schedule:
        """Its list."""
        return build_schedule(self.name, self.pp, self.micro_batches, self.stages_per_rank)

    def of_stage(self, schedule: Schedule) -> Sleeps:
        """What one stage sleeps."""
        return Sleeps(*(seconds * self.pp / schedule.num_stages for seconds in self.sleeps))

    def ideal_s(self) -> float:
        """A step in which no rank ever waits."""
        return self.micro_batches * sum(self.sleeps)

    def theory_s(self) -> float:
        """A step of this list if transfers took no time."""
        schedule = self.schedule()
        return makespan(schedule, equal_cost(schedule.num_stages, *self.of_stage(schedule)))

    def simulated_s(self, costs: "Costs") -> float:
        """A step of this list on a machine with these costs."""
        schedule = self.schedule()
        seconds = [each + costs.action_s for each in self.of_stage(schedule)]
        return makespan(schedule, equal_cost(schedule.num_stages, *seconds, p2p_s=costs.hop_s))

    def published_s(self) -> float:
        """A step by the published formula."""
        sleeps = self.of_stage(self.schedule())
        bubble = bubble_fraction_published(
            self.name, self.pp, self.micro_batches, self.stages_per_rank, *sleeps
        )
        return self.ideal_s() * (1 + bubble)


def all_cases(pp: Iterable[int], micro_batches: Iterable[int], sleeps: Sleeps) -> list[Case]:
    """Every schedule with all the sizes that it accepts."""
    cases = [
        Case(name, ranks, number, sleeps)
        for ranks in pp
        for number in micro_batches
        for name in DEMANDS
    ]
    return [
        case
        for case in cases
        if refusal(case.name, case.pp, case.stages_per_rank, case.micro_batches) is None
    ]


# ---- the ranks ---------------------------------------------------------------------------------


class _SleepForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingStage(nn.Module):
    """A stage with a path to its input and one to its weight, each with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.sleeps = Sleeps(0, 0, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep; (n,) -> (n,)."""
        forward_s, input_grad_s, weight_grad_s = self.sleeps
        main = _SleepForward.apply(x, forward_s, input_grad_s)
        return main + _SleepForward.apply(self.weight, 0, weight_grad_s)


def step_times(case: Case, group: dist.ProcessGroup, num_steps: int) -> list[float]:
    """Seconds of each step, the same on every rank."""
    schedule, device = case.schedule(), torch.device("cpu")
    stages = [SleepingStage() for _ in schedule.stages_of(dist.get_rank(group))]
    pipeline = Pipeline(schedule, stages, group, device)
    inputs = [(torch.ones(8, requires_grad=True), {}) for _ in range(case.micro_batches)]

    def step() -> float:
        dist.barrier(group)
        began = time.perf_counter()
        pipeline.step(inputs, lambda output, _micro_batch: output.sum())
        times = torch.tensor([-began, time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group)
        return times.sum().item()

    step()
    for stage in stages:
        stage.sleeps = case.of_stage(schedule)
    return [step() for _ in range(num_steps)]


def _rank_main(
    end: Connection, rank: int, folder: str, cases: Sequence[Case], num_steps: int
) -> None:
    torch.set_num_threads(1)
    try:
        num_ranks = cases[0].pp
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        for case in cases:
            end.send(step_times(case, dist.group.WORLD, num_steps))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        end.send(traceback.format_exc())


def run_cases(cases: Sequence[Case], num_steps: int) -> Iterator[tuple[Case, list[float]]]:
    """Run cases of one pp on ranks of their own; yields each as it is done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(cases[0].pp):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, folder, cases, num_steps)
            processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        try:
            for case in cases:
                times = [end.recv() for end in ends]
                failed = [text for text in times if isinstance(text, str)]
                if failed:
                    sys.exit(f"a rank failed:\n{failed[0]}")
                yield case, times[0]
        finally:
            for process in processes:
                process.join(5)
                process.kill()


# ---- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """A case and what came of it, seconds per step."""

    case: Case
    steps_s: list[float]
    step_s: float
    ideal_s: float
    theory_s: float
    published_s: float

    @classmethod
    def of(cls, case: Case, steps_s: list[float]) -> "Measured":
        """With the median of the steps."""
        step_s = median(steps_s)
        return cls(case, steps_s, step_s, case.ideal_s(), case.theory_s(), case.published_s())

    @property
    def excess(self) -> float:
        """What the step took beyond its own theory, as a fraction of that."""
        return self.step_s / self.theory_s - 1

    def cell(self) -> str:
        """Bubbles in percent of the ideal step: measured, of the list, published."""
        steps = (self.step_s, self.theory_s, self.published_s)
        return " / ".join(f"{100 * (step_s / self.ideal_s - 1):.1f}" for step_s in steps)


def rows(measured: Sequence[Measured]) -> list[tuple[str, ...]]:
    """A row per pipeline and schedule, a column per number of micro-batches."""
    cells = {(m.case.pp, m.case.name, m.case.micro_batches): m.cell() for m in measured}
    numbers = sorted({number for _, _, number in cells})
    lines = dict.fromkeys((pp, name) for pp, name, _ in cells)
    return [
        (str(pp), name, *(cells.get((pp, name, number), "") for number in numbers))
        for pp, name in lines
    ]


def titles(measured: Sequence[Measured]) -> tuple[str, ...]:
    """Of the columns of `rows`."""
    numbers = sorted({m.case.micro_batches for m in measured})
    return ("pp", "schedule", *(f"{number} micro-batches" for number in numbers))


def fitted_costs(measured: Sequence[Measured]) -> Costs:
    """The costs whose simulated steps are nearest to the measured ones of 1F1B, in 50 us steps."""
    base = [m for m in measured if m.case.name == BASELINE]
    grid = [step * 50e-6 for step in range(31)]

    def miss(costs: Costs) -> float:
        return sum((m.step_s / m.case.simulated_s(costs) - 1) ** 2 for m in base)

    costs = Costs(0.0, 0.0)
    for _ in range(3):  # one after the other: the sum of squares has one valley
        costs = min((costs._replace(action_s=each) for each in grid), key=miss)
        costs = min((costs._replace(hop_s=each) for each in grid), key=miss)
    return costs


def simulated_verdict(measured: Sequence[Measured]) -> str:
    """How near the simulator comes to the steps that its two costs were not fitted to."""
    costs = fitted_costs(measured)
    others = [m for m in measured if m.case.name != BASELINE]
    misses = {m: m.step_s / m.case.simulated_s(costs) - 1 for m in others}
    near = sum(abs(miss) <= SIMULATED_TOLERANCE for miss in misses.values())
    worst = max(misses, key=lambda m: abs(misses[m]))
    return (
        f"Simulated with {1e3 * costs.action_s:.2f} ms an action and {1e3 * costs.hop_s:.2f} ms a "
        f"transfer, fitted to the {len(measured) - len(others)} steps of {BASELINE} alone: "
        f"{near} of the {len(others)} others are within {SIMULATED_TOLERANCE:.0%}, the median "
        f"{median(misses.values()):+.1%}; furthest is {worst.case.name} on {worst.case.pp} ranks "
        f"with {worst.case.micro_batches} micro-batches: {misses[worst]:+.1%}."
    )


def speedups(measured: Sequence[Measured]) -> list[tuple[Measured, float, float]]:
    """The zero-bubble family: 1F1B's step over its own, measured and in theory."""
    base = {
        (m.case.pp, m.case.micro_batches, m.case.sleeps): m
        for m in measured
        if m.case.name == BASELINE
    }
    return [
        (m, plain.step_s / m.step_s, plain.theory_s / m.theory_s)
        for m in measured
        if m.case.name in ZERO_BUBBLE
        and (plain := base.get((m.case.pp, m.case.micro_batches, m.case.sleeps)))
    ]


def verdict(measured: Sequence[Measured]) -> list[str]:
    """What the figures say, in sentences."""
    worst = max(measured, key=lambda m: abs(m.excess))
    over = sum(abs(m.excess) > TOLERANCE for m in measured)
    text = [
        f"{len(measured) - over} of {len(measured)} steps are within {TOLERANCE:.0%} of the theory "
        f"of their list, the median {median(m.excess for m in measured):+.1%}; furthest is "
        f"{worst.case.name} on {worst.case.pp} ranks with {worst.case.micro_batches} micro-batches:"
        f" {worst.excess:+.1%}."
    ]
    if any(m.case.name == BASELINE for m in measured) and len(measured) > 1:
        text.append(simulated_verdict(measured))
    faster = speedups(measured)
    if faster:
        ahead = sum(ratio > 1 for _, ratio, theory in faster if theory > 1)
        best = max(faster, key=lambda each: each[1])
        text.append(
            f"Of the {sum(theory > 1 for _, _, theory in faster)} cases in which the zero-bubble "
            f"family should be faster than 1F1B, it is in {ahead}: at most {best[1]:.2f} x (theory "
            f"{best[2]:.2f}), {best[0].case.name} on {best[0].case.pp} ranks with "
            f"{best[0].case.micro_batches} micro-batches."
        )
    return text


# ---- the command -------------------------------------------------------------------------------


def write_results(folder: Path, about: dict[str, Any], groups: dict[str, list[Measured]]) -> Path:
    """Write pipeline_bubbles.json with every step, and pipeline_bubbles.md with the tables."""
    figures = {
        title: [{**asdict(m), "case": m.case._asdict()} for m in measured]
        for title, measured in groups.items()
    }
    parts = [
        f"{title}\n\n{markdown(titles(measured), rows(measured), ['schedule'])}\n"
        + "\n".join(verdict(measured))
        for title, measured in groups.items()
    ]
    text = "\n\n".join([*parts, signature(about)])
    return keep(folder, "pipeline_bubbles", {"facts": about, "figures": figures}, text + "\n")


def title_of(sleeps: Sleeps) -> str:
    """What a table shows."""
    seconds = " + ".join(f"{1000 * each:.0f}" for each in sleeps)
    return (
        "Bubble in % of the ideal step: measured / of the list / published; "
        f"a rank's F + I + W take {seconds} ms"
    )


def measure(cases: Sequence[Case], num_steps: int, console: Console) -> list[Measured]:
    """Run all cases, pipeline by pipeline, and say how each went."""
    todo_s = sum((num_steps + 0.1) * case.theory_s() for case in cases)
    console.print(f"{len(cases)} cases, about {todo_s / 60:.1f} minutes")
    done = []
    for pp in sorted({case.pp for case in cases}):
        for case, steps_s in run_cases([case for case in cases if case.pp == pp], num_steps):
            result = Measured.of(case, steps_s)
            done.append(result)
            console.print(
                f"{len(done):3}/{len(cases)}  pp {pp}  {case.name:<14}  {case.micro_batches:2} "
                f"micro-batches  {result.step_s:.3f} s  {result.excess:+.1%} of theory"
            )
    return done


def main() -> None:
    """Run the benchmark, show the tables and write the results."""
    options = _options()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are CPU processes, wherever this runs
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    console = Console(highlight=False)
    about = taken_with("benchmarks.pipeline_bubbles")
    cases = all_cases(options.pp, options.micro_batches, QUICK if options.quick else EQUAL)
    if not options.quick:
        cases += all_cases({4} & set(options.pp), {8} & set(options.micro_batches), UNEQUAL)
    measured = measure(cases, options.steps, console)
    groups: dict[str, list[Measured]] = {}
    for each in sorted(measured, key=lambda m: m.case.pp):
        groups.setdefault(title_of(each.case.sleeps), []).append(each)
    for title, of in groups.items():
        console.print(terminal_table(title, titles(of), rows(of), ["schedule"]))
        console.print("\n".join(verdict(of)))
    console.print(f"results: {write_results(folder_of(options.results, about), about, groups)}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a case")
    parser.add_argument("--pp", type=int, nargs="+", default=PP, help="ranks of the pipelines")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument(
        "--quick", action="store_true", help="2 ranks and short sleeps: a smoke run"
    )
    options = parser.parse_args()
    if options.quick:
        options.pp, options.micro_batches, options.steps = [2], [4], 1
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


if __name__ == "__main__":
    main()
