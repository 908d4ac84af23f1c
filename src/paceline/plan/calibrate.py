"""Calibrate: the constants of a software stack, fitted to measured steps.

Least squares in the logarithm of predicted over measured, by Levenberg-Marquardt steps with a
numeric Jacobian. Every constant of `config.stack.CONSTANTS` is fitted in its logarithm, stays
within its bounds, and is held by a prior at where it started: six steps can't determine eleven
constants, and what they say nothing about keeps its default. Gross errors pull with the force of a
small one only (Huber).

The fit sees steps and features, never where a step was published. It changes constants alone; what
a wrong formula leaves over stays visible in the errors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.stack import CONSTANTS, Stack
from paceline.observe.run import Run
from paceline.plan.points import Setting
from paceline.plan.price.step import Simulated

Vector = npt.NDArray[np.float64]
Constants = Mapping[str, float]

# What a measured step differs from this model with the right constants by; identical set-ups that
# were published twice differ by 3-6 % already.
_NOISE = 0.08
# How far the logarithm of a constant usually lies from its default (one standard deviation).
_SPREAD = {
    "matmul_time": 0.15,
    "attention_time": 0.4,
    "memory_time": 0.35,
    "launch_us": 0.6,
    "optimizer_time": 0.5,
    "comm_time_inside": 0.3,
    "comm_time_across": 0.4,
    "overlap_slowdown": 0.08,
    "overlap_share": 0.4,
    "step_overhead_ms": 1.0,
    "micro_batch_overhead_ms": 1.0,
}
_USUAL_SPREAD = 0.4
# Residuals beyond this many standard deviations count in proportion, not squared.
_HUBER = 2.0
_MOST_STEPS = 6
# Rounds of as many micro-batches as there are stages, after which a pipeline goes on evenly.
_ROUNDS = 4
# Passes of all stages in a step above which that is quicker.
_MUCH_WORK = 4000
# A second start of the fit, times the default pace of the host.
_SLOW_HOST = 5.0


@dataclass(frozen=True)
class MeasuredJob:
    """One measured step of a language model."""

    setting: Setting
    layout: Layout
    step_s: float


@dataclass(frozen=True)
class CalibrationSample:
    """One measured step of anything, and what is predicted for it."""

    seconds: Callable[[Constants], float]
    """By constants of `CONSTANTS`; those that are left out are the stack's own."""
    step_s: float
    """Measured."""
    weight: float = 1.0


