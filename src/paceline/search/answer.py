"""Answer: what a search found, by its rule, as data for the terminal, the page and --json."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.render.figures import bytes_text, duration_text, loss_text, plural, time_text
from paceline.search.halving import Halving, Trial
from paceline.search.rules import cheapest, fronts, knee
from paceline.search.space import ObjectiveName, Search, point_text, settings_of
from paceline.search.study import Known

FIGURE_TEXTS: Mapping[str, Callable[[float], str]] = {
    "loss": loss_text,
    "time": duration_text,
    "memory": bytes_text,
    "latency": time_text,
    "energy": lambda value: f"{value:.3g} kWh",
    "usd": lambda value: f"{value:.3g} USD",
}


@dataclass(frozen=True)
class Found:
    """What is known, and the answer."""

    search: Search
    halving: Halving
    known: Known
    chosen: Trial | None
    """By the rule; None: nothing meets it."""
    front: tuple[Trial, ...]
    """Of those that were trained to the end, those that none of them beats."""
    spent_s: float
    """Device-seconds, as predicted."""
    sentence: str

    @classmethod
    def of(cls, search: Search, halving: Halving, known: Known) -> "Found":
        """The answer of what is known so far."""
        finished = halving.finished(known.trials)
        last = len(halving.steps) - 1
        values = [trial.values(last, search.objectives) for trial in finished]
        front = sorted(fronts(values)[0]) if finished else []
        at: int | None = None
        if front and search.rule_used == "knee":
            at = front[knee([values[one] for one in front])]
        elif front:
            judged = search.objectives.index("loss")
            limit = search.limits.loss if search.rule_used == "cheapest" else None
            if limit is not None:
                by = next(n for n, name in enumerate(search.objectives) if name != "loss")
                at = cheapest(values, judged, limit, by)
            else:
                at = min(range(len(values)), key=lambda one: (values[one][judged], values[one]))
        chosen = None if at is None else finished[at]
        return cls(
            search,
            halving,
            known,
            chosen,
            tuple(finished[one] for one in front),
            sum(map(halving.spent, known.trials)),
            _sentence(search, halving, finished, chosen),
        )

    @property
    def measured_s(self) -> float:
        """Seconds that trials took, with their starts."""
        return sum(one.seconds for trial in self.known.trials for one in trial.results)

    @property
    def reasons(self) -> Counter[str]:
        """Why points were refused, and how many for each; those that only lacked budget aside."""
        said = (one.answer for one in self.known.refused)
        return Counter(one.reason for one in said if one.kind == "refused")

    @property
    def counts_text(self) -> str:
        """How many there were of what."""
        known = self.known
        parts = [
            plural(len(known.trials), "trial"),
            f"{len(self.halving.finished(known.trials))} trained to the end",
            f"{plural(self.reasons.total(), 'point')} refused before they ran",
        ]
        if failed := sum(trial.failed for trial in known.trials):
            parts.append(f"{failed} failed")
        return ", ".join(parts)

    def to_json(self, folder: str) -> dict[str, Any]:
        """As plain data."""
        return {
            "folder": folder,
            "rule": self.search.rule_used,
            "answer": None if self.chosen is None else self._trial_json(self.chosen),
            "front": [self._trial_json(trial) for trial in self.front],
            "trials": [self._trial_json(trial) for trial in self.known.trials],
            "refused": [
                {"settings": settings_of(one.point), "reason": one.answer.reason}
                for one in self.known.refused
                if one.answer.kind == "refused"
            ],
            "predicted_device_s": self.spent_s,
            "measured_s": self.measured_s,
            "text": self.sentence,
        }

    def _trial_json(self, trial: Trial) -> dict[str, Any]:
        return {
            "number": trial.number,
            "settings": settings_of(trial.point),
            "predicted": dict(trial.figures),
            "rungs": [
                {"steps": steps, **vars(result)}
                for steps, result in zip(self.halving.steps, trial.results, strict=False)
            ],
        }


def newest_loss(trial: Trial) -> float | None:
    """At the last rung that it came to."""
    return next((one.loss for one in reversed(trial.results) if one.loss is not None), None)


def figure_text(trial: Trial, name: ObjectiveName) -> str:
    """Of an objective."""
    value = newest_loss(trial) if name == "loss" else trial.figures[name]
    return "–" if value is None else FIGURE_TEXTS[name](value)


def _sentence(search: Search, halving: Halving, finished: list[Trial], chosen: Trial | None) -> str:
    if not finished:
        return (
            "no trial was trained to the end: where the search was stopped run it again, else give "
            "search.within more time, or a Job fewer steps."
        )
    if chosen is None:
        least = min(one.loss(len(halving.steps) - 1) or 0.0 for one in finished)
        return (
            f"no trial has a loss within {search.limits.loss:g}; the least is {loss_text(least)}: "
            "raise limits.loss, or give more time."
        )
    figures = ", ".join(f"{name} {figure_text(chosen, name)}" for name in search.objectives)
    why = {
        "best": "has the least loss",
        "cheapest": "is the cheapest whose loss is within its limit",
        "knee": "is the knee of the front, which gives up least of everything",
    }[search.rule_used]
    return f"trial {chosen.number} {why}: {point_text(chosen.point)} ({figures})."
