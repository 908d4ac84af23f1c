"""Comparison: two Runs (or traces) as a page: what differs in the Jobs, in the step, in the result.

The older one is "before". Each difference stands beside the noise of the two, see `explain.noise`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.explain.difference import difference
from paceline.explain.explain import Explanation
from paceline.explain.finding import Finding
from paceline.explain.noise import Estimate, MetricChange
from paceline.explain.page import bar, finding, milliseconds, next_of
from paceline.explain.rules import SHOWN
from paceline.explain.subject import Subject
from paceline.observe import charts, summary
from paceline.observe.page import Card, Chart, render_page
from paceline.observe.summary import bytes_text, colour, loss_text, rate_text, step_time_text

_ALIKE = 0.001
"""Part of the step below which a term's change isn't shown."""


def render(
    now: Subject,
    why: Explanation,
    before: Subject,
    was: Explanation,
    at: Path | None = None,
) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        now: the newer one.
        why: its explanation.
        before: the older one.
        was: its explanation.
        at: where the page will stand, where it is known.
    """
    step = step_change(now, before)
    found = difference(why, was)
    names = _names(now, before)
    return render_page(
        "paceline.explain",
        "comparison.html",
        name=f"{names[1]} against {names[0]}",
        subtitle=_subtitle(now, before),
        next_=_next(now, _only_in(why, was), why),
        lede=lede(step),
        cards=list(_cards(now, before, step)),
        charts=_charts(now, before, names),
        at=at,
        names=names,
        settings=[row for row in found.settings if row[0] != "name"],
        has_jobs=now.job is not None and before.job is not None,
        bars=list(_bars(found.terms_s, found.step_s)),
        total=_total(found.step_s),
        gone=_only_in(was, why),
        new=_only_in(why, was),
        kept=[finding(each) for each in _worth(why) if each.name in _rule_names(was)],
    )


def _next(now: Subject, new: Sequence[Mapping[str, Any]], why: Explanation) -> str:
    """What is new is looked at first, and else what the newer one should change."""
    if new:
        return f"mend {new[0]['name']}, which the other one didn't have. {new[0]['advice']}"
    return next_of(why)


def step_change(now: Subject, before: Subject) -> MetricChange:
    """Of the step's seconds."""
    return MetricChange(_step(before), _step(now))


def _step(subject: Subject) -> Estimate:
    if subject.steady:
        return Estimate.of([float(line["step_time_s"]) for line in subject.steady])
    return Estimate.of(subject.measured.length_s.max(axis=1).tolist())


def lede(step: MetricChange) -> str:
    """The answer in a sentence."""
    then, here = step_time_text(step.before.value), step_time_text(step.now.value)
    share = step.difference / step.before.value
    told = f"A step takes {here} instead of {then}, {abs(share):.1%} {_word(share)}"
    if step.doubt is None:
        return f"{told}; there are too few steps to tell this from noise."
    noise = f"±{step.doubt / step.before.value:.1%}"
    if step.is_clear:
        return f"{told}: beyond the noise of the two ({noise})."
    return f"{told}: within the noise of the two ({noise}), so no difference was shown."


def _word(share: float) -> str:
    return "less" if share < 0 else "more"


def _names(now: Subject, before: Subject) -> tuple[str, str]:
    """Short names where they differ, else the paths."""
    short = Path(before.name).name, Path(now.name).name
    return short if short[0] != short[1] else (before.name, now.name)


def _subtitle(now: Subject, before: Subject) -> list[str]:
    return [
        f"{label}: {subject.name}" + (f" ({subject.job.layout.summary})" if subject.job else "")
        for label, subject in (("before", before), ("now", now))
    ]


# ---- key figures --------------------------------------------------------------------------------


