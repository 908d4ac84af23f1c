"""Best evaluation: which evaluation was the best one so far, and whether it is time to stop.

What is judged (`checkpoint.best`) is the same number on every rank, so all decide alike.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from paceline.config.errors import InputError
from paceline.config.job import JobSpec
from paceline.train.metrics_buffer import Line


def must_be_figure(best: str, known: Collection[str]) -> None:
    """Refuse to judge evaluations by what they don't have.

    Args:
        best: `checkpoint.best`.
        known: figures that they have.

    Raises:
        InputError: it is none of these.
    """
    if best not in known:
        raise InputError(
            f"checkpoint.best = {best!r} is no figure of an evaluation: use one of "
            f"{', '.join(sorted(known))}."
        )


@dataclass
class BestEvaluation:
    """The best evaluation of a run."""

    job: JobSpec
    value: float | None = None
    """None before the first."""
    step: int = 0
    num_worse: int = 0
    """Evaluations since."""
    is_due: bool = False
    """The one after the newest step is still to be made: a stop or a kill came before its end."""

    def see(self, evaluation: Line, done: int) -> None:
        """Judge the evaluation after `done` steps.

        Raises:
            InputError: it doesn't have the figure that is asked for.
        """
        name = self.job.checkpoint.best
        if name is None:
            return
        figures = {**evaluation, **evaluation.get("eval_figures", {})}
        known = [key for key, value in figures.items() if isinstance(value, float)]
        must_be_figure(name, set(known) - {"eval_s"})
        value = figures[name]
        if self.value is None or self._is_better(value, self.value):
            self.value, self.step, self.num_worse = value, done, 0
        else:
            self.num_worse += 1

    def _is_better(self, value: float, than: float) -> bool:
        if math.isnan(than):
            return not math.isnan(value)
        return value > than if self.job.checkpoint.best_is == "most" else value < than

    @property
    def is_over(self) -> bool:
        """Whether the run's patience is at its end."""
        return 0 < self.job.train.patience <= self.num_worse

    def is_finished(self, done: int) -> bool:
        """Whether a run that has done so many steps has nothing left to do."""
        return self.is_over or (done >= self.job.train.steps and not self.is_due)

    def found(self) -> dict[str, Any]:
        """What was judged, and what came of it."""
        numbers = {"value": self.value, "step": self.step, "num_worse": self.num_worse}
        return {**numbers, "judged": self._judged}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**self.found(), "is_due": self.is_due}

    def load(self, facts: dict[str, Any], was_made: Callable[[], bool] = lambda: False) -> None:
        """Go on with what a checkpoint kept, unless something else is judged now.

        Args:
            facts: see `facts`.
            was_made: whether the evaluation after its step is in metrics.jsonl. The last checkpoint
                is saved before that, and once more only where evaluations are judged.
        """
        self.is_due = facts.get("is_due", False)
        if self.is_due and self.job.checkpoint.best is None:
            self.is_due = not was_made()
        if facts.get("judged") == self._judged:
            self.value, self.step = facts["value"], facts["step"]
            self.num_worse = facts["num_worse"]

    @property
    def _judged(self) -> list[str | None]:
        return [self.job.checkpoint.best, self.job.checkpoint.best_is]

    def sentence(self) -> str:
        """Why the run is over, for a person."""
        return (
            f"{self.job.checkpoint.best} was best at step {self.step} ({self.value:.4g}) and not "
            f"better in {self.num_worse} evaluations since"
        )
