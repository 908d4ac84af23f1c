"""Page: a tuning as one self-contained HTML file; the frame is that of all pages."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from paceline.observe.page import (
    Card,
    Chart,
    chart_layout,
    render_page,
    time_unit,
    where_equal,
)
from paceline.observe.summary import rate_text, step_time_text
from paceline.tune.goal import Figures
from paceline.tune.narrative import ChangeEffect, paragraph, parts
from paceline.tune.show import COLUMNS, row, what_text
from paceline.tune.trial import Trial, TuningState


def render(known: TuningState, folder: Path, left: Sequence[str] = ()) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        known: all that was tried.
        folder: where the result is.
        left: sentences on what could still be gained.
    """
    return render_page(
        "paceline.tune",
        "tune.html",
        name=f"Tuning of {known.given.name}",
        subtitle=_facts(known),
        next_=_next(known, folder),
        lede=paragraph(known),
        cards=_cards(known),
        charts={"trials": _trials(known), "errors": _errors(known)} if known.ran else {},
        at=folder / "tune.html",
        heads=[*(name.capitalize() for name in COLUMNS), "Proposed by"],
        rows=[_cells(known, trial) for trial in known.trials],
        decisions=[(f"after trial round {one.heat + 1}", one.text) for one in known.decisions],
        parts=[(one.text, *_gave(known, one)) for one in parts(known)],
        left=list(left),
        job_file=str(folder / "job.toml"),
    )


def _next(known: TuningState, folder: Path) -> str:
    if known.best is None:
        return "look at what the trials say below, and tune again."
    if not known.is_gain_clear and known.best.relative:
        return f"`paceline tune {folder / 'job.toml'}` for longer, or keep the Job as it is."
    return f"`paceline train {folder / 'job.toml'}`"


def _cells(known: TuningState, trial: Trial) -> tuple[str, ...]:
    """A trial's row, with what there is to say of its outcome below it."""
    *figures, outcome = row(known, trial)
    return (*figures, "\n".join(filter(None, (outcome, trial.note))), trial.why)


def _gave(known: TuningState, part: ChangeEffect) -> tuple[str, str]:
    """What a change gave, and how that is known."""
    if not known.is_gain_clear:
        return "", "within the noise"
    origin = "measured" if part.is_measured else "estimated from planner and trials"
    return f"{-part.gain:+.1%}", origin


def _facts(known: TuningState) -> list[str]:
    job = known.given
    cluster, train = job.cluster, job.train
    return [
        f"{cluster.num_devices} x {cluster.known_device.name}",
        f"{train.global_batch} x {train.seq_len} tokens a step",
        f"{len(known.trials)} trials in {known.num_rounds} trial rounds",
    ]


def _cards(known: TuningState) -> list[Card]:
    best, first = known.best, known.first
    if best is None or first is None:
        return []
    figures = Figures.of(known, best)
    was = step_time_text(known.seconds(first))
    cards = [
        ("Step", step_time_text(known.seconds(best)), f"{was} in the first trial"),
        ("Tokens a second", rate_text(figures.tokens_per_s), "all devices"),
    ]
    if figures.efficiency is not None and known.reference is not None:
        cards.append(("Scaling efficiency", f"{figures.efficiency:.0%}", known.reference.origin))
    if figures.mfu is not None:
        cards.append(("MFU", f"{figures.mfu:.1%}", "of the devices' peak"))
    return cards


def _trials(known: TuningState) -> Chart:
    """The step of each trial, in order, with its interval."""
    factor, unit = time_unit(known.seconds(known.ran[0]))
    seconds = [factor * known.seconds(trial) for trial in known.ran]
    # After one round there is no interval.
    halves = [trial.uncertainty if isfinite(trial.uncertainty) else None for trial in known.ran]
    spread = [half and value * half for value, half in zip(seconds, halves, strict=True)]
    bars = {
        "type": "bar",
        "x": [trial.number for trial in known.ran],
        "y": [float(f"{value:.5g}") for value in seconds],
        "text": [what_text(trial) for trial in known.ran],
        "textposition": "none",
        "hovertemplate": "%{text}<br>%{y:.4~g} " + unit + "<extra></extra>",
        "error_y": {"type": "data", "array": spread, "color": "var(--muted)", "thickness": 1},
        "marker": {"color": [_colour(known, trial) for trial in known.ran]},
    }
    layout = chart_layout(
        {"title": {"text": "trial"}, "dtick": 1, "showgrid": False},
        {"title": {"text": f"{unit} per step"}, "rangemode": "tozero"},
    )
    return {"data": [bars], "layout": {**layout, "bargap": 0.3}}


def _colour(known: TuningState, trial: Trial) -> str:
    is_best = known.best is not None and known.best.number == trial.number
    return "var(--accent)" if is_best else "var(--accent-pale)"


def _errors(known: TuningState) -> Chart:
    """Expected against measured, with the line on which they are equal."""
    factor, unit = time_unit(known.seconds(known.ran[0]))
    expected = [factor * trial.expected_s for trial in known.ran]
    measured = [factor * known.seconds(trial) for trial in known.ran]
    line = where_equal(0.9 * min(expected + measured), 1.1 * max(expected + measured))
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": expected,
        "y": measured,
        "text": [f"{trial.number}: {what_text(trial)}" for trial in known.ran],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 9, "color": [_colour(known, trial) for trial in known.ran]},
    }
    layout = chart_layout(
        {"title": {"text": f"expected when it was chosen, {unit}"}},
        {"title": {"text": f"measured, {unit}"}},
    )
    return {"data": [line, points], "layout": layout}
