"""Finding: one cause of lost time, with its evidence, the gain of mending it, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from paceline.explain.subject import Subject

Confidence = Literal["high", "medium", "low"]
# How much of an estimated gain counts where findings are put in order.
_COUNTS = {"high": 1.0, "medium": 0.75, "low": 0.5}
_CONFIDENCES: tuple[Confidence, ...] = ("low", "medium", "high")

Source = Literal["host", "device", "ranks", "clock", "settings", "reference", "machine"]
"""Who says it. Two sentences are independent evidence if no one mistake could make both wrong, so
if they come from different sources:

- host: operators, ranges and calls of the profiled steps, and on a CPU their times
- device: kernels and copies, what they are called, when the device was idle
- ranks: the same steps on other ranks
- clock: the Run's own clock, over steps that nobody recorded
- settings: the Job, its environment, what the recorded code does by its own account
- reference: what was measured of this hardware before, or predicted from it
- machine: the doctor, NCCL's log, the kernel's counters, a device's properties
"""

Basis = Literal["assumed", "predicted", "measured"]
"""What the gain rests on: a rule of thumb, a prediction held against what was measured, or the loss
as it stands in the steps."""
_BASES: tuple[Basis, ...] = ("assumed", "predicted", "measured")


class Evidence(NamedTuple):
    """A sentence with numbers: which rank, step, span, against what."""

    source: Source
    sentence: str


@dataclass(frozen=True)
class Finding:
    """What one rule found."""

    name: str
    """Of the rule: "straggler-rank"."""
    title: str
    """One sentence: what is wrong, with the figure that matters most."""
    evidence: tuple[Evidence, ...]
    gain_s: float
    """Seconds that a step would be shorter if this were mended, estimated."""
    gain: float
    """The same as a share of the step."""
    changes: tuple[str, ...] = ()
    """Texts for --set that mend it, empty where no setting of the Job does."""
    advice: str = ""
    """What to do, in one sentence, where no setting (or not a setting alone) mends it."""
    basis: Basis = "predicted"

    @property
    def confidence(self) -> Confidence:
        """High: the gain was measured, and two sources say so independently. Medium: one source, or
        a gain that was predicted. Low: a rule of thumb."""
        sources = {each.source for each in self.evidence}
        return _CONFIDENCES[min(_BASES.index(self.basis), len(sources), 2)]

    @property
    def weight(self) -> float:
        """The gain as far as it is sure: what to look at first."""
        return self.gain * _COUNTS[self.confidence]

    @classmethod
    def of(
        cls,
        subject: "Subject",
        title: str,
        gain_s: float,
        evidence: Sequence[Evidence],
        *,
        changes: Sequence[str] = (),
        advice: str = "",
        with_job: str = "",
        basis: Basis = "predicted",
        of_s: float | None = None,
    ) -> "Finding | None":
        """A finding with its gain as a share; None where there is nothing to gain.

        Its name is that of the rule in `RULES`.

        Args:
            with_job: what the advice goes on with where there is a Job, whose settings it names.
            of_s: what the gain is a share of, by default the step. What doesn't happen in every
                step is a share of the mean step.
        """
        whole_s = of_s or subject.step_s
        if not (gain_s > 0 and whole_s > 0):  # steps without length have no shares
            return None
        told = " ".join(each for each in (advice, with_job if subject.job else "") if each)
        return cls(
            "", title, tuple(evidence), gain_s, gain_s / whole_s, tuple(changes), told, basis
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "evidence": [each._asdict() for each in self.evidence],
            "gain_s": self.gain_s,
            "gain": self.gain,
            "changes": list(self.changes),
            "advice": self.advice,
            "basis": self.basis,
            "confidence": self.confidence,
        }
