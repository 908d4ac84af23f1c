"""Surrogate: what a Job's step will take, from the planner and from what the trials have shown.

The planner's error of a Job is like that of Jobs near to it: a Gaussian process over the logarithm
of measured over predicted, with a kernel that falls with the settings that differ
(`settings.distance`). So a trial corrects what is expected of its neighbours, and leaves others as
uncertain as the planner is. What to try next is what promises the largest gain on average over that
uncertainty (expected improvement: Jones, Schonlau, Welch 1998,
https://doi.org/10.1023/A:1008306431147).

A trial round tries several at once. After the first is chosen, the next is chosen as if the first
had turned out as expected ("kriging believer", Ginsbourger, Le Riche, Carraro 2010). What promises
only as much is then no gain any more, and something different is tried beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline.config.job import Job
from paceline.tune.settings import distance
from paceline.tune.trial import Candidate

_LEAST_ERROR, _MOST_ERROR = 0.08, 0.5
_PRIOR_ERROR, _PRIOR_WEIGHT = 0.2, 3.0
"""The planner's usual error on a machine that was measured quickly, and how many trials it takes to
say otherwise. Assumed."""
_NOISE = 0.02
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Observation:
    """A Job with a time."""

    job: Job
    predicted_s: float
    step_s: float
    uncertainty: float = 0.0
    """Standard deviation of its logarithm."""

    @property
    def error(self) -> float:
        """Logarithm of measured over predicted."""
        return math.log(self.step_s / self.predicted_s)


@dataclass(frozen=True)
class Posterior:
    """What a Job's step will take: log-normal."""

    log_s: float
    deviation: float

    @property
    def seconds(self) -> float:
        """The median."""
        return math.exp(self.log_s)

    def gain(self, best_s: float) -> float:
        """Share of the best step that trying it saves on average: 0 where it turns out slower."""
        ahead = math.log(best_s) - self.log_s
        if self.deviation < 1e-6:
            return max(0.0, 1 - math.exp(-ahead))
        # E[max(0, 1 - t / best)] with t log-normal.
        z = ahead / self.deviation
        drift = math.exp(-ahead + self.deviation**2 / 2)
        return _NORMAL.cdf(z) - drift * _NORMAL.cdf(z - self.deviation)


class Surrogate:
    """What is expected of Jobs, by some that were seen."""

    def __init__(self, seen: Sequence[Observation]) -> None:
        """Learn from the trials; without any, the planner is believed within its usual error."""
        self._seen = list(seen)
        errors = np.array([one.error for one in seen])
        # Common to all: a machine that is busier than when it was measured.
        self._common = float(np.median(errors)) if len(errors) else 0.0
        self._errors = errors - self._common
        self._deviation = _usual_error(self._errors)
        kernel = self._kernel([one.job for one in seen], [one.job for one in seen])
        noisy = kernel + np.diag([_NOISE**2 + one.uncertainty**2 for one in seen])
        self._inverse = np.linalg.inv(noisy) if len(self._seen) else noisy

    def of(self, candidate: Candidate) -> Posterior:
        """What is expected of a candidate."""
        if candidate.known is not None:
            return Posterior(*candidate.known)
        near = self._kernel([candidate.job], [one.job for one in self._seen])[0]
        weights = near @ self._inverse
        error = self._common + float(weights @ self._errors)
        variance = self._deviation**2 - float(weights @ near)
        return Posterior(math.log(candidate.predicted_s) + error, math.sqrt(max(variance, 1e-8)))

    def believing(self, candidate: Candidate) -> "Surrogate":
        """What would be expected if the candidate turned out as expected."""
        log_s = self.of(candidate).log_s
        seen = [*self._seen, Observation(candidate.job, candidate.predicted_s, math.exp(log_s))]
        return Surrogate(seen)

    def _kernel(self, ones: Sequence[Job], others: Sequence[Job]) -> npt.NDArray[np.float64]:
        apart = [[distance(one, other) for other in others] for one in ones]
        return self._deviation**2 * np.exp(-np.array(apart).reshape(len(ones), len(others)))


def _usual_error(errors: npt.NDArray[np.float64]) -> float:
    """How wrong predictions are, by those that were tried and by what is usual."""
    squares = float(np.sum(errors**2)) + _PRIOR_WEIGHT * _PRIOR_ERROR**2
    found = math.sqrt(squares / (len(errors) + _PRIOR_WEIGHT))
    return min(max(found, _LEAST_ERROR), _MOST_ERROR)


@dataclass(frozen=True)
class _Acquisition:
    candidate: Candidate
    expected: Posterior
    gain: float
    """Share of the best step."""


def most_promising(
    candidates: Sequence[Candidate],
    seen: Sequence[Observation],
    best_s: float,
    num: int,
    least: float,
) -> list[Candidate]:
    """The candidates to try next, the most promising first, with what is expected of them.

    Args:
        candidates: none of them was tried.
        seen: what was, with the planner's predictions by the constants of now.
        best_s: the step to beat.
        num: how many at most.
        least: gains below this are not worth a trial.
    """
    expectation, left = Surrogate(seen), list(candidates)
    chosen: list[Candidate] = []
    while left and len(chosen) < num:
        promises = [_acquisition(expectation, one, best_s) for one in left]
        at = max(range(len(left)), key=lambda index: promises[index].gain)
        if promises[at].gain < least:
            break
        expected_s = promises[at].expected.seconds
        chosen.append(replace(left[at], expected_s=expected_s))
        best_s = min(best_s, expected_s)
        expectation = expectation.believing(left.pop(at))
    return chosen


def _acquisition(expectation: Surrogate, candidate: Candidate, best_s: float) -> _Acquisition:
    expected = expectation.of(candidate)
    return _Acquisition(candidate, expected, expected.gain(best_s))
