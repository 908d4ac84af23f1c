"""Page: the planner's answer as one self-contained HTML file. Nothing is worked out here."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.observe.terms import TERM_COLOURS, TERMS
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.describe import (
    GOODPUT_HEADS,
    HARDWARE_HEADS,
    MEMORY_COLOURS,
    all_settings,
    chosen_text,
    counted,
    detail_text,
    differing,
    facts,
    figure_cells,
    goodput_cells,
    goodput_sentences,
    hardware_rows,
    outlook_rows,
    sentences,
    settings_text,
    spare_text,
)
from paceline.plan.prediction import MEMORY_TERMS, Prediction
from paceline.render.charts import NOTHING, Chart, Plot, bars, curve, plot, time_unit
from paceline.render.figures import amount_text, bytes_text, duration_text, share_text, time_text
from paceline.render.page import Card, Page
from paceline.render.parts import Details, Section
from paceline.render.table import Bullets, Pairs, Table

_BARS = 12
"""Layouts that are compared in the pictures."""


def render(found: Answer, folder: Path | None = None) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        found: what was planned.
        folder: where page and job.toml will stand, where that is known.
    """
    best, shown = found.best, found.ranked[:_BARS]
    factor, unit = time_unit(shown[0].step_s) if shown else (1.0, "s")
    page = Page(
        name=f"Plan of {found.job.name}",
        next=_next(found, folder),
        subtitle=facts(found),
        lede=_lede(found),
        cards=_cards(found, best) if best else [],
        parts=(
            Section(
                "The step, by what it is spent on",
                Chart("time", _times(shown, factor, unit), "tall"),
                note=f"{counted(found)}.",
            ),
            Section(
                "Memory of the heaviest device",
                Chart("memory", _memory(found, shown), "tall" if shown else "low"),
                note="As the allocator reserves it. The dashed line is what a layout may use.",
            ),
            Section(
                "Layouts",
                _layouts(shown, found.unit),
                Details(
                    "Show every setting of the fastest",
                    Pairs(all_settings(best.layout) if best else [], codes=(0, 1)),
                ),
            ),
            Section("What decides", Bullets(sentences(found))),
            Section(
                "Time against memory",
                Chart("front", _front(found.front, factor, unit)),
                note="No layout is both faster and smaller than one of these.",
            ),
            Section(
                "The whole run",
                Pairs(outlook_rows(found.outlook, found.unit) if found.outlook else []),
            ),
            *_goodput(found),
            Section(
                "What the figures rest on",
                Table(HARDWARE_HEADS, hardware_rows(best) if best else [], words=(0, 1, 2)),
                Details(
                    "Show constants and their origin",
                    Pairs(sorted(best.assumptions.items()) if best else [], codes=(0,)),
                ),
            ),
        ),
        at=None if folder is None else folder / "plan.html",
    )
    return page.html()


def _goodput(found: Answer) -> Iterator[Section]:
    if found.outlook is not None and found.goodput is not None:
        yield Section(
            "What failures leave of the run",
            Table(GOODPUT_HEADS, goodput_cells(found.goodput, found.outlook.train_s), words=(0,)),
            Bullets(goodput_sentences(found.goodput)),
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
        ("Step", time_text(best.step_s), f"{time_text(low)} to {time_text(high)}"),
        (f"{found.unit.capitalize()} a second", amount_text(best.tokens_per_s), "all devices"),
        ("MFU", share_text(best.mfu), "of the devices' peak"),
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


def _layouts(shown: Sequence[Prediction], unit: str) -> Table:
    told = differing(one.layout for one in shown)
    rows = [
        (one.layout.summary, detail_text(one.layout, told), *figure_cells(one, shown[0]))
        for one in shown
    ]
    heads = ("layout", "with", "step", "slower", f"{unit}/s", "MFU", "memory")
    return Table(heads, rows, words=(0, 1))


def _times(shown: Sequence[Prediction], factor: float, unit: str) -> Plot:
    rows = [{term: factor * value for term, value in one.time_s.items()} for one in shown]
    return _stacked(_labels(shown), rows, TERMS, TERM_COLOURS, unit)


def _memory(found: Answer, shown: Sequence[Prediction]) -> Plot:
    """Where nothing fits, of what comes nearest."""
    labels = _labels(shown)
    if not shown:
        if found.shortage is None:
            return NOTHING
        shown = [found.shortage.nearest]
        labels = [shown[0].layout.summary]
    rows = [{t: value / 1e9 for t, value in one.heaviest.terms.items()} for one in shown]
    chart = _stacked(labels, rows, MEMORY_TERMS, MEMORY_COLOURS, "GB")
    if found.limit_bytes is not None:
        at = found.limit_bytes / 1e9
        style = {"color": "var(--warn)", "width": 1.5, "dash": "dash"}
        ends = {"x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper"}
        chart["layout"]["shapes"] = [{"type": "line", **ends, "line": style}]
    return chart


def _labels(shown: Sequence[Prediction]) -> list[str]:
    names = [one.layout.summary for one in shown]
    if len(set(names)) == 1 and len(names) > 1:  # then the axes say nothing
        told = differing(one.layout for one in shown)
        names = [detail_text(one.layout, told) for one in shown]
    return [f"{at + 1}. {name}" for at, name in enumerate(names)]


def _stacked(
    labels: Sequence[str],
    rows: Sequence[Mapping[str, float]],
    terms: Sequence[str],
    colours: Mapping[str, str],
    unit: str,
) -> Plot:
    """Horizontal bars, the best layout on top."""
    traces = [
        bars(
            term,
            colours.get(term, "var(--muted)"),
            orientation="h",
            y=list(labels),
            x=[float(f"{row.get(term, 0.0):.6g}") for row in rows],
            hovertemplate=f"%{{x:.4~g}} {unit}",
        )
        for term in terms
        if any(row.get(term, 0.0) > 0 for row in rows)
    ]
    stacked = plot(
        traces,
        unit,
        {"autorange": "reversed", "showgrid": False, "ticksuffix": "  "},
        barmode="stack",
        bargap=0.25,
        hovermode="y unified",
        showlegend=True,
    )
    stacked["layout"]["legend"]["traceorder"] = "normal"
    return stacked


def _front(front: Sequence[Prediction], factor: float, unit: str) -> Plot:
    if len(front) < 2:
        return NOTHING
    trace = curve(
        "",
        [one.peak_memory_bytes / 1e9 for one in front],
        [factor * one.step_s for one in front],
        text=[settings_text(one.layout) for one in front],
        hovertemplate="%{text}<br>%{x:.4~g} GB, %{y:.4~g} " + unit + "<extra></extra>",
        line={"color": "var(--accent)", "width": 1.5, "shape": "hv"},
        marker={"size": 9, "color": "var(--accent)"},
    )
    return plot([trace], "memory of the heaviest device, GB", f"{unit} per step")
