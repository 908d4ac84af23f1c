"""Page: a search as one self-contained HTML file."""

from pathlib import Path

from paceline.render.charts import NOTHING, Chart, Plot, curve, plot
from paceline.render.figures import duration_text
from paceline.render.page import Card, Page
from paceline.render.parts import Section
from paceline.render.table import Table
from paceline.search.answer import Found, figure_text, newest_loss
from paceline.search.halving import Trial
from paceline.search.show import row, table
from paceline.search.space import point_text

# Of an axis: its title, and how many of its unit the figure has.
_AXES = {
    "time": ("training, s (predicted)", 1.0),
    "memory": ("memory of a device, GB (predicted)", 1e-9),
    "latency": ("a token when served, ms (predicted)", 1e3),
    "energy": ("energy, kWh (predicted)", 1.0),
    "usd": ("price, USD (predicted)", 1.0),
}


def render(found: Found, folder: Path) -> str:
    """The page as text."""
    search = found.search
    others = [name for name in search.objectives if name != "loss"]
    refused = [(str(count), reason) for reason, count in found.reasons.most_common()]
    return Page(
        name=f"Search of {folder.name}",
        next=_next(found, folder),
        subtitle=[
            found.counts_text,
            f"{duration_text(found.spent_s)} of {duration_text(search.within_s)} of device time",
        ],
        lede=found.sentence,
        cards=_cards(found),
        parts=(
            *(
                Section(
                    f"Loss and {name}",
                    Chart(f"front-{name}", _front(found, name)),
                    note="The line joins the front: trials that none beats in everything. Pale "
                    "ones were stopped at an earlier rung, where their loss is that of fewer "
                    "steps.",
                )
                for name in others
            ),
            Section(
                "The front",
                Table(_heads(found), [row(found, one) for one in found.front], words=_words(found)),
            ),
            Section("Every trial", table(found)),
            Section("Loss by rung", Chart("rungs", _rungs(found))),
            Section(
                "Points that never ran",
                Table(("points", "the planner says"), refused, words=(1,)),
            ),
        ),
        at=folder / "search.html",
    ).html()


def _heads(found: Found) -> tuple[str, ...]:
    return tuple(table(found).heads)


def _words(found: Found) -> tuple[int, ...]:
    return tuple(table(found).words)


def _next(found: Found, folder: Path) -> str:
    if found.chosen is None:
        return found.sentence
    return f"`paceline train {folder / 'job.toml'}`"


def _cards(found: Found) -> list[Card]:
    if found.chosen is None:
        return []
    which = f"trial {found.chosen.number}"
    return [
        (name.capitalize(), figure_text(found.chosen, name), which)
        for name in found.search.objectives
    ]


def _front(found: Found, name: str) -> Plot:
    trials = [one for one in found.known.trials if newest_loss(one) is not None]
    if not trials:
        return NOTHING
    title, factor = _AXES[name]
    last = len(found.halving.steps)

    def across(trial: Trial) -> float:
        return float(f"{trial.figures[name] * factor:.5g}")  # type: ignore[index]

    def colour(trial: Trial) -> str:
        if trial == found.chosen:
            return "var(--accent)"
        return "var(--muted)" if len(trial.results) == last else "var(--accent-pale)"

    points = curve(
        "",
        map(across, trials),
        map(newest_loss, trials),
        mode="markers",
        text=[f"{one.number}: {point_text(one.point)}" for one in trials],
        hovertemplate="%{text}<br>%{x:.4~g}, loss %{y:.4~g}<extra></extra>",
        marker={"size": 9, "color": list(map(colour, trials))},
    )
    front = sorted(found.front, key=across)
    line = curve(
        "front", map(across, front), map(newest_loss, front), mode="lines", hoverinfo="skip",
        line={"color": "var(--accent)", "width": 1},
    )  # fmt: skip
    return plot([line, points], {"title": title, "type": "log"}, "held-out loss")


def _rungs(found: Found) -> Plot:
    traces = [
        curve(
            str(one.number),
            found.halving.steps,
            [result.loss for result in one.results],
            hovertemplate=f"{one.number}: " + "%{y:.4~g}<extra></extra>",
            line={"color": "var(--accent)" if one == found.chosen else "var(--accent-pale)"},
        )
        for one in found.known.trials
        if newest_loss(one) is not None
    ]
    if not traces:
        return NOTHING
    return plot(traces, {"title": "steps", "type": "log"}, "held-out loss")
