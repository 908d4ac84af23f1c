"""Forecast: what the planner says of a point before anything of it runs.

A point that can't run, can't fit or is predicted to exceed a limit is refused here, in a sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.errors import InputError
from paceline.config.frozen import MOST
from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobSpec
from paceline.config.model import Model
from paceline.generate.work import Work
from paceline.plan.answer.outlook import Outlook, outlook
from paceline.plan.prediction import Prediction
from paceline.plan.scale import checkpoint_bytes
from paceline.plan.search.choose import plan_job
from paceline.plan.serving.catalogue import catalogue_costs
from paceline.search.space import Limits, ObjectiveName, Search
from paceline.train.this_machine import resolve_on_this_machine

_BLOCK = 16
# By objective: its limit's name, and how many of the limit's unit one of the objective's has.
_LIMITS: Mapping[str, tuple[str, float]] = {
    "time": ("time_s", 1.0),
    "memory": ("memory_gb", 1e-9),
    "latency": ("latency_ms", 1e3),
    "energy": ("energy_kwh", 1.0),
    "usd": ("usd", 1.0),
}


@dataclass(frozen=True)
class Forecast:
    """Of a point that may run."""

    job: Job
    step_s: float
    cost_s: float
    """Device-seconds of a step."""
    figures: Mapping[ObjectiveName, float]
    """Of the objectives but the loss: seconds of training, bytes of a device, seconds of a token,
    kWh, USD."""


def forecast(job: JobSpec, cluster: Cluster, search: Search, *, is_here: bool = True) -> Forecast:
    """What a point takes.

    Args:
        job: of the point.
        cluster: that trials run on, its speed known.
        is_here: whether that is this machine.

    Raises:
        InputError: it never runs; one sentence says why.
    """
    concrete, best = priced(job, cluster, is_here=is_here)
    _must_not_exceed("step_s", best.step_s, search.limits)
    figures = _figures(concrete, best, search)
    wanted: dict[ObjectiveName, float] = {
        name: figures[name] for name in search.objectives if name != "loss"
    }
    return Forecast(concrete, best.step_s, best.step_s * best.layout.num_ranks, wanted)


def priced(job: JobSpec, cluster: Cluster, *, is_here: bool = True) -> tuple[Job, Prediction]:
    """A Job as it runs on a cluster, and what a step of it takes.

    Args:
        cluster: its speed known.
        is_here: whether that is this machine.

    Raises:
        InputError: it can't run, doesn't fit, or can't be predicted.
    """
    job = job.replace(cluster=cluster)
    plan = (
        resolve_on_this_machine(job, explained=False)
        if is_here
        else plan_job(job, cluster, explained=False)
    )
    if not plan.ranked:
        said = plan.notes[-1] if plan.notes else f'nothing prices model.family "{job.model.family}"'
        raise InputError(f"its step can't be predicted: {said}")
    best = plan.ranked[0]
    if best.fits(cluster.device) is False:
        memory = cluster.device.memory_bytes
        assert memory is not None
        raise InputError(
            f"it needs {best.needed_bytes / 1e9:.3g} GB, and a device has {memory.value / 1e9:.3g}."
        )
    return plan.job, best


def check_known(job: JobSpec, cluster: Cluster, search: Search, *, is_here: bool) -> None:
    """Refuse a search whose objectives or limits nobody can predict.

    Args:
        job: that the search begins with.

    Raises:
        InputError: one of them is not known on this machine; or nothing prices the Job.
    """
    unbounded = search.replace(limits=_without_bounds(search.limits))
    forecast(job, cluster, unbounded, is_here=is_here)


def _without_bounds(limits: Limits) -> Limits:
    """Those that are set, so high that nothing exceeds them."""
    return Limits.parse(
        {name: float(MOST) for name, value in vars(limits).items() if value is not None}
    )


def _figures(job: Job, best: Prediction, search: Search) -> dict[ObjectiveName, float]:
    """Those that are an objective or limited.

    Raises:
        InputError: one of them is not known, or beyond its limit.
    """
    saved = float(checkpoint_bytes(job.model.num_params or 0))
    run = outlook(job, best, saved)
    found: dict[ObjectiveName, float] = {}
    for name, (limit, factor) in _LIMITS.items():
        if name in search.objectives or getattr(search.limits, limit) is not None:
            value = _figure(name, job, best, run)
            _must_not_exceed(limit, value * factor, search.limits)
            found[name] = value  # type: ignore[index]
    return found


def _figure(name: str, job: Job, best: Prediction, run: Outlook) -> float:
    known: Mapping[str, Any] = {
        "time": run.train_s,
        "memory": best.needed_bytes,
        "energy": run.energy_kwh,
        "usd": run.usd,
    }
    value = token_s(job) if name == "latency" else known[name]
    if value is None:
        cure = {
            "energy": "state cluster.device's power_watts",
            "usd": "give cluster.prices.usd_per_device_hour",
        }[name]
        raise InputError(f'objective "{name}" is not known on {job.cluster.device.name}: {cure}.')
    return float(value)


def token_s(job: Job) -> float:
    """Seconds of one token of one text as long as the training's, on one device.

    Raises:
        InputError: the model makes no texts, or the device's speed is not known.
    """
    if not isinstance(job.model, Model):
        raise InputError(
            f'objective "latency" is of decoders, and model.family is "{job.model.family}".'
        )
    length = job.train.seq_len
    costs = catalogue_costs(job.model, job.cluster, 1, job.layout.precision, _BLOCK, length)
    return costs.terms(Work(choices=1, single=1, blocks=length / _BLOCK)).total


def _must_not_exceed(name: str, value: float, limits: Limits) -> None:
    limit = getattr(limits, name)
    if limit is not None and value > limit:
        raise InputError(f"{name} is predicted as {value:.3g}, beyond its limit of {limit:g}.")
