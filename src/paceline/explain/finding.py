"""Finding: one cause of lost time, with its evidence, the gain of mending it, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.explain.subject import Subject

Confidence = Literal["high", "medium", "low"]
"""high: the gain was measured, as it stands in the steps; medium: it rests on a prediction, held
against what was measured; low: on a rule of thumb."""
# How much of an estimated gain counts where findings are put in order.
_COUNTS = {"high": 1.0, "medium": 0.75, "low": 0.5}


@dataclass(frozen=True)
class Finding:
    """What one rule found."""

    name: str
    """Of the rule: "straggler-rank"."""
    title: str
    """One sentence: what is wrong, with the figure that matters most."""
    evidence: tuple[str, ...]
    """Sentences with numbers: which rank, step, span, against what."""
    gain_s: float
    """Seconds that a step would be shorter if this were mended, estimated."""
    gain: float
    """The same as a share of the step."""
    changes: tuple[str, ...] = ()
    """Texts for --set that mend it, empty where no setting of the Job does."""
    advice: str = ""
    """What to do, in one sentence, where no setting (or not a setting alone) mends it."""
    confidence: Confidence = "medium"

    @property
    def weight(self) -> float:
        """The gain as far as it is sure: what to look at first."""
        return self.gain * _COUNTS[self.confidence]

    @classmethod
    def of(
        cls,
        subject: "Subject",
        name: str,
        title: str,
        gain_s: float,
        evidence: Sequence[str],
        *,
        changes: Sequence[str] = (),
        advice: str = "",
        confidence: Confidence = "medium",
        of_s: float | None = None,
    ) -> "Finding | None":
        """A finding with its gain as a share; None where there is nothing to gain.

        Args:
            of_s: what the gain is a share of, by default the step. What doesn't happen in every
                step is a share of the mean step.
        """
        share = gain_s / (of_s or subject.step_s)
        if share <= 0:
            return None
        return cls(name, title, tuple(evidence), gain_s, share, tuple(changes), advice, confidence)
