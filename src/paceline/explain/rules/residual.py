"""Rules about what was measured beyond the prediction, less all that has a named cause."""

from paceline.explain.finding import Evidence, Finding
from paceline.explain.rules.kernels import longest
from paceline.explain.subject import Subject
from paceline.explain.waterfall import terms_beside
from paceline.explain.what_if import predicted
from paceline.render.figures import time_text

_PRODUCTS = ("matmul", "attention")
_OTHERS = ("other_kernels", "optimizer")
# Products this many times slower than they were measured alone are worth a word.
_MUCH_SLOWER = 1.5
# And so are those that are slower than everything else is by this factor.
_SLOWER_THAN_REST = 1.3


def slow_kernels(subject: Subject, explained_s: float) -> Finding | None:
    """On every rank, products stay far below what this device was measured to reach.

    A machine that is slower in everything is none of this rule's: products have to be slower than
    the rest is.

    Args:
        subject: with a Job whose device's speed is known.
        explained_s: gains of the findings so far.
    """
    own = predicted(subject.job) if subject.job is not None else None
    if own is None or subject.account is None:
        return None
    should_s = sum(own.time_s.get(term, 0.0) for term in _PRODUCTS)
    others_s = sum(own.time_s.get(term, 0.0) for term in _OTHERS)
    if not should_s or not others_s:
        return None
    measured_s = _least_s(subject, *_PRODUCTS)
    rest = max(1.0, _least_s(subject, *_OTHERS) / others_s)
    ratio = measured_s / should_s
    if ratio < _MUCH_SLOWER or ratio < _SLOWER_THAN_REST * rest:
        return None
    return Finding.of(
        subject,
        f"Products and attention take {ratio:.1f} times as long as this device was measured to "
        "need.",
        measured_s - should_s * rest - explained_s,
        [
            Evidence(
                "reference",
                f"{time_text(measured_s)} against {time_text(should_s)} a step, on the "
                "fastest rank.",
            ),
            *longest(subject, *_PRODUCTS),
        ],
        advice="Look for sizes that aren't multiples of 64, for other work on the device, and for "
        "lowered clocks; `paceline bench kernels` times each.",
        basis="assumed",
    )


def slower_than_planned(subject: Subject, explained_s: float) -> Finding | None:
    """A step longer than the prediction's interval, beyond what is explained.

    Args:
        subject: with a prediction.
        explained_s: gains of the findings so far.
    """
    planned = subject.planned
    if planned is None or subject.step_s <= planned.interval_s[1]:
        return None
    rows = terms_beside(subject)
    worst = max(rows, key=lambda row: row.measured_s - (row.predicted_s or 0.0), default=None)
    if worst is None:
        return None
    return Finding.of(
        subject,
        f"A step takes {time_text(subject.step_s)}, and {time_text(planned.step_s)} was predicted.",
        subject.step_s - planned.interval_s[1] - explained_s,
        [
            Evidence(
                "reference",
                f"The largest difference is {worst.term}: {time_text(worst.measured_s)} "
                f"measured, {time_text(worst.predicted_s or 0.0)} predicted.",
            ),
            Evidence(
                "reference",
                f"Named causes explain {time_text(explained_s)} of it; the gain is what is "
                f"left above the prediction's interval, {time_text(planned.interval_s[1])}.",
            ),
        ],
        advice="If all terms are larger, the machine is slower than when it was measured: run "
        "`paceline bench` again, or plan with the run's own cluster.toml.",
        basis="assumed",
    )


def _least_s(subject: Subject, *terms: str) -> float:
    """Seconds of some terms on the rank that needs least, when nobody looks."""
    return float(subject.measured.term_s(*terms).mean(axis=0).min()) * subject.pace
