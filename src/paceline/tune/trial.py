"""Trial: what was tried, what came of it, and what was decided.

Trials are compared within a trial round, where a few Jobs take turns on the same ranks; `relative`
joins the trial rounds by the Job that ran in both. So a machine that is slower today than yesterday
shifts the seconds of a trial round, not the comparison.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.config.job import Job
from paceline.tune.settings import with_changes

_ROUNDING = 0.03

Outcome = Literal["measured", "slower", "out of memory", "died", "hung"]
"""slower: measured until it was clear that it isn't the best, and dropped early."""
FAILURES = ("out of memory", "died", "hung")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A Job that might be faster."""

    job: Job
    why: str
    """Who proposes it: the planner, a finding, a neighbour of the best."""
    predicted_s: float
    """By the planner, with the Cluster's constants."""
    peak_bytes: float
    """Of the heaviest device, as predicted."""
    heaviest: str = ""
    """The term that most of it is; "" where nobody predicted it."""
    known: tuple[float, float] | None = None
    """Logarithm of the seconds, and how sure that is (a standard deviation), where somebody else
    than the planner knows: a finding."""
    expected_s: float | None = None
    """What was expected of it when it was chosen; None: what the planner predicted."""


@dataclass(frozen=True)
class Trial:
    """One Job that was tried."""

    number: int
    heat: int
    changes: Mapping[str, Any]
    """What to change of the Job as it was given."""
    why: str
    predicted_s: float
    """By the planner, when it was chosen."""
    expected_s: float
    """By planner and trials together, when it was chosen."""
    peak_bytes: float
    """Of a device's memory, predicted."""
    outcome: Outcome
    steps_s: tuple[float, ...] = ()
    """Of every timed step."""
    step_s: float | None = None
    """Median."""
    relative: float | None = None
    """Logarithm of its step over that of the first Job that ran, by turns."""
    uncertainty: float = 0.0
    """Half of the 90 % interval of `relative` within its trial round."""
    note: str = ""
    """What came of it, as a sentence."""
    heaviest: str = ""
    """The term that is most of its predicted memory."""

    @property
    def ran(self) -> bool:
        """Whether there is a time to compare."""
        return self.relative is not None

    def job(self, given: Job) -> Job:
        """The Job that was tried."""
        return with_changes(given, self.changes)

    def to_json(self) -> dict[str, Any]:
        """As a line of trials.jsonl."""
        return {"kind": "trial", **asdict(self), "changes": dict(self.changes)}


@dataclass(frozen=True)
class Decision:
    """What was concluded after a trial round."""

    heat: int
    best: int
    """Number of the best trial so far."""
    text: str
    ends: bool = False
    """Whether there was nothing more to do."""

    def to_json(self) -> dict[str, Any]:
        """As a line of trials.jsonl."""
        return {"kind": "decision", **asdict(self)}


@dataclass(frozen=True)
class Reference:
    """The same work on one device, which scaling efficiency is held against."""

    step_s: float
    samples: int
    """Of its step."""
    origin: str
    """"measured ..." or "predicted ...", with the reason."""

    def to_json(self) -> dict[str, Any]:
        """As a line of trials.jsonl."""
        return {"kind": "reference", **asdict(self)}


@dataclass(frozen=True)
class TuningState:
    """All that was tried so far."""

    given: Job
    """As it was given."""
    trials: tuple[Trial, ...] = ()
    decisions: tuple[Decision, ...] = ()
    reference: Reference | None = None

    @property
    def ran(self) -> list[Trial]:
        """Trials with a time."""
        return [trial for trial in self.trials if trial.ran]

    @property
    def is_gain_clear(self) -> bool:
        """Whether the best is faster than the first Job that ran, beyond the noise: by more than
        half of its 90 % interval."""
        best = self.best
        return best is not None and (best.relative or 0.0) + best.uncertainty < 0

    @property
    def best(self) -> Trial | None:
        """The fastest that ran to the end of a race.

        What sends gradients in a form that was not asked for must win by more: see `_handicap`.
        """
        finished = [trial for trial in self.ran if trial.outcome == "measured"]
        return min(finished, key=lambda one: (one.relative or 0.0) + _handicap(one), default=None)

    @property
    def first(self) -> Trial | None:
        """What `relative` is relative to."""
        return next((trial for trial in self.ran if trial.relative == 0.0), None)

    def seconds(self, trial: Trial) -> float:
        """Seconds of a step as if it had been measured beside the first Job that ran."""
        assert self.first is not None
        assert self.first.step_s is not None
        return self.first.step_s * math.exp(trial.relative or 0.0)

    @property
    def ceiling_bytes(self) -> float:
        """Predicted bytes of a device from which on memory was exhausted in a trial."""
        lacked = [one.peak_bytes for one in self.trials if one.outcome == "out of memory"]
        return min(lacked, default=math.inf)

    @property
    def num_rounds(self) -> int:
        """How many were run."""
        return 1 + max((trial.heat for trial in self.trials), default=-1)


def _handicap(trial: Trial) -> float:
    """As the planner has it (`plan.search.gradient_comm`): exact sums stay unless another form wins
    by 3 %, for it rounds what is learnt."""
    return _ROUNDING if trial.changes.get("comm.dp.compress", "none") != "none" else 0.0
