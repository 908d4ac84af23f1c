"""`paceline ladder`: the order of things."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.status import Status

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.hardware import Cluster, ClusterSpec
from paceline.config.job import Job, JobSpec, differing, read_job, to_raw, to_toml
from paceline.config.layout import LayoutSpec
from paceline.machine.discovery import this_machine
from paceline.observe.asked import must_be_same
from paceline.observe.locks import owned
from paceline.observe.run import Run, write_atomic
from paceline.plan.answer.options import budget_of, clusters_of
from paceline.render.figures import count_text, duration_text, loss_text
from paceline.search.command import kept_cluster
from paceline.search.ladder.advice import (
    Advice,
    Budget,
    Option,
    advise,
    chosen,
    options,
    run_ratio,
)
from paceline.search.ladder.law import Fit, Law, fit
from paceline.search.ladder.page import comparison, law_table, notes, render, runs_table, sentence
from paceline.search.ladder.rungs import Rungs, network_of, plan_rungs, text_of
from paceline.search.ladder.runs import Climb, Climbed, RungRun, Slowness, StoppedError
from paceline.search.trial_run import TrialProcess
from paceline.train.families import family_of
from paceline.train.start import read_inputs
from paceline.train.stopping import term_as_interrupt
from paceline.train.this_machine import resolve_on_this_machine

_CONSOLE = Console(highlight=False, soft_wrap=True)
_RUNGS, _ADVICE = TypeAdapter(Rungs), TypeAdapter(Advice)
_MOST_TRIED = 4
"""Sizes whose speed is tried: each may lead to another one that is better."""
_DAMAGED = "put back a copy, or remove its folder to start over"


@dataclass(frozen=True)
class LadderOptions:
    """Of the command line."""

    budget: str
    cluster: str | None = None
    price: float | None = None
    share: float = 0.05
    """Of the budget, for the ladder."""
    largest: float | None = None
    """Parameters of a rung, at most."""
    params: float | None = None
    """Of the recommended run; None: what loses least."""


def ladder_command(job: JobSpec, asked: LadderOptions, folder: Path) -> dict[str, Any]:
    """Climb a ladder and recommend a run; a ladder that its folder has goes on.

    Args:
        job: its length in steps, of which warm-up and decay are parts.
        folder: of the ladder.

    Returns:
        what was found as plain data.

    Raises:
        InputError: wrong input, a budget that is too small, or runs that fail.
    """
    usd, days = budget_of(asked.budget)
    if not 0 < asked.share <= 0.9:
        raise InputError(f"--share {asked.share:g} is no part of a budget: give 0.01 to 0.9.")
    network_of(job)
    whole, small = Budget(usd, days), _here(job, asked)
    with term_as_interrupt(), owned(folder):
        kept = {"job": to_raw(job), "share": asked.share, "largest": asked.largest or 0}
        must_be_same(folder, "ladder", {"ladder": kept})
        here = kept_cluster(folder, small)
        target = _target(job, here, asked)
        rungs = _rungs(folder, small, here, target, whole, asked)
        _CONSOLE.print(text_of(rungs))
        with _CONSOLE.status("reading the data"):
            plan = resolve_on_this_machine(small.replace(cluster=here))
            read_inputs(plan.job, lambda _done, _total: None)
        try:
            with TrialProcess() as process, _CONSOLE.status("") as status:
                climb = Climb(small, here, rungs, folder / "runs", _Teller(status, rungs), process)
                climbed = climb.climb()
                law = fit(climbed.points, _text_tokens(plan.job))
                left = whole.less(asked.share)
                sizes = _Sizes(job, rungs, target, left, law.law, asked.params, status)
                slowness = climbed.slowness if target.device == here.device else (1.0, 1.0)
                found = sizes.found(climb if _is_here(target, here) else None, slowness)
        except (KeyboardInterrupt, StoppedError):
            _CONSOLE.print(f"stopped; its runs are in {folder}, run it again to go on")
            return {"folder": str(folder), "advice": None}
        return _conclude(rungs, climbed, law, found, folder)


def _here(job: JobSpec, asked: LadderOptions) -> JobSpec:
    """The Job as its small runs are trained on this machine, wherever it is for."""
    device = job.cluster.device
    is_for_here = device == "auto" or device.kind == this_machine().device.kind
    return job.replace(
        cluster=job.cluster if is_for_here else ClusterSpec(),
        layout=job.layout if is_for_here and asked.cluster is None else LayoutSpec(),
    )


def _target(job: JobSpec, here: Cluster, asked: LadderOptions) -> Cluster:
    texts = [] if asked.cluster is None else [asked.cluster]
    prices = [] if asked.price is None else [asked.price]
    [found] = clusters_of(job, texts, prices, lambda: here)
    return found


def _rungs(
    folder: Path,
    job: JobSpec,
    here: Cluster,
    target: Cluster,
    whole: Budget,
    asked: LadderOptions,
) -> Rungs:
    """As they were planned when the ladder began."""
    file = folder / "ladder.json"
    if file.exists():
        return read_json(file, _RUNGS, _DAMAGED)
    devices = target.devices_per_node * target.num_nodes
    within_s = asked.share * whole.seconds(target, devices) * here.devices_per_node
    with _CONSOLE.status("planning the ladder"):
        enough = run_ratio(job, target, whole.less(asked.share), asked.params)
        found = plan_rungs(job, here, within_s, asked.largest, enough)
    write_atomic(file, _RUNGS.dump_json(found, indent=1).decode())
    return found


def _text_tokens(job: Job) -> int | None:
    """That a run may read before it reads one again; None: a stream has no end."""
    if job.data.stream.is_on:
        return None
    samples = family_of(job.model).num_samples(job.model, job, None)
    return None if samples is None else samples * job.train.seq_len


class _Teller:
    """Prints the runs as they end, and which one comes."""

    def __init__(self, status: Status, rungs: Rungs) -> None:
        self._status, self._rungs, self._told = status, rungs, 0

    def __call__(self, made: Sequence[RungRun], coming: str) -> None:
        for one in made[self._told :]:
            _CONSOLE.print(_line(one))
        self._told = len(made)
        spent = duration_text(sum(one.cost_s for one in made))
        self._status.update(f"{spent} of {duration_text(self._rungs.cost_s)}: training {coming}")


def _line(one: RungRun) -> str:
    said = f"failed: {one.reason}" if one.loss is None else f"loss {loss_text(one.loss)}"
    return (
        f"{count_text(one.rung.params)} parameters, {one.steps:,} steps, lr {one.rate:.3g}: {said}"
    )


def _is_here(target: Cluster, here: Cluster) -> bool:
    """Whether the run is for this machine."""
    mine, its = ((one.device, one.num_nodes, one.devices_per_node) for one in (here, target))
    return mine == its


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a run that a budget buys."""

    job: JobSpec
    rungs: Rungs
    target: Cluster
    budget: Budget
    law: Law
    params: float | None
    status: Status

    def found(self, climb: Climb | None, slowness_of_top: Slowness) -> list[Option]:
        """All of them. Where a run can be tried (`climb`), the best is, for a few steps, and chosen
        anew.

        Args:
            slowness_of_top: of the largest rung.
        """
        by_heads = {self.rungs.rungs[-1].heads: slowness_of_top}
        found = self._planned(by_heads)
        for _ in range(_MOST_TRIED):
            best = chosen(found)
            if climb is None or best.heads in by_heads:
                break
            self.status.update(f"trying {count_text(best.multiplied)} parameters for their speed")
            slowness = climb.slowness_of(best.heads, best.planned_step_s)
            if slowness is None:
                break
            by_heads[best.heads] = slowness
            found = self._planned(by_heads)
        return found

    def _planned(self, slowness: Mapping[int, Slowness]) -> list[Option]:
        found: list[Option] = []
        for one in options(
            self.job, self.rungs, self.target, self.budget, self.law, slowness, self.params
        ):
            found.append(one)
            self.status.update(f"planning sizes: {count_text(one.multiplied)} parameters")
        return found


