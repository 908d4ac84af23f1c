"""Halving: which trial goes on next, and when a new one starts, within a budget of device time.

Asynchronous successive halving (https://arxiv.org/abs/1810.05934), over several objectives by
non-dominated sorting (https://arxiv.org/abs/2106.12639): of the trials at a rung the best one in
`factor` go on, and the best always, so that there is an answer early. What each move costs is what
the planner predicts, so which trials there are doesn't depend on how busy the machine is, and a
search that was killed makes the same moves again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.search.rules import Values, ranking
from paceline.search.space import ObjectiveName, Point


@dataclass(frozen=True)
class RungResult:
    """What a trial came to at a rung."""

    loss: float | None
    """Held out; None: it failed."""
    seconds: float = 0.0
    """Measured, from this trial's rung before, with its start."""
    cpu_s: float = 0.0
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class Trial:
    """A point that was started."""

    number: int
    """From 1."""
    point: Point
    figures: Mapping[ObjectiveName, float]
    """As in `Forecast`."""
    cost_s: float
    """Device-seconds of a step, predicted."""
    results: tuple[RungResult, ...] = ()
    """By rung."""

    @property
    def failed(self) -> bool:
        """Whether it ended before a rung."""
        return bool(self.results) and self.results[-1].loss is None

    def loss(self, rung: int) -> float | None:
        """At a rung; None: it wasn't reached."""
        return self.results[rung].loss if rung < len(self.results) else None

    def values(self, rung: int, objectives: Sequence[ObjectiveName]) -> Values:
        """Objectives at a rung that it reached."""
        loss = self.loss(rung)
        assert loss is not None
        return tuple(loss if name == "loss" else self.figures[name] for name in objectives)

    def with_result(self, result: RungResult) -> "Trial":
        """Having come to its next rung."""
        return replace(self, results=(*self.results, result))


@dataclass(frozen=True)
class Halving:
    """The rungs of a search."""

    steps: tuple[int, ...]
    """Of each rung, increasing."""
    factor: int
    objectives: Sequence[ObjectiveName] = field(default=("loss",))

    def cost(self, trial: Trial, to: int) -> float:
        """Device-seconds to a rung from where the trial is."""
        done = self.steps[len(trial.results) - 1] if trial.results else 0
        return trial.cost_s * (self.steps[to] - done)

    def spent(self, trial: Trial) -> float:
        """Device-seconds of a trial so far; a rung at which it failed counts."""
        return trial.cost_s * self.steps[len(trial.results) - 1] if trial.results else 0.0

    def at(self, trials: Sequence[Trial], rung: int) -> list[Trial]:
        """Those that came to a rung, the best first."""
        there = [trial for trial in trials if trial.loss(rung) is not None]
        values = [trial.values(rung, self.objectives) for trial in there]
        return [there[at] for at in ranking(values)]

    def promotion(self, trials: Sequence[Trial], left_s: float) -> Trial | None:
        """The trial that has earned its next rung; the highest rung first."""
        for rung in reversed(range(len(self.steps) - 1)):
            there = self.at(trials, rung)
            for trial in there[: max(1, len(there) // self.factor)]:
                if len(trial.results) == rung + 1 and self.cost(trial, rung + 1) <= left_s:
                    return trial
        return None

    def reserve(self, trials: Sequence[Trial]) -> float:
        """Device-seconds that finish one trial: kept, while none has come to the last rung."""
        if any(trial.loss(len(self.steps) - 1) is not None for trial in trials):
            return 0.0
        open_ = [trial for trial in trials if trial.results and not trial.failed]
        return min((self.cost(trial, len(self.steps) - 1) for trial in open_), default=0.0)

    def last_promotion(self, trials: Sequence[Trial], left_s: float) -> Trial | None:
        """Once nothing new starts: the best trial that can still be finished."""
        last = len(self.steps) - 1
        for rung in reversed(range(last)):
            for trial in self.at(trials, rung):
                if len(trial.results) == rung + 1 and self.cost(trial, last) <= left_s:
                    return trial
        return None

    def finished(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those that were trained to the end, in the order of their numbers."""
        return [one for one in trials if one.loss(len(self.steps) - 1) is not None]
