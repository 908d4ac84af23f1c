"""A measurer that measures nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config.errors import RunError
from paceline.config.job import Job
from paceline.tune.measurer import Progress, Result, RoundResults
from paceline.tune.trial import Candidate, Outcome


@dataclass
class FakeMeasurer:
    """A measurer whose Jobs take what a function says: for tests of whatever decides by it."""

    step_s: Callable[[Job], float | Outcome]
    """Seconds of a Job's step, or how it fails."""
    tried: list[Job] = field(default_factory=list)
    """In the order of the trials, again for each trial round."""

    def measure(
        self, candidates: Sequence[Candidate], folder: Path | None, progress: Progress
    ) -> RoundResults:
        """See `Measurer.measure`."""
        self.tried += [one.job for one in candidates]
        told = [self.step_s(one.job) for one in candidates]
        first = told[0]
        return {at: _told(one, first) for at, one in enumerate(told)}

    def alone(self, job: Job) -> float:
        """See `Measurer.alone`."""
        found = self.step_s(job)
        if isinstance(found, str):
            raise RunError(found)
        return found


def _told(one: float | Outcome, first: float | Outcome) -> Result:
    if isinstance(one, str):
        return Result(one, note=f"it is said to be {one}")
    versus = None if isinstance(first, str) else (math.log(one / first), 0.0)
    return Result("measured", (one, one, one), versus)
