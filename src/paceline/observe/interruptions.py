"""Interruptions: the section of a report that shows an elastic run's generations over time."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap

from paceline.observe.generations import PHASES, Generation, Generations, Loss
from paceline.render.charts import COLOURS, Chart, Plot, bars, curve, plot
from paceline.render.figures import duration_text, share_text, time_text
from paceline.render.parts import Legend, Section, Subsection, Swatch, Whole
from paceline.render.table import Table

# Classes of seconds that the thin bar tells apart, with their colours.
_PARTS = {
    "kept": (("kept",), COLOURS[2]),
    "between steps": (("between",), COLOURS[4]),
    "start": (("start",), COLOURS[0]),
    "recomputed": (("recomputed",), COLOURS[5]),
    "notice and decide": (("notice", "decide"), COLOURS[1]),
    "waiting for nodes": (("waiting",), COLOURS[6]),
    "connect, build, restore": (("connect", "build", "restore"), COLOURS[3]),
}
_MOST_ROWS = 40
# From how many seconds on, seconds of it, and the unit of the strip's axis.
_UNITS = (
    (2 * 86400, 86400.0, "days"),
    (2 * 3600, 3600.0, "hours"),
    (120, 60.0, "minutes"),
    (0, 1.0, "seconds"),
)
_TEXT_ALONE = "%{hovertext}<extra></extra>"
_LINE = 70
"""Characters of a line of what the mouse points at."""


def section(found: Generations | None) -> Section:
    """Generations as bars with losses as marks, where the time went, and each recovery."""
    if found is None:
        return Section("")
    whole_s = found.run_s or 1.0
    shares = [
        (Swatch(name, colour), sum(found.seconds.get(one, 0.0) for one in classes) / whole_s)
        for name, (classes, colour) in _PARTS.items()
    ]
    shown = [(swatch, share) for swatch, share in shares if share > 0]
    return Section(
        "Interruptions",
        Chart("generations", strip(found), "low"),
        Whole(shown),
        Legend([Swatch(f"{each.name} {share:.1%}", each.colour) for each, share in shown]),
        Subsection("Recoveries", _recoveries(found)),
        note=_note(found),
    )


def _note(found: Generations) -> str:
    told = [f"Interruptions: {found.summary}."]
    between_s = found.wall_s - found.run_s
    if between_s >= 1 and found.effective_ratio is not None:
        told.append(
            f"With the {duration_text(between_s)} between its starts, the effective training time "
            f"ratio is {share_text(found.effective_ratio)}."
        )
    told.append(
        "A bar is a generation, as high as it has nodes, spares paler; a cross is what was lost, "
        "and a dashed line another start. The thin bar is where the time of all starts went."
    )
    if len(recovered := _recovered(found)) > _MOST_ROWS:
        told.append(f"The last {_MOST_ROWS} of {len(recovered)} recoveries are listed.")
    return " ".join(told)


# ---- the strip ----------------------------------------------------------------------------------


def strip(found: Generations) -> Plot:
    """Generations over the run's time, without that between its starts."""
    axis = _Axis.of(found)
    nodes = _bars(axis, "nodes", [len(one.nodes) for one in found.all])
    nodes |= {
        "text": [f"{one.number}<br>{html.escape(one.layout)}" for one in found.all],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "var(--text)"},
    }
    spares = _bars(axis, "spares", [len(one.spares) for one in found.all])
    traces = [nodes, spares, _marks(axis, is_report=False), _marks(axis, is_report=True)]
    muted = {"tickfont": {"color": "var(--muted)"}}
    up = {"title": "nodes", "rangemode": "tozero", "dtick": _tick(found), **muted}
    return plot(
        [trace for trace in traces if any(trace["y"])],
        {"title": f"{axis.unit} of the run", "showgrid": False, **muted},
        up,
        barmode="stack",
        bargap=0,
        showlegend=True,
        shapes=_starts(axis),
        uniformtext={"mode": "hide", "minsize": 10},
    )


