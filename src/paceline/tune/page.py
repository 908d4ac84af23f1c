"""Page: a tuning as one self-contained HTML file."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from paceline.render.charts import (
    NOTHING,
    Chart,
    Plot,
    bars,
    curve,
    plot,
    time_unit,
    where_equal,
)
from paceline.render.figures import amount_text, time_text
from paceline.render.page import Card, Page
from paceline.render.parts import Note, Section
from paceline.render.table import Bullets, Pairs, Table
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
    changes = [(one.text, *_gave(known, one)) for one in parts(known)]
    trials = Table(
        (*COLUMNS, "proposed by"), [_cells(known, one) for one in known.trials], words=(1, 5, 6)
    )
    decisions = [(f"after trial round {one.heat + 1}", one.text) for one in known.decisions]
    page = Page(
        name=f"Tuning of {known.given.name}",
        next=_next(known, folder),
        subtitle=_facts(known),
        lede=paragraph(known),
        cards=_cards(known),
        parts=(
            Section(
                "What was changed, and what it gave",
                Table(("change", "step", "by"), changes, words=(0, 2)),
            ),
            Section(
                "The step of each trial",
                Chart("trials", _trials(known)),
                note="Compared by turns on the same ranks with the best of then; lines are 90 % "
                "intervals. Trials that were clearly slower were dropped early.",
            ),
            Section(
                "Expected and measured",
                Chart("errors", _errors(known)),
                note="By the planner, as corrected by the trials before. A trial on the dashed "
                "line took what was expected.",
            ),
            Section("Trials", trials),
            Section("What explain still finds in the fastest", Bullets(left)),
            Section("Decisions", Pairs(decisions), Note(f"The result is `{folder / 'job.toml'}`.")),
        ),
        at=folder / "tune.html",
    )
    return page.html()


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
        f"{cluster.num_devices} x {cluster.device.name}",
        f"{job.model.batch_text(train.global_batch, train.seq_len)} a step",
        f"{len(known.trials)} trials in {known.num_rounds} trial rounds",
    ]


def _cards(known: TuningState) -> list[Card]:
    best, first = known.best, known.first
    if best is None or first is None:
        return []
    figures = Figures.of(known, best)
    was = time_text(known.seconds(first))
    cards = [
        ("Step", time_text(known.seconds(best)), f"{was} in the first trial"),
        (f"{figures.unit.capitalize()} a second", amount_text(figures.rate), "all devices"),
    ]
    if figures.efficiency is not None and known.reference is not None:
        cards.append(("Scaling efficiency", f"{figures.efficiency:.0%}", known.reference.origin))
    if figures.mfu is not None:
        cards.append(("MFU", f"{figures.mfu:.1%}", "of the devices' peak"))
    return cards


def _trials(known: TuningState) -> Plot:
    """The step of each trial, in order, with its interval."""
    if not known.ran:
        return NOTHING
    factor, unit = time_unit(known.seconds(known.ran[0]))
    seconds = [factor * known.seconds(trial) for trial in known.ran]
    # After one round there is no interval.
    halves = [trial.uncertainty if isfinite(trial.uncertainty) else None for trial in known.ran]
    spread = [half and value * half for value, half in zip(seconds, halves, strict=True)]
    trace = bars(
        "",
        [_colour(known, trial) for trial in known.ran],
        x=[trial.number for trial in known.ran],
        y=[float(f"{value:.5g}") for value in seconds],
        text=[what_text(trial) for trial in known.ran],
        textposition="none",
        hovertemplate="%{text}<br>%{y:.4~g} " + unit + "<extra></extra>",
        error_y={"type": "data", "array": spread, "color": "var(--muted)", "thickness": 1},
    )
    across = {"title": "trial", "dtick": 1, "showgrid": False}
    return plot([trace], across, {"title": f"{unit} per step", "rangemode": "tozero"}, bargap=0.3)


def _colour(known: TuningState, trial: Trial) -> str:
    is_best = known.best is not None and known.best.number == trial.number
    return "var(--accent)" if is_best else "var(--accent-pale)"


def _errors(known: TuningState) -> Plot:
    """Expected against measured, with the line on which they are equal."""
    if not known.ran:
        return NOTHING
    factor, unit = time_unit(known.seconds(known.ran[0]))
    expected = [factor * trial.expected_s for trial in known.ran]
    measured = [factor * known.seconds(trial) for trial in known.ran]
    points = curve(
        "",
        expected,
        measured,
        mode="markers",
        text=[f"{trial.number}: {what_text(trial)}" for trial in known.ran],
        hovertemplate="%{text}<extra></extra>",
        marker={"size": 9, "color": [_colour(known, trial) for trial in known.ran]},
    )
    line = where_equal(0.9 * min(expected + measured), 1.1 * max(expected + measured))
    across = f"expected when it was chosen, {unit}"
    return plot([line, points], across, f"measured, {unit}")
