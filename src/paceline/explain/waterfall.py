"""Waterfall: from the step that the devices' peak would allow, term by term, to the one measured.

The ideal step does the model's FLOPs at the peak of all devices and nothing else. What products
and attention take beyond it is lost below the peak; every other term is lost whole. Beside each
stands what the plan predicted, where there is a plan. Measured terms are those of profiled steps,
brought to the length of steps that nobody looks at: recording lengthens work, not waits.
"""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.explain.subject import Subject
from paceline.observe.summary import mean_terms, summarise
from paceline.observe.terms import TERMS, coarse, in_order

# What the model's FLOPs are done in.
_USEFUL = ("matmul", "attention")
_WAITS = ("exposed_comm", "straggler_wait", "bubble", "data_wait", "checkpoint_stall")


class WaterfallRow(NamedTuple):
    """A term of the step."""

    term: str
    measured_s: float
    predicted_s: float | None
    """None: there is no plan that knows."""


class Waterfall(NamedTuple):
    """Where the time between the ideal and the measured step goes."""

    step_s: float
    """Measured; the terms sum to it."""
    ideal_s: float | None
    """None where the devices' peak or the model's FLOPs aren't known."""
    rows: tuple[WaterfallRow, ...]
    """In the order of the vocabulary."""
    predicted_s: float | None
    interval_s: tuple[float, float] | None

    @property
    def below_peak_s(self) -> float | None:
        """What products and attention take beyond the ideal step."""
        if self.ideal_s is None:
            return None
        return sum(row.measured_s for row in self.rows if row.term in _USEFUL) - self.ideal_s


def waterfall(subject: Subject) -> Waterfall:
    """Of a Run or a trace.

    Raises:
        InputError: there is no finished step.
    """
    planned = subject.planned
    mfu = summarise(subject.steady, subject.facts).mfu
    return Waterfall(
        subject.step_s,
        None if mfu is None else mfu * subject.step_s,
        tuple(terms_beside(subject)),
        None if planned is None else planned.step_s,
        None if planned is None else planned.interval_s,
    )


def terms_beside(subject: Subject) -> list[WaterfallRow]:
    """The terms of the step, measured and predicted."""
    measured = measured_terms(subject)
    predicted: Mapping[str, float] = {} if subject.planned is None else subject.planned.time_s
    if predicted:
        measured = coarse(measured)
    rows = []
    for term in in_order({*measured, *(term for term, s in predicted.items() if s)}):
        expected = predicted.get(term, 0.0) if predicted else None
        rows.append(WaterfallRow(term, measured.get(term, 0.0), expected))
    return rows


def measured_terms(subject: Subject) -> dict[str, float]:
    """Mean seconds by term over ranks and profiled steps, scaled to sum to `subject.step_s`."""
    if subject.account is None:
        return mean_terms(subject.steady)
    account, rows = subject.account, subject.measured.rows
    means = account.terms_ns[rows].reshape(-1, len(TERMS)).mean(axis=0) / 1e9
    seconds = dict(zip(TERMS, map(float, means), strict=True))
    paced = {
        term: value * (1.0 if term.startswith(_WAITS) else subject.pace)
        for term, value in seconds.items()
        if value > 1e-12
    }
    whole = sum(paced.values())
    return {term: value * subject.step_s / whole for term, value in paced.items()} if whole else {}
