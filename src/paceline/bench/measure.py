"""Measure: all that `paceline bench` measures, on every rank, put together as a Cluster.

A BenchRequest says what to measure; what is not measured stays as an earlier Cluster has it, or
unknown.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from paceline.bench import codecs
from paceline.bench.clock import RankTimer
from paceline.bench.collectives import all_groups, measure_tiers, sizes_of
from paceline.bench.collectives import num_measurements as num_collectives
from paceline.bench.device import DeviceRates, Launching, grid_of, measure_device
from paceline.bench.device import num_measurements as num_rates
from paceline.bench.input_rate import measure_input_rate
from paceline.bench.rank_pool import TellProgress, counted_progress
from paceline.bench.reference import reference_jobs
from paceline.bench.step import MeasuredStep, measure_jobs
from paceline.bench.step import num_measurements as num_steps
from paceline.comm.rendezvous import Ranks
from paceline.config.hardware import Cluster
from paceline.config.job import to_raw
from paceline.config.stack import CONSTANTS, Stack
from paceline.plan.calibrate import MeasuredJob, fit
from paceline.plan.points import Setting

Part = Literal["device", "codecs", "collectives", "step", "input"]
PARTS: tuple[Part, ...] = get_args(Part)

# Of collectives between CPU ranks, for one elsewhere: see bench.collectives.
_TURNS_ON_CPU = 3
# What else Python does on a CPU, in operators of an eager chain: where fitting starts from, so that
# a slower host, or one whose ranks share cores, is slower in all of it. Assumed, but for an
# operator computed again: blocks of 23 took 0.85 ms each beyond computing them twice, where a
# launch took 9.7 us (measured on cores of a Xeon).
_IN_LAUNCHES = {"exchange_us": 80, "unit_us": 150, "hop_us": 50, "again_us": 3.8, "select_us": 10}


@dataclass(frozen=True)
class BenchRequest:
    """What to measure, and how thoroughly."""

    cluster: Cluster
    """Concrete: what is known without measuring, or an earlier result to be completed."""
    parts: tuple[Part, ...]
    source: str
    """Where, when and by which command."""
    quick: bool = False

    def plain(self) -> dict[str, Any]:
        """As JSON, for another process."""
        return {**vars(self), "cluster": to_raw(self.cluster)}

    @staticmethod
    def of_plain(record: Mapping[str, Any]) -> "BenchRequest":
        """What another process asks for."""
        known = {"cluster": Cluster.parse(record["cluster"]), "parts": tuple(record["parts"])}
        return BenchRequest(**{**record, **known})

    def clock(self, ranks: Ranks) -> RankTimer:
        """How long each size is looked at."""
        return RankTimer(ranks, block_s=0.02, num_blocks=3) if self.quick else RankTimer(ranks)

    @property
    def rounds(self) -> int:
        """Turns of each reference Job."""
        return 2 if self.quick else 5


@dataclass(frozen=True)
class BenchResult:
    """What was measured."""

    cluster: Cluster
    launching: Launching | None = None
    optimizer_s_per_param: float | None = None
    tokens_per_s: float | None = None
    """Of the data path, for one rank."""
    steps: tuple[MeasuredStep, ...] = ()
    """The reference Jobs."""


def measure(request: BenchRequest, ranks: Ranks, tell: TellProgress) -> BenchResult:
    """Measure what is wished; every rank must call it, and gets the same Cluster.

    Raises:
        RunError: a collective gave a wrong result.
    """
    outcome = BenchResult(request.cluster)
    for part in PARTS:
        if part in request.parts:
            outcome = _MEASURES[part](request, outcome, ranks, tell)
    return outcome


def _device(
    request: BenchRequest, outcome: BenchResult, ranks: Ranks, tell: TellProgress
) -> BenchResult:
    device = outcome.cluster.device
    grid = grid_of(device.kind, quick=request.quick)
    say = counted_progress(tell, "device", num_rates(grid, device))
    rates = measure_device(request.clock(ranks), device, grid, request.source, say)
    cluster = outcome.cluster.replace(device=rates.device, stack=_launching(outcome, rates))
    return replace(
        outcome,
        cluster=cluster,
        launching=rates.launching,
        optimizer_s_per_param=rates.optimizer_s_per_param,
    )


def _launching(outcome: BenchResult, rates: DeviceRates) -> Stack:
    """The stack with the host's time per operator, mean of forward and backward, and that of
    convolutions over products."""
    stack = outcome.cluster.stack or Stack()
    launch_us = sum(rates.launching) / len(rates.launching) * 1e6
    found = {"launch_us": launch_us, "conv_time": rates.conv_time}
    if rates.device.kind == "cpu":
        found |= {name: number * launch_us for name, number in _IN_LAUNCHES.items()}
    within = {
        name: min(max(value, CONSTANTS[name].low), CONSTANTS[name].high)
        for name, value in found.items()
    }
    return stack.replace(
        constants={**stack.constants, **within}, origin="launch_us and conv_time measured"
    )


def _codecs(
    request: BenchRequest, outcome: BenchResult, ranks: Ranks, tell: TellProgress
) -> BenchResult:
    cluster = outcome.cluster
    sizes = codecs.sizes_of(ranks.device_type, quick=request.quick)
    say = counted_progress(tell, "codecs", len(codecs.NAMES))
    curves = codecs.measure_codecs(request.clock(ranks), sizes, request.source, say)
    device = cluster.device.replace(codecs=curves)
    return replace(outcome, cluster=cluster.replace(device=device))


def _collectives(
    request: BenchRequest, outcome: BenchResult, ranks: Ranks, tell: TellProgress
) -> BenchResult:
    groups = all_groups(ranks)
    sizes = sizes_of(ranks.device_type, quick=request.quick)
    say = counted_progress(tell, "collectives", num_collectives(groups))
    clock = request.clock(ranks)
    if ranks.device_type == "cpu":
        clock = replace(clock, num_blocks=_TURNS_ON_CPU * clock.num_blocks)
    tiers = measure_tiers(clock, groups, sizes, request.source, say)
    return replace(outcome, cluster=outcome.cluster.replace(tiers=tiers))


def _steps(
    request: BenchRequest, outcome: BenchResult, ranks: Ranks, tell: TellProgress
) -> BenchResult:
    jobs = reference_jobs(outcome.cluster)
    say = counted_progress(tell, "step", num_steps(len(jobs), request.rounds))
    found = measure_jobs(ranks, jobs, num_rounds=request.rounds, steps_per_round=3, say=say)
    return replace(outcome, steps=tuple(found))


def _input(
    request: BenchRequest, outcome: BenchResult, ranks: Ranks, tell: TellProgress
) -> BenchResult:
    say = counted_progress(tell, "input", 1)
    rate = measure_input_rate(request.clock(ranks))
    say("data path")
    return replace(outcome, tokens_per_s=rate)


_MEASURES: dict[Part, Callable[[BenchRequest, BenchResult, Ranks, TellProgress], BenchResult]] = {
    "device": _device,
    "codecs": _codecs,
    "collectives": _collectives,
    "step": _steps,
    "input": _input,
}


def calibrated(outcome: BenchResult, source: str) -> Cluster:
    """The Cluster with the constants of our runtime fitted to the measured steps, if there are."""
    cluster = outcome.cluster
    if not outcome.steps:
        return cluster
    stack = cluster.stack or Stack()
    cases = [
        MeasuredJob(Setting.of(each.job.replace(cluster=cluster)), each.job.layout, each.step_s)
        for each in outcome.steps
    ]
    return cluster.replace(stack=fit(cases, stack, source))
