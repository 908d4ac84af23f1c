"""Page: the planner's answer as one self-contained HTML file.

The frame is that of all pages (`paceline.observe.page`); the template beside this file lays the
answer out. Nothing is worked out here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.observe.page import Card, Chart, chart_layout, render_page, time_unit
from paceline.observe.summary import (
    TERM_COLOURS,
    bytes_text,
    duration_text,
    rate_text,
    step_time_text,
)
from paceline.observe.terms import TERMS
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.describe import (
    MEMORY_COLOURS,
    all_settings,
    chosen_text,
    counted,
    detail_text,
    differing,
    facts,
    outlook_rows,
    sentences,
    settings_text,
    slower_text,
    spare_text,
)
from paceline.plan.prediction import MEMORY_TERMS, Prediction

_BARS = 12
"""Layouts that are compared in the pictures."""


def render(found: Answer, folder: Path | None = None) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        found: what was planned.
        folder: where page and job.toml will stand, where that is known.
    """
    best = found.best
    shown = found.ranked[:_BARS]
    return render_page(
        "paceline.plan.answer",
        "plan.html",
        name=f"Plan of {found.job.name}",
        subtitle=facts(found),
        next_=_next(found, folder),
        lede=_lede(found),
        cards=_cards(found, best) if best else [],
        charts=_charts(found, shown),
        at=None if folder is None else folder / "plan.html",
        counted=counted(found),
        unit=found.unit,
        rows=_rows(shown),
        settings=all_settings(best.layout) if best else [],
        sentences=sentences(found),
        outlook=outlook_rows(found.outlook, found.unit) if found.outlook else [],
        assumptions=sorted(best.assumptions.items()) if best else [],
    )


def _next(found: Answer, folder: Path | None) -> str:
    if found.best is None:
        return "plan for more devices, or with `--free offload --free optimizer_state`."
    job = "job.toml" if folder is None else folder / "job.toml"
    return f"`paceline train {job}`, then `paceline tune {job}` tries what is near."


def _lede(found: Answer) -> str:
    if found.best is not None:
        which = chosen_text(found).replace("the fastest", "the fastest layout that fits", 1)
        return f"{which[0].upper()}{which[1:]}: {settings_text(found.best.layout)}."
    if found.shortage is not None:
        text = found.shortage.text
        return text[0].upper() + text[1:]
    return "No layout fits."


def _cards(found: Answer, best: Prediction) -> list[Card]:
    low, high = best.interval_s
    cards = [
        (
            "Step",
            step_time_text(best.step_s),
            f"{step_time_text(low)} to {step_time_text(high)}",
        ),
        (f"{found.unit.capitalize()} a second", rate_text(best.tokens_per_s), "all devices"),
        ("MFU", "unknown" if best.mfu is None else f"{best.mfu:.1%}", "of the devices' peak"),
        ("Memory", bytes_text(best.peak_memory_bytes), spare_text(best, found.limit_bytes)),
    ]
    run = found.outlook
    if run is not None:
        cards.append(("The run", duration_text(run.train_s), f"{run.steps:,} steps"))
        if run.usd is not None:
            cards.append(("Price", f"{run.usd:,.0f} USD", f"{run.device_hours:,.0f} device-hours"))
        if run.goodput is not None:
            cards.append(("Goodput", f"{run.goodput:.1%}", "kept, with failures"))
    return cards


def _rows(shown: Sequence[Prediction]) -> list[tuple[str, ...]]:
    told = differing(one.layout for one in shown)
    return [
        (
            one.layout.summary,
            detail_text(one.layout, told),
            step_time_text(one.step_s),
            slower_text(one, shown[0]),
            rate_text(one.tokens_per_s),
            "unknown" if one.mfu is None else f"{one.mfu:.1%}",
            bytes_text(one.peak_memory_bytes),
        )
        for one in shown
    ]


def _charts(found: Answer, shown: Sequence[Prediction]) -> dict[str, Chart]:
    if not shown:
        return _nearest(found)
    labels = _labels(shown)
    factor, unit = time_unit(shown[0].step_s)
    times = [{term: factor * value for term, value in one.time_s.items()} for one in shown]
    charts = {
        "time": _stacked(labels, times, TERMS, TERM_COLOURS, unit),
        "memory": _memory(labels, shown, found.limit_bytes),
    }
    if len(found.front) > 1:
        charts["front"] = _front(found.front, factor, unit)
    return charts


def _nearest(found: Answer) -> dict[str, Chart]:
    """Where nothing fits, the memory of what comes nearest."""
    if found.shortage is None:
        return {}
    nearest = found.shortage.nearest
    return {"memory": _memory([nearest.layout.summary], [nearest], found.limit_bytes)}


def _labels(shown: Sequence[Prediction]) -> list[str]:
    names = [one.layout.summary for one in shown]
    if len(set(names)) == 1 and len(names) > 1:  # then the axes say nothing
        told = differing(one.layout for one in shown)
        names = [detail_text(one.layout, told) for one in shown]
    return [f"{at + 1}. {name}" for at, name in enumerate(names)]


def _memory(labels: Sequence[str], shown: Sequence[Prediction], limit: float | None) -> Chart:
    rows = [{t: value / 1e9 for t, value in one.heaviest.terms.items()} for one in shown]
    chart = _stacked(labels, rows, MEMORY_TERMS, MEMORY_COLOURS, "GB")
    if limit is not None:
        chart["layout"]["shapes"] = [_limit_line(limit / 1e9)]
    return chart


def _stacked(
    labels: Sequence[str],
    rows: Sequence[Mapping[str, float]],
    terms: Sequence[str],
    colours: Mapping[str, str],
    unit: str,
) -> Chart:
    """Horizontal bars, the best layout on top."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": term,
            "y": list(labels),
            "x": [float(f"{row.get(term, 0.0):.6g}") for row in rows],
            "marker": {"color": colours.get(term, "var(--muted)"), "line": {"width": 0}},
            "hovertemplate": f"%{{x:.4~g}} {unit}",
        }
        for term in terms
        if any(row.get(term, 0.0) > 0 for row in rows)
    ]
    layout = chart_layout(
        {"title": {"text": unit}},
        {"autorange": "reversed", "showgrid": False, "ticksuffix": "  "},
    )
    layout["legend"]["traceorder"] = "normal"
    return {
        "data": traces,
        "layout": {
            **layout,
            "barmode": "stack",
            "bargap": 0.25,
            "hovermode": "y unified",
            "showlegend": True,
        },
    }


def _limit_line(limit: float) -> Chart:
    line = {"color": "var(--warn)", "width": 1.5, "dash": "dash"}
    return {
        "type": "line",
        "x0": limit,
        "x1": limit,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": line,
    }


def _front(front: Sequence[Prediction], factor: float, unit: str) -> Chart:
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [one.peak_memory_bytes / 1e9 for one in front],
        "y": [factor * one.step_s for one in front],
        "text": [settings_text(one.layout) for one in front],
        "hovertemplate": "%{text}<br>%{x:.4~g} GB, %{y:.4~g} " + unit + "<extra></extra>",
        "line": {"color": "var(--accent)", "width": 1.5, "shape": "hv"},
        "marker": {"size": 9, "color": "var(--accent)"},
    }
    layout = chart_layout(
        {"title": {"text": "memory of the heaviest device, GB"}},
        {"title": {"text": f"{unit} per step"}},
    )
    return {"data": [trace], "layout": layout}