def _conclude(
    rungs: Rungs, climbed: Climbed, law: Fit, found: Sequence[Option], folder: Path
) -> dict[str, Any]:
    advice, best = advise(chosen(found), climbed, law, f"{folder.name}-run")
    write_atomic(folder / "job.toml", to_toml(best))
    write_atomic(folder / "prediction.json", _ADVICE.dump_json(advice, indent=1).decode())
    page = folder / "ladder.html"
    write_atomic(page, render(rungs, climbed, law, found, advice, best, page))
    _CONSOLE.print(runs_table(climbed.runs, law, climbed.tokens_per_step))
    _CONSOLE.print(law_table(law, climbed, advice))
    _CONSOLE.print(f"{sentence(advice, best)}\n", markup=False)
    said = notes(advice, climbed, law.law)
    for note in said:
        _CONSOLE.print(f"note: {note}", markup=False)
    _CONSOLE.print(f"train it: paceline train {folder / 'job.toml'}")
    _CONSOLE.print(f"page: {page}")
    return _told(folder, rungs, climbed, law, advice) | {"notes": said}


def _told(folder: Path, rungs: Rungs, climbed: Climbed, law: Fit, advice: Advice) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "advice": advice.model_dump(),
        "law": {**vars(law.law), "noise": law.noise},
        "lr": vars(climbed.rates),
        "predicted_device_s": rungs.cost_s,
        "measured_over_predicted_step_s": advice.slowness,
        "runs": [
            {
                "params": one.rung.params,
                "steps": one.steps,
                "tokens": one.steps * climbed.tokens_per_step,
                "lr": one.rate,
                "loss": one.loss,
                "predicted_device_s": one.cost_s,
            }
            for one in climbed.runs
        ],
    }


def compare_command(folder: Path, run: Run) -> dict[str, Any]:
    """Hold a run against what its ladder predicted.

    Raises:
        InputError: the folder has no prediction, or the run is another one.
    """
    file = folder / "prediction.json"
    if not file.exists():
        raise InputError(
            f"{folder} has no prediction.json: climb the ladder first, or give its folder as --out."
        )
    advice = read_json(file, _ADVICE, "climb the ladder again")
    predicted, made = read_job(folder / "job.toml"), run.job()
    for name in ("model", "train", "data", "optim"):
        for key, old, new in differing(
            to_raw(getattr(predicted, name)), to_raw(getattr(made, name))
        ):
            raise InputError(
                f"{run.path} is not the run that was predicted: {name}.{key} is {new}, and "
                f"{old} was recommended; compare one that paceline train {folder / 'job.toml'} "
                "made."
            )
    table = comparison(advice, run)
    _CONSOLE.print(table)
    _CONSOLE.print(table.note)
    return {
        "folder": str(folder),
        "run": str(run.path),
        "advice": advice.model_dump(),
        "rows": [dict(zip(table.heads, row, strict=True)) for row in table.rows],
    }
