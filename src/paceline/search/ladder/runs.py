"""Runs: the ladder's runs, one after another; which comes next follows from what they came to.

Each is an ordinary Run below the ladder's folder, and its last evaluation is the record of it: a
ladder that was killed goes on where it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.observe.run import Run
from paceline.render.figures import listed
from paceline.search.halving import RungResult
from paceline.search.ladder.law import Point, RateLaw, Sweep, rate_law
from paceline.search.ladder.rungs import (
    FINER,
    MORE_RATES,
    NUM_RATES,
    SWEPT,
    Rung,
    Rungs,
    lengthened,
    sized,
)
from paceline.search.trial_run import TrialProcess, as_trial

Slowness = tuple[float, float]
"""Measured over predicted seconds of a step, the least and the most."""
_TRIED_STEPS = 24


class StoppedError(Exception):
    """A run was asked to stop."""


@dataclass(frozen=True)
class RungRun:
    """A run that came to its end."""

    rung: Rung
    steps: int
    rate: float
    loss: float | None
    """Held out, at the end; None: it failed."""
    step_s: float | None
    """Measured, the median."""
    reason: str = ""
    """Why it failed."""

    @property
    def cost_s(self) -> float:
        """Device-seconds, as predicted."""
        return self.rung.cost_s * self.steps


@dataclass(frozen=True)
class Climbed:
    """What the runs came to."""

    sweep: Sweep
    """Of the smallest rung."""
    rates: RateLaw
    runs: tuple[RungRun, ...]
    """Of all sizes and lengths, at the rate for their length."""
    tokens_per_step: int

    @property
    def points(self) -> list[Point]:
        """Those that didn't fail."""
        return [
            Point(one.rung.params, one.steps * self.tokens_per_step, one.loss)
            for one in self.runs
            if one.loss is not None
        ]

    @property
    def longest_tokens(self) -> int:
        """Of the longest of these runs."""
        return max(one.steps for one in self.runs) * self.tokens_per_step

    @property
    def slowness(self) -> Slowness:
        """Of the largest rung."""
        top = self.runs[-1].rung
        found = [
            one.step_s / top.step_s
            for one in self.runs
            if one.rung == top and one.step_s is not None
        ]
        return (min(found), max(found)) if found else (1.0, 1.0)


@dataclass
class Climb:
    """A ladder under way."""

    job: JobSpec
    cluster: Cluster
    rungs: Rungs
    folder: Path
    """Below which the Runs are."""
    hear: Callable[[Sequence[RungRun], str], None]
    """Told of the runs so far, and what is trained next."""
    process: TrialProcess
    _made: list[RungRun] = field(default_factory=list)

    def climb(self) -> Climbed:
        """Make all runs.

        Raises:
            StoppedError: one of them was asked to stop.
            InputError: too many failed for a law.
        """
        rungs, per_step = self.rungs, self.rungs.tokens_per_step
        sweep = self._sweep(rungs.steps * SWEPT)
        rates = rate_law(sweep)
        runs = tuple(
            self._run(rung, steps, rates.rate(steps * per_step))
            for rung in rungs.rungs
            for steps in rungs.lengths
        )
        self.hear(self._made, "")
        climbed = Climbed(sweep, rates, runs, per_step)
        lacking = [one for one in runs if one.loss is None]
        if len(climbed.points) < max(6, len(runs) - 2):
            raise InputError(
                f"{len(lacking)} of the ladder's {len(runs)} runs failed, the first of them: "
                f"{lacking[0].reason}"
            )
        return climbed

    def _sweep(self, steps: int) -> Sweep:
        """Rates until the best one has neighbours, or no more may be tried; then those between it
        and them."""
        rung, tokens = self.rungs.rungs[0], steps * self.rungs.tokens_per_step
        losses: dict[float, float | None] = {}

        def swept(*rates: float) -> Sweep:
            losses.update((rate, self._run(rung, steps, rate).loss) for rate in rates)
            found = sorted(losses)
            if all(loss is None for loss in losses.values()):
                raise InputError(
                    f"no learning rate of {listed([f'{rate:.2g}' for rate in found])} trains the "
                    f"smallest network: {self._made[-1].reason}; give another optim.lr."
                )
            return Sweep(tokens, tuple(found), tuple(losses[rate] for rate in found))

        middle = self.job.optim.lr
        found = swept(*(middle * 2.0 ** (at - NUM_RATES // 2) for at in range(NUM_RATES)))
        while found.is_open and len(losses) < NUM_RATES + MORE_RATES:
            found = swept(found.rates[0] / 2 if found.best == 0 else found.rates[-1] * 2)
        best = found.rates[found.best]
        return swept(*(best * each for each in FINER))

    def slowness_of(self, heads: int, predicted_s: float) -> Slowness | None:
        """Of another size, by a few steps of it; None: it can't be trained here.

        Args:
            predicted_s: seconds of a step.

        Raises:
            StoppedError: it was asked to stop.
        """
        name = f"{heads}-heads-for-its-speed"
        run, result = self._trained(name, heads, _TRIED_STEPS, self.job.optim.lr)
        if result.loss is None:
            return None
        least, *_, most = quantiles(_steps_s(run), n=10)
        return least / predicted_s, most / predicted_s

    def _run(self, rung: Rung, steps: int, rate: float) -> RungRun:
        name = f"{rung.heads}-heads-{steps}-steps-lr-{rate:.4g}"
        self.hear(self._made, f"{rung.params:,} parameters, {steps:,} steps, lr {rate:.3g}")
        run, result = self._trained(name, rung.heads, steps, rate)
        made = RungRun(rung, steps, rate, result.loss, measured_step_s(run), result.reason)
        self._made.append(made)
        return made

    def _trained(self, name: str, heads: int, steps: int, rate: float) -> tuple[Run, RungResult]:
        job = lengthened(sized(self.job, heads, self.rungs.rungs[0].heads), steps)
        job = job.replace(optim=job.optim.replace(lr=rate), cluster=self.cluster)
        run = Run(self.folder / name)
        result = self.process.train_to(run, as_trial(job, name, steps), steps)
        if result is None:
            raise StoppedError
        return run, result


def measured_step_s(run: Run) -> float | None:
    """Seconds of a step, the median; None: it has none."""
    times = _steps_s(run)
    return median(times) if times else None


def _steps_s(run: Run) -> list[float]:
    """Seconds of steps. The first ones warm up, where there are others."""
    times = [line["step_time_s"] for line in run.metrics() if line.get("step_time_s")]
    return times[len(times) // 4 :]
