"""Narrative: what tuning changed, and what each change gave, in words.

The way from the Job as it was given to the best goes group of settings by group, each time the
one that gains most. Where a Job on the way was tried, its gain was measured; else it is what the
planner and the trials together expect (`tune.surrogate`), and called "about".
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.render.figures import amount_text, time_text
from paceline.tune.candidates import checked, predicted, typical_s
from paceline.tune.goal import Figures
from paceline.tune.settings import change_texts, differences, grouped, values, with_changes
from paceline.tune.show import versus_text
from paceline.tune.surrogate import Observation, Surrogate
from paceline.tune.trial import Trial, TuningState

_KEPT_LOSS = {
    "bf16": "with int8, which has half its bits, within 0.00 % of the loss of exact sums",
    "int8": "within 0.00 % of the loss of exact sums after 300 steps",
    "int4": "0.4 % above the loss of exact sums after 300 steps, 30 of them exact",
    "quinary": "0.3 % above the loss of exact sums after 300 steps, 30 of them exact",
}
"""Measured on a small decoder: docs/techniques/compression.md."""


@dataclass(frozen=True)
class ChangeEffect:
    """One of the changes, and what it gave."""

    text: str
    gain: float
    """Share of the step before it."""
    is_measured: bool


def parts(known: TuningState) -> list[ChangeEffect]:
    """The way from the given Job to the best one; nothing where there is none."""
    best, first = known.best, _given_trial(known)
    if best is None or first is None or best.number == first.number:
        return []
    way = _ChangePath(known)
    target = best.job(known.given)
    left = grouped(differences(known.given, target))
    at, found = known.given, []
    while left:
        group, job = way.next(at, left, target)
        taken = left if group is None else {group: left[group]}
        found.append(_part(way, at, job, taken))
        left = {name: one for name, one in left.items() if name not in taken}
        at = job
    return found


def _given_trial(known: TuningState) -> Trial | None:
    return next((trial for trial in known.ran if not trial.changes), None)


class _ChangePath:
    """Seconds of Jobs on the way: measured where they were tried."""

    def __init__(self, known: TuningState) -> None:
        self._tried = {_key(trial.job(known.given)): known.seconds(trial) for trial in known.ran}
        jobs = [(trial, trial.job(known.given)) for trial in known.ran]
        self._typical_s = typical_s(known)
        seen = [
            Observation(job, predicted(job, "", self._typical_s).predicted_s, known.seconds(trial))
            for trial, job in jobs
        ]
        self._expectation = Surrogate(seen)

    def seconds(self, job: Job) -> tuple[float, bool]:
        """And whether they were measured."""
        found = self._tried.get(_key(job))
        if found is not None:
            return found, True
        return self._expectation.of(predicted(job, "", self._typical_s)).seconds, False

    def next(
        self, at: Job, left: Mapping[str, Mapping[str, Any]], target: Job
    ) -> tuple[str | None, Job]:
        """The group that gains most by itself; None and the target where none can run alone."""
        found = []
        for name, changes in left.items():
            with suppress(InputError):
                job = checked(with_changes(at, changes))
                found.append((self.seconds(job)[0], name, job))
        if len(left) == 1 or not found:
            return None, target
        _, name, job = min(found, key=lambda one: one[0])
        return name, job


def _key(job: Job) -> tuple[Any, ...]:
    return job.layout, job.comm


def _part(
    way: _ChangePath, at: Job, job: Job, taken: Mapping[str, Mapping[str, Any]]
) -> ChangeEffect:
    before, was_measured = way.seconds(at)
    after, is_measured = way.seconds(job)
    old = values(at)
    changes = {name: value for one in taken.values() for name, value in one.items()}
    told = [text.partition("=")[0] for text in change_texts(changes)]
    new = {text.partition("=")[0]: text.partition("=")[2] for text in change_texts(changes)}
    text = ", ".join(f"{name} {_said(old[name])} -> {new[name]}" for name in told)
    return ChangeEffect(text, 1 - after / before, was_measured and is_measured)


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def paragraph(known: TuningState) -> str:
    """The result: the step, what was changed, what each change gave, why it ended."""
    best = known.best
    if best is None:
        return "Nothing ran: " + "; ".join(one.note or one.outcome for one in known.trials) + "."
    sentences = [_step_sentence(known, best), _figures_sentence(known, best)]
    changes = parts(known)
    if changes and not known.is_gain_clear:
        sentences.append(f"It differs in {'; '.join(part.text for part in changes)}.")
    elif changes:
        said = "; ".join(_gain_text(part) for part in changes)
        sentences.append(f"What was changed, and what it gave: {said}.")
    sentences += _loss_sentence(best)
    if known.decisions and known.decisions[-1].ends:
        sentences.append(f"It ended because {known.decisions[-1].text}.")
    return " ".join(sentences)


def _step_sentence(known: TuningState, best: Trial) -> str:
    first, step = _given_trial(known), time_text(known.seconds(best))
    if first is None:
        return f"The Job as it was given did not run; trial {best.number} takes {step} a step."
    if first.number == best.number:
        return (
            f"The Job as it was given is the fastest of {len(known.trials)} trials: {step} a step."
        )
    if not known.is_gain_clear:
        return (
            "No trial is faster than the Job as it was given beyond the noise: the fastest, trial "
            f"{best.number}, takes {versus_text(best)} of its step, by turns on the same ranks, in "
            f"{len(known.trials)} trials."
        )
    ratio = math.exp((first.relative or 0.0) - (best.relative or 0.0))
    was = time_text(known.seconds(first))
    return (
        f"A step takes {step} instead of {was}: {ratio:.2f} times as fast, by turns on the same "
        f"ranks, in {len(known.trials)} trials."
    )


def _figures_sentence(known: TuningState, best: Trial) -> str:
    figures = Figures.of(known, best)
    said = [f"{amount_text(figures.rate)} {figures.unit}/s"]
    if figures.mfu is not None:
        said.append(f"MFU {figures.mfu:.1%}")
    if figures.efficiency is not None and known.reference is not None:
        one = time_text(known.reference.step_s)
        said.append(
            f"scaling efficiency {figures.efficiency:.0%} (one device with its share of the work: "
            f"{one}, {known.reference.origin})"
        )
    return ", ".join(said) + "."


def _gain_text(part: ChangeEffect) -> str:
    about = "" if part.is_measured else "about "
    if abs(part.gain) < 0.005:
        return f"{part.text} (no difference)"
    return f"{part.text} ({about}{-part.gain:+.0%} of the step)"


def _loss_sentence(best: Trial) -> list[str]:
    form = str(best.changes.get("comm.dp.compress", "none"))
    if form not in _KEPT_LOSS:
        return []
    return [
        f"Gradients travel as {form}: measured {_KEPT_LOSS[form]}; hold them exact with "
        "--keep comm.dp.compress."
    ]
