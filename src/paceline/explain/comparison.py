"""Comparison: two Runs (or traces) as a page: what differs in the Jobs, in the step, in the result.

The older one is "before". Each difference stands beside the noise of the two, see `explain.noise`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.explain.difference import Difference, difference
from paceline.explain.explain import Explanation
from paceline.explain.finding import Finding
from paceline.explain.noise import Estimate, MetricChange
from paceline.explain.page import article, next_of
from paceline.explain.rules import SHOWN
from paceline.explain.subject import Subject
from paceline.observe import charts, summary
from paceline.observe.terms import colour
from paceline.render.charts import Chart
from paceline.render.figures import amount_text, bytes_text, loss_text, milliseconds, time_text
from paceline.render.page import Card, Page
from paceline.render.parts import Note, Pair, Part, Section, Step, Steps, Subsection, Swatch
from paceline.render.table import Table

_ALIKE = 0.001
"""Part of the step below which a term's change isn't shown."""


def render(
    now: Subject, why: Explanation, before: Subject, was: Explanation, at: Path | None = None
) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        now: the newer one.
        why: its explanation.
        before: the older one.
        was: its explanation.
        at: where the page will stand, where it is known.
    """
    step, found, names = step_change(now, before), difference(why, was), _names(now, before)
    page = Page(
        name=f"{names[1]} against {names[0]}",
        next=_next(_only_in(why, was), why),
        subtitle=_subtitle(now, before),
        lede=lede(step),
        cards=list(_cards(now, before, step)),
        parts=(
            _settings(now, before, found, names),
            Section(
                "From one step to the other",
                Steps((*names, "change"), list(_steps(found)), _total(found.step_s)),
                note="Milliseconds per step. A bar shows what a term added or saved, beginning "
                "where the one before it ended. Terms are means of profiled steps, brought to the "
                "length of the others.",
            ),
            _curves(now, before, names),
            _findings(why, was),
            Section("How sure this is", Note(_DOUBT)),
        ),
        at=at,
    )
    return page.html()


_DOUBT = (
    "The noise is what about 19 of 20 differences of medians without a cause stay within, judged "
    "from four stretches of neighbouring steps in each run (batch means). Runs of one Job also "
    "differ from one start to the next, by where they are placed and who shares the machine: a "
    "repeat of either says by how much."
)


def _settings(now: Subject, before: Subject, found: Difference, names: tuple[str, str]) -> Section:
    if now.job is None or before.job is None:
        return Section("")
    rows = [row for row in found.settings if row[0] != "name"]
    table = Table(("setting", *names), rows, words=(0, 1, 2))
    return Section("What differs in the Jobs", table or Note("Nothing: both ran the same Job."))


def _next(new: Sequence[Finding], why: Explanation) -> str:
    """What is new is looked at first, and else what the newer one should change."""
    if new:
        return f"mend {new[0].name}, which the other one didn't have. {new[0].advice}"
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
    then, here = time_text(step.before.value), time_text(step.now.value)
    share = step.difference / step.before.value
    told = (
        f"A step takes {here} instead of {then}, {abs(share):.1%} {'less' if share < 0 else 'more'}"
    )
    if step.doubt is None:
        return f"{told}; there are too few steps to tell this from noise."
    noise = f"±{step.doubt / step.before.value:.1%}"
    if step.is_clear:
        return f"{told}: beyond the noise of the two ({noise})."
    return f"{told}: within the noise of the two ({noise}), so no difference was shown."


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
    yield "Step", time_text(step.now.value), _noise(step)
    here, then = (summary.summarise(one.lines, one.facts) for one in (now, before))
    unit = f"{here.unit.capitalize()} a second"
    yield from _card(unit, amount_text, then.rate, here.rate)
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
    told = f"from {time_text(then)}, {_relative(then, change.now.value)}"
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


def _steps(found: Difference) -> Iterator[Step]:
    """From the step before, through what each term added or saved, to the step now."""
    was_s, now_s = found.step_s
    whole_s = max(found.step_s) + sum(max(0.0, now - was) for _, was, now in found.terms_s)
    before, now = Swatch("before", "var(--muted)"), Swatch("now", "var(--accent)")
    yield Step(before, 0.0, was_s / whole_s, (milliseconds(was_s), "", ""))
    at_s = was_s
    for term, then_s, here_s in found.terms_s:
        change_s = here_s - then_s
        if abs(change_s) >= _ALIKE * was_s:
            yield Step(
                Swatch(term, colour(term)),
                min(at_s, at_s + change_s) / whole_s,
                abs(change_s) / whole_s,
                (milliseconds(then_s), milliseconds(here_s), _change(then_s, here_s)),
                mood="over" if change_s > 0 else "under",
            )
        at_s += change_s
    yield Step(now, 0.0, now_s / whole_s, ("", milliseconds(now_s), ""))


def _total(step_s: tuple[float, float]) -> tuple[str, ...]:
    return "whole step", *map(milliseconds, step_s), _change(*step_s)


def _change(then_s: float, here_s: float) -> str:
    return f"{(here_s - then_s) * 1e3:+,.1f}"


# ---- findings and curves ------------------------------------------------------------------------


def _worth(why: Explanation) -> list[Finding]:
    return [each for each in why.findings if each.gain >= SHOWN]


def _only_in(one: Explanation, other: Explanation) -> list[Finding]:
    others = {each.name for each in _worth(other)}
    return [each for each in _worth(one) if each.name not in others]


def _findings(why: Explanation, was: Explanation) -> Section:
    new = _only_in(why, was)
    kept = [each for each in _worth(why) if each not in new]
    groups = {"Only now": new, "Still there": kept, "Gone": _only_in(was, why)}
    parts: list[Part] = [
        Subsection(title, *map(article, found)) for title, found in groups.items() if found
    ]
    none = Note("Neither has one that costs more than 1 % of its step.")
    return Section("Findings", *(parts or [none]))


def _curves(now: Subject, before: Subject, names: tuple[str, str]) -> Section:
    runs = {names[0]: before.lines, names[1]: now.lines}
    return Section(
        "Over the runs",
        Chart("loss", charts.beside(runs, "loss", "training loss")),
        Pair(
            Chart("step", charts.beside(runs, "step_time_s", "seconds per step"), "low"),
            Chart("memory", charts.beside(runs, "memory_bytes", "peak memory of rank 0"), "low"),
        ),
        note="Drag to zoom in, double-click to see everything again.",
    )