def _cards(now: Subject, before: Subject, step: MetricChange) -> Iterator[Card]:
    yield "Step", step_time_text(step.now.value), _noise(step)
    here, then = (summary.summarise(one.lines, one.facts) for one in (now, before))
    unit = f"{here.unit.capitalize()} a second"
    yield from _card(unit, rate_text, then.rate, here.rate)
    yield from _card("MFU", "{:.1%}".format, then.mfu, here.mfu)
    same = _same_step(now, before)
    if same is not None:
        at, loss_then, loss_here = same
        note = f"from {loss_text(loss_then)}, both after step {at:,}"
        yield "Training loss", loss_text(loss_here), note
    yield from _card("Held-out loss", loss_text, then.eval_loss, here.eval_loss)
    yield from _card("Memory", bytes_text, then.memory_bytes, here.memory_bytes)


def _card(
    label: str, text: Callable[[float], str], then: float | None, here: float | None
) -> Iterator[Card]:
    """None where one of the two doesn't know it."""
    if then is not None and here is not None:
        yield label, text(here), f"from {text(then)}, {_relative(then, here)}"


def _relative(before: float, now: float) -> str:
    return f"{now / before - 1:+.1%}" if before else "from nothing"


def _noise(change: MetricChange) -> str:
    then = change.before.value
    told = f"from {step_time_text(then)}, {_relative(then, change.now.value)}"
    return told if change.doubt is None else f"{told} ± {change.doubt / then:.1%}"


def _same_step(now: Subject, before: Subject) -> tuple[int, float, float] | None:
    """The last step that both have a finite loss of: (step, before, now)."""
    losses = [
        {
            int(line["step"]): loss
            for line in one.lines
            if (loss := summary.number(line.get("loss")))
        }
        for one in (before, now)
    ]
    common = losses[0].keys() & losses[1].keys()
    return (max(common), losses[0][max(common)], losses[1][max(common)]) if common else None


# ---- the step, term by term ---------------------------------------------------------------------


def _bars(
    terms: Sequence[tuple[str, float, float]], step_s: tuple[float, float]
) -> Iterator[SimpleNamespace]:
    """From the step before, through what each term added or saved, to the step now."""
    was_s, now_s = step_s
    whole_s = max(step_s) + sum(max(0.0, now - was) for _, was, now in terms)
    yield bar("before", "var(--muted)", (0.0, was_s), whole_s, (milliseconds(was_s), "", ""))
    at_s = was_s
    for term, then_s, here_s in terms:
        change_s = here_s - then_s
        if abs(change_s) >= _ALIKE * was_s:
            figures = (milliseconds(then_s), milliseconds(here_s), f"{change_s * 1e3:+,.1f}")
            ends = min(at_s, at_s + change_s), abs(change_s)
            mood = "over" if change_s > 0 else "under"
            yield bar(term, colour(term), ends, whole_s, figures, mood=mood)
        at_s += change_s
    yield bar("now", "var(--accent)", (0.0, now_s), whole_s, ("", milliseconds(now_s), ""))


def _total(step_s: tuple[float, float]) -> tuple[str, ...]:
    then, here = step_s
    return "whole step", milliseconds(then), milliseconds(here), f"{(here - then) * 1e3:+,.1f}"


# ---- findings and curves ------------------------------------------------------------------------


def _worth(why: Explanation) -> list[Finding]:
    return [each for each in why.findings if each.gain >= SHOWN]


def _rule_names(why: Explanation) -> set[str]:
    return {each.name for each in _worth(why)}


def _only_in(one: Explanation, other: Explanation) -> list[Mapping[str, Any]]:
    return [finding(each) for each in _worth(one) if each.name not in _rule_names(other)]


def _charts(now: Subject, before: Subject, names: tuple[str, str]) -> dict[str, Chart]:
    drawn = {}
    for name, key, title in (
        ("loss", "loss", "training loss"),
        ("step", "step_time_s", "seconds per step"),
        ("memory", "memory_bytes", "peak memory of rank 0"),
    ):
        chart = charts.beside({names[0]: before.lines, names[1]: now.lines}, key, title)
        if chart["data"]:
            drawn[name] = chart
    return drawn