def predicted_step_s(setting: Setting, layout: Layout) -> float:
    """Seconds of a step as `paceline.plan.price.step.predict` gives them, without its memory.

    Once a pipeline is full, a further round of micro-batches takes as long as the one before: of
    many, only enough are simulated to see how long that is.
    """
    at_once = layout.num_data_ranks * layout.micro_batch
    rounds, rest = divmod(setting.global_batch // at_once, layout.pp)
    work = setting.global_batch // at_once * layout.stages_per_rank * layout.pp
    if work < _MUCH_WORK or rest or rounds <= _ROUNDS:
        return Simulated.of(setting, layout).step_s
    few, more = (
        Simulated.of(replace(setting, global_batch=at_once * layout.pp * number), layout).step_s
        for number in (_ROUNDS - 1, _ROUNDS)
    )
    return more + (more - few) * (rounds - _ROUNDS)


# What steps of language models depend on.
FITTED = tuple(
    name for name in CONSTANTS if name not in ("conv_time", "host_copy_gb_per_s", "rank_spread")
)


def fit(cases: Sequence[MeasuredJob], stack: Stack, origin: str) -> Stack:
    """The stack with the constants that fit some measured steps best.

    Args:
        cases: measured steps; the stacks of their settings don't count.
        stack: features, and the constants to start from and to stay near to.
        origin: what the steps are, for `Stack.origin`.

    Raises:
        InputError: there are no steps, or one of them took no positive time.
    """
    constants = fit_constants([_sample(case, stack) for case in cases], stack.constants)
    return stack.replace(constants=constants, origin=f"fitted to {len(cases)} steps of {origin}")


def _sample(case: MeasuredJob, stack: Stack) -> CalibrationSample:

    def seconds(constants: Constants) -> float:
        setting = replace(case.setting, stack=with_constants(stack, constants))
        return predicted_step_s(setting, case.layout)

    return CalibrationSample(seconds, case.step_s)


def fit_constants(
    samples: Sequence[CalibrationSample], start: Constants, names: Sequence[str] = FITTED
) -> dict[str, float]:
    """The constants that fit some steps best.

    Args:
        samples: measured steps.
        start: constants to start from and to stay near to.
        names: constants to fit; the others stay as they are.

    Returns:
        start, with the values of `names`.

    Raises:
        InputError: there are no steps, or one of them took no positive time.
    """
    if not samples:
        raise InputError("there is no measured step to calibrate with: give at least one.")
    if any(not 0 < one.step_s < float("inf") for one in samples):
        raise InputError("a measured step must take a time above 0 s: leave the others out.")
    prior = _Prior.of(names, start)
    weights = np.sqrt([one.weight for one in samples])

    def residuals(theta: Vector) -> Vector:
        values = {**start, **dict(zip(names, np.exp(theta).tolist(), strict=True))}
        errors = [np.log(one.seconds(values) / one.step_s) for one in samples]
        return weights * np.array(errors) / _NOISE

    beginnings = _beginnings(names, prior)
    begin = min(beginnings, key=lambda theta: prior.loss(residuals(theta), theta))
    theta = _levenberg_marquardt(residuals, begin, prior)
    return {**start, **{k: float(np.exp(v)) for k, v in zip(names, theta, strict=True)}}


def tangent(
    sample: CalibrationSample, start: Constants, names: Sequence[str] = FITTED
) -> CalibrationSample:
    """The sample by its first derivatives at the start, in logarithms: for fits by the hundred.

    A host that becomes the slower part only with other constants is not seen.
    """
    prior = _Prior.of(names, start)

    def log_seconds(theta: Vector) -> Vector:
        values = {**start, **dict(zip(names, np.exp(theta).tolist(), strict=True))}
        return np.log([sample.seconds(values)])

    begin = log_seconds(prior.centre)
    slopes = _jacobian(log_seconds, prior.centre, begin, prior)[0]

    def seconds(constants: Constants) -> float:
        theta = np.log([constants[name] for name in names])
        return float(np.exp(begin[0] + slopes @ (theta - prior.centre)))

    return CalibrationSample(seconds, sample.step_s, sample.weight)


def with_constants(stack: Stack, constants: Constants) -> Stack:
    """A stack that has these constants besides its own."""
    merged = {**stack.constants, **constants}
    # Not validated again: the fit calls this thousands of times with values within bounds.
    return stack.model_copy(update={"constants": merged})


def calibrate_from_run(run: Run) -> Cluster:
    """The cluster of a run of ours, with the constants of our runtime fitted to its steps.

    The median of the steps counts, without the first ones, which warm up.

    Raises:
        InputError: the run has no steps to measure, or its model is not one the planner knows.
    """
    job = run.job()
    lines = [line for line in run.metrics() if not line.get("profiled")]
    seconds = [float(line["step_time_s"]) for line in lines if line.get("step_time_s")]
    steady = seconds[min(3, len(seconds) // 4) :]
    if not steady:
        raise InputError(f"{run.path} has no finished step: train it for a few steps first.")
    if not job.model.knows_layers:
        raise InputError(f"{run.path} trains a model of your own, whose shapes are not known.")
    setting = Setting.of(job)
    stack = setting.stack
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    # A median of many steps weighs as much as six single ones.
    sample = _sample(MeasuredJob(setting, job.layout, median(steady)), stack)
    constants = fit_constants([replace(sample, weight=min(len(steady), 6))], stack.constants)
    origin = f"fitted to {len(steady)} steps of {run.path.name}, {when}"
    return job.cluster.replace(stack=stack.replace(constants=constants, origin=origin))


class _Prior(NamedTuple):
    """What is known of each constant's logarithm before anything is measured."""

    low: Vector
    high: Vector
    centre: Vector
    spread: Vector

    @classmethod
    def of(cls, names: Sequence[str], start: Constants) -> "_Prior":
        """Of constants that are `start` as far as anybody knows."""
        low = np.log([CONSTANTS[name].low for name in names])
        high = np.log([CONSTANTS[name].high for name in names])
        centre = np.log([start.get(name, CONSTANTS[name].default) for name in names])
        spread = np.array([_SPREAD.get(name, _USUAL_SPREAD) for name in names])
        return cls(low, high, np.clip(centre, low, high), spread)

    def loss(self, residuals: Vector, theta: Vector) -> float:
        """The residuals' Huber loss, and the squared distance from the centre."""
        off = np.abs(residuals)
        huber = np.where(off <= _HUBER, 0.5 * off**2, _HUBER * (off - 0.5 * _HUBER))
        return float(huber.sum() + 0.5 * (((theta - self.centre) / self.spread) ** 2).sum())


def _beginnings(names: Sequence[str], prior: _Prior) -> list[Vector]:
    """Where to start from: the prior, and a host so slow that it sets the pace.

    While the device is slower than the host a step doesn't depend on the host's pace, so that no
    gradient leads from the one case to the other.
    """
    if "launch_us" not in names:
        return [prior.centre]
    slow = prior.centre.copy()
    slow[list(names).index("launch_us")] += np.log(_SLOW_HOST)
    return [prior.centre, np.clip(slow, prior.low, prior.high)]


def _levenberg_marquardt(
    residuals: Callable[[Vector], Vector], begin: Vector, prior: _Prior
) -> Vector:
    """The constants with the least loss."""
    theta, damping = begin, 1e-3
    current = residuals(theta)
    loss = prior.loss(current, theta)
    for _ in range(_MOST_STEPS):
        jacobian = _jacobian(residuals, theta, current, prior)
        step_theta, step, after = theta, current, loss
        for _ in range(5):
            trial = _step(theta, current, jacobian, prior, damping)
            tried = residuals(trial)
            after = prior.loss(tried, trial)
            if after < loss:
                step_theta, step = trial, tried
                damping = max(damping / 5, 1e-6)
                break
            damping *= 8
        if after >= loss:
            break
        gained, loss = loss - after, after
        theta, current = step_theta, step
        if gained < 3e-3 * loss + 1e-9:
            break
    return theta


def _step(
    theta: Vector, current: Vector, jacobian: Vector, prior: _Prior, damping: float
) -> Vector:
    """The next point; a constant at its bound that would leave it is held there."""
    weights = 1 / np.maximum(1.0, np.abs(current) / _HUBER)
    pull = 1 / prior.spread**2
    gradient = jacobian.T @ (weights * current) + pull * (theta - prior.centre)
    held = ((theta <= prior.low) & (gradient > 0)) | ((theta >= prior.high) & (gradient < 0))
    hessian = jacobian.T @ (weights[:, None] * jacobian) + np.diag(pull)
    hessian += damping * np.diag(np.diag(hessian))
    free = np.flatnonzero(~held)
    moved = theta.copy()
    moved[free] -= np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
    return np.clip(moved, prior.low, prior.high)


def _jacobian(
    residuals: Callable[[Vector], Vector], theta: Vector, current: Vector, prior: _Prior
) -> Vector:
    """By differences of 5 %, towards the inside of the bounds."""
    columns = []
    for index in range(len(theta)):
        change = 0.05 if theta[index] + 0.05 <= prior.high[index] else -0.05
        moved = theta.copy()
        moved[index] += change
        columns.append((residuals(moved) - current) / change)
    return np.stack(columns, axis=1)