@dataclass(frozen=True)
class _Axis:
    """The run's time."""

    found: Generations
    offsets: Mapping[int, float]
    """By start: the Unix time at which it would have begun had it followed the one before."""
    scale: float
    unit: str

    @classmethod
    def of(cls, found: Generations) -> "_Axis":
        offsets: dict[int, float] = {}
        gone_s = 0.0
        for one in found.all:
            offsets.setdefault(one.start, one.began_s - gone_s)
            gone_s += one.ended_s - one.began_s
        units = ((scale, unit) for least_s, scale, unit in _UNITS if found.run_s >= least_s)
        return cls(found, offsets, *next(units))

    def at(self, one: Generation, time_s: float) -> float:
        """Where a moment of a generation is."""
        within_s = min(max(time_s, one.began_s), one.ended_s)
        return (within_s - self.offsets[one.start]) / self.scale


_LOOKS = {
    "nodes": ("var(--accent-pale)", "var(--accent)"),
    "spares": ("var(--grid)", "var(--rule)"),
}


def _bars(axis: _Axis, name: str, heights: Sequence[int]) -> Plot:
    paint, edge = _LOOKS[name]
    return bars(
        name,
        paint,
        x=[axis.at(one, (one.began_s + one.ended_s) / 2) for one in axis.found.all],
        width=[(one.ended_s - one.began_s) / axis.scale for one in axis.found.all],
        y=heights,
        hovertext=[_tip(one) for one in axis.found.all],
        hovertemplate=_TEXT_ALONE,
        marker={"color": paint, "line": {"width": 1, "color": edge}},
    )


def _marks(axis: _Axis, *, is_report: bool) -> Plot:
    """Losses, or ranks that were only reported as slow."""
    name, symbol, paint = "lost", "x", "var(--warn)"
    if is_report:
        name, symbol, paint = "reported as slow", "circle-open", "var(--muted)"
    marked = [
        (one, loss) for one in axis.found.all for loss in one.losses if loss.is_report == is_report
    ]
    return curve(
        name,
        [axis.at(one, loss.time_s) for one, loss in marked],
        [len(one.nodes) for one, _ in marked],
        mode="markers",
        marker={"symbol": symbol, "size": 10, "color": paint, "line": {"width": 2, "color": paint}},
        hovertext=[_loss_tip(loss) for _, loss in marked],
        hovertemplate=_TEXT_ALONE,
    )


def _starts(axis: _Axis) -> list[Plot]:
    """A line where the run was started again."""
    style = {"color": "var(--muted)", "width": 1, "dash": "dash"}
    return [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": style, "x0": x, "x1": x}
        for before, one in pairwise(axis.found.all)
        if before.start != one.start
        for x in [axis.at(one, one.began_s)]
    ]


def _tick(found: Generations) -> int:
    most = max(len(one.nodes) + len(one.spares) for one in found.all)
    return max(1, -(-most // 5))


def _tip(one: Generation) -> str:
    steps = (
        "no step was kept"
        if one.steps is None
        else f"steps {one.steps.first:,} to {one.steps.last:,}"
    )
    lines = [
        f"generation {one.number}, {duration_text(one.ended_s - one.began_s)}",
        one.who,
        steps,
        *wrap(one.reason, _LINE),
    ]
    return "<br>".join(map(html.escape, lines))


def _loss_tip(loss: Loss) -> str:
    return "<br>".join(map(html.escape, [loss.kind.replace("_", " "), *wrap(loss.sentence, _LINE)]))


# ---- recoveries ---------------------------------------------------------------------------------


def _recovered(found: Generations) -> Sequence[Generation]:
    return [one for one in found.all if one.recovery_s]


def _recoveries(found: Generations) -> Table:
    shown = _recovered(found)[-_MOST_ROWS:]
    phases = [phase for phase in PHASES if any(phase in one.recovery_s for one in shown)]
    rows = [
        (
            str(one.number),
            one.reason,
            one.source or "",
            f"{one.recomputed:,}",
            *(
                time_text(one.recovery_s[phase]) if phase in one.recovery_s else "–"
                for phase in phases
            ),
            "–" if one.back_s is None else time_text(one.back_s),
        )
        for one in shown
    ]
    heads = ("generation", "because", "state from", "steps again")
    return Table((*heads, *phases, "to next step"), rows, words=(0, 1, 2))
