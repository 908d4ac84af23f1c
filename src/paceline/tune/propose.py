"""Propose: which Jobs a trial round tries next, by what the planner, the findings and the trials
say.

The planner's constants are fitted to the trials each time there are twice as many; what it still
gets wrong about a Job is learnt from the trials near to it (`tune.surrogate`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.config.catalogue.own_stack import own_stack
from paceline.config.job import Job
from paceline.config.stack import Stack
from paceline.explain.finding import Finding
from paceline.plan.calibrate import MeasuredJob, fit
from paceline.plan.points import Setting
from paceline.tune.candidates import (
    Question,
    from_findings,
    from_planner,
    neighbours,
    predicted,
    typical_s,
    untried,
)
from paceline.tune.surrogate import Observation, most_promising
from paceline.tune.trial import Candidate, Trial, TuningState

LEAST_GAIN = 0.01
"""Of a step: what a candidate must promise on average to be worth a trial."""
_LEAST_CASES = 3
_HALF_INTERVAL = 1.64
"""Half of a 90 % interval, in standard deviations."""
_MOST_CASES = 8
"""Trials that constants are fitted to, the latest ones."""


@dataclass
class Proposer:
    """Knows the planner's constants of now, and what was found in the best one's profile."""

    question: Question
    calibrate: Callable[[Sequence[MeasuredJob], Stack, str], Stack] = fit
    findings: Sequence[Finding] = ()
    """In the profile of the best."""
    _stack: Stack = field(init=False)
    _fitted_to: int = 0
    _ranked: list[Candidate] | None = None
    """By the planner, with the constants of now."""

    def __post_init__(self) -> None:
        self._stack = self._start

    @property
    def _start(self) -> Stack:
        cluster = self.question.given.cluster
        return cluster.stack or own_stack(cluster.device.kind)

    def first(self, known: TuningState) -> Candidate:
        """The Job as it was given."""
        return predicted(self.question.given, "the Job as it was given", typical_s(known))

    def again(self, known: TuningState, trial: Trial) -> Candidate:
        """What was tried, for another trial round."""
        return predicted(self._now(trial.job(known.given)), trial.why, typical_s(known))

    def next(self, known: TuningState, num: int, least: float = LEAST_GAIN) -> list[Candidate]:
        """What promises most; nothing where no candidate promises enough.

        Args:
            known: what was tried.
            num: how many at most.
            least: share of the best step that a candidate has to promise.
        """
        self._calibrate(known)
        pool = self._pool(known)
        best = known.best
        if best is not None:
            return most_promising(pool, self._seen(known), known.seconds(best), num, least)
        planned_s = min((one.predicted_s for one in pool), default=0.0)
        return most_promising(pool, [], planned_s, num, 0.0)

    def _pool(self, known: TuningState) -> list[Candidate]:
        best = known.best
        question = replace(self.question, given=self._now(known.given), typical_s=typical_s(known))
        if self._ranked is None:
            self._ranked = from_planner(question)
        candidates = self._ranked
        if best is not None:
            job = self._now(best.job(known.given))
            mended = from_findings(question, self.findings, job, known.seconds(best))
            candidates = [*mended, *neighbours(question, job), *candidates]
        elif candidates:
            candidates = [*candidates, *neighbours(question, candidates[0].job)]
        tried = [known.given, *(trial.job(known.given) for trial in known.trials)]
        limit = min(self.question.limit_bytes, known.ceiling_bytes)
        return untried(candidates, tried, lambda one: one.peak_bytes >= limit)

    def _seen(self, known: TuningState) -> list[Observation]:
        found = []
        for trial in known.ran:
            now = self.again(known, trial)
            deviation = trial.uncertainty / _HALF_INTERVAL
            found.append(Observation(now.job, now.predicted_s, known.seconds(trial), deviation))
        return found

    def _now(self, job: Job) -> Job:
        """With the constants of now."""
        return job.replace(cluster=job.cluster.replace(stack=self._stack))

    def _calibrate(self, known: TuningState) -> None:
        enough = max(_LEAST_CASES, 2 * self._fitted_to)
        if len(known.ran) < enough or not known.given.model.knows_layers:
            return  # constants are those of steps by layers
        self._fitted_to = len(known.ran)
        cases = [_case(known, trial) for trial in known.ran[-_MOST_CASES:]]
        self._stack = self.calibrate(cases, self._start, f"trials of {known.given.name}")
        self._ranked = None


def _case(known: TuningState, trial: Trial) -> MeasuredJob:
    job = trial.job(known.given)
    return MeasuredJob(Setting.of(job), job.layout, known.seconds(trial))
