"""Charts: the pictures of a report as plain plotly figures (dicts of data and layout).

Colours are names of style-sheet variables, such as "var(--accent)", or the colours of the terms;
the page puts in what the variables stand for, because plotly does not know style sheets.

Long runs are thinned: each bucket of steps keeps its lowest and its highest value, so that no spike
is lost and a curve of any length costs the same. A value that is missing or not finite is a gap.

Nothing here imports plotly, and nothing is drawn: report.html does that.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe import summary
from paceline.observe.page import Chart, chart_layout
from paceline.observe.summary import Lines, Summary

Series = Sequence[float | None]

# Points of one curve: about one for each pixel of the page.
_MAX_POINTS = 1000
# Bars of the step-time chart; more are averaged in groups of neighbours.
_MAX_BARS = 40
# Marks of steps without a finite loss.
_MAX_MARKS = 200
# Runs this short show a mark at every step.
_FEW_STEPS = 30
# Steps to either side over which the loss is smoothed, as a share of the run.
_SMOOTHING = 0.02


def charts(lines: Lines, figures: Summary) -> dict[str, Chart]:
    """Every chart of a run by name, in the order they are shown; none where there is no step.

    Args:
        lines: the steps, as `Run.metrics` returns them.
        figures: their summary.

    Returns:
        name -> {"data": traces, "layout": layout}, plain JSON without non-finite numbers.
    """
    if not lines:
        return {}
    unit = figures.unit
    drawn = {
        "loss": _loss(lines, figures),
        "terms": _terms(lines),
        "rate": _curve(lines, f"{unit}_per_s", f"%{{y:,.4~r}} {unit}/s", smoothed=True),
        "memory": _curve(lines, "memory_bytes", "%{y:.4~s}B", tickformat="~s", ticksuffix="B"),
        "lr": _curve(lines, "lr", "%{y:.3~g}", exponentformat="power"),
        "grad_norm": _curve(lines, "grad_norm", "%{y:.4~g}", smoothed=True),
    }
    return {name: chart for name, chart in drawn.items() if chart["data"]}


def beside(runs: Mapping[str, Lines], key: str, title: str) -> Chart:
    """One figure of several runs over their steps.

    Args:
        runs: name -> lines, the one to compare with first.
        key: of the lines.
        title: of the vertical axis, with its unit.
    """
    colours = ("var(--muted)", "var(--accent)", "var(--accent-2)")
    traces = [
        _line(_steps(lines), summary.column(lines, key), name, {"color": colour, "width": 1.8})
        for (name, lines), colour in zip(runs.items(), colours, strict=False)
        if any(value is not None for value in summary.column(lines, key))
    ]
    layout = _layout(y={"title": _title(title), "rangemode": "tozero"})
    return {"data": traces, "layout": {**layout, "showlegend": True}}


def thin(xs: Sequence[int], ys: Series, most: int = _MAX_POINTS) -> tuple[list[int], Series]:
    """At most about `most` points of a curve, among them every bucket's lowest and highest."""
    if len(xs) <= most:
        return list(xs), ys
    size = math.ceil(2 * len(xs) / most)
    kept: set[int] = {0, len(xs) - 1}
    for start in range(0, len(xs), size):
        bucket = [i for i in range(start, min(start + size, len(xs))) if ys[i] is not None]
        if not bucket:
            kept.add(start)  # the gap stays a gap
            continue
        kept |= {min(bucket, key=lambda i: ys[i] or 0.0), max(bucket, key=lambda i: ys[i] or 0.0)}
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def smooth(ys: Series, reach: int) -> list[float | None]:
    """Mean over up to `reach` values to either side, as many on the one as on the other.

    So the curve is not late, as a running mean would be, and its ends are the data's own. Values
    that are missing take no part, and stay missing where a whole window is.
    """
    sums, counts = [0.0], [0]
    for y in ys:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    means: list[float | None] = []
    for i in range(len(ys)):
        side = min(reach, i, len(ys) - 1 - i)
        first, last = i - side, i + side + 1
        count = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / count if count else None)
    return means


def _loss(lines: Lines, figures: Summary) -> Chart:
    steps, losses = _steps(lines), summary.column(lines, "loss")
    traces = _noisy(steps, losses, "training") if figures.loss is not None else []
    if figures.eval_loss is not None:
        traces.append(_evaluations(lines))
    if figures.unigram_loss is not None:
        traces.append(_bound(steps, figures.unigram_loss))
    if None in losses:
        traces.append(_not_finite(steps, losses))
    layout = _layout(y={"title": _title(_loss_name(figures.unit))})
    layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}
    return {"data": traces, "layout": {**layout, "showlegend": True}}


def _noisy(steps: Sequence[int], values: Series, name: str) -> list[Chart]:
    """Every step, and where there are enough of them a smoothed curve on top."""
    reach = round(len(steps) * _SMOOTHING)
    if not reach:
        return [_line(steps, values, name, {"color": "var(--accent)", "width": 1.6})]
    pale = {"color": "var(--accent-pale)", "width": 1.2}
    bold = {"color": "var(--accent)", "width": 2.2}
    smoothed = _line(steps, smooth(values, reach), f"{name}, smoothed", bold, marks=False)
    return [_line(steps, values, name, pale), smoothed]


def _loss_name(unit: str) -> str:
    return "loss (nats per token)" if unit == "tokens" else "loss"


def _evaluations(lines: Lines) -> Chart:
    evaluated = [line for line in lines if summary.number(line.get("eval_loss")) is not None]
    style = {"color": "var(--accent-2)", "width": 1.6}
    losses = summary.column(evaluated, "eval_loss")
    trace = _line(_steps(evaluated), losses, "held out", style)
    return {**trace, "mode": "lines+markers", "marker": {"size": 7, "color": style["color"]}}


def _bound(steps: Sequence[int], bound: float) -> Chart:
    style = {"color": "var(--muted)", "width": 1.4, "dash": "dash"}
    ends = [steps[0], steps[-1]] if len(steps) > 1 else [steps[0] - 1, steps[0] + 1]
    return _line(ends, [bound, bound], "unigram bound", style, marks=False)


def _not_finite(steps: Sequence[int], losses: Series) -> Chart:
    """Crosses along the foot of the chart: where a loss could not be drawn."""
    bad = [step for step, loss in zip(steps, losses, strict=True) if loss is None]
    shown = bad[:: math.ceil(len(bad) / _MAX_MARKS)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "not finite",
        "x": shown,
        "y": [0.02] * len(shown),
        "yaxis": "y2",
        "marker": {"symbol": "x", "size": 7, "color": "var(--warn)"},
        "hovertemplate": "not finite",
    }


def _terms(lines: Lines) -> Chart:
    """Stacked bars: the profiled steps, or groups of all steps where none was profiled."""
    chosen = [line for line in lines if line.get("profiled")] or list(lines[1:] or lines)
    size = math.ceil(len(chosen) / _MAX_BARS)
    groups = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    means = [summary.mean_terms(group) for group in groups]
    labels = [str(group[0]["step"]) for group in groups]
    present = summary.in_order({term for mean in means for term in mean})
    traces = [
        {
            "type": "bar",
            "name": term,
            "x": labels,
            "y": [mean.get(term, 0.0) * 1e3 for mean in means],
            "marker": {"color": summary.colour(term), "line": {"width": 0}},
            "hovertemplate": "%{y:.4~g} ms",
        }
        for term in present
    ]
    name = "step" if size == 1 else f"first step of each {size} averaged"
    categories = {"type": "category", "nticks": 8, "tickangle": 0, "showgrid": False}
    layout = _layout({**categories, "title": _title(name)}, {"title": _title("ms per step")})
    return {"data": traces, "layout": {**layout, "barmode": "stack", "bargap": 0.18}}


def _curve(lines: Lines, key: str, hover: str, smoothed: bool = False, **axis: Any) -> Chart:
    values = summary.column(lines, key)
    layout = _layout(y={"rangemode": "tozero", **axis})
    if all(value is None for value in values):
        return {"data": [], "layout": layout}
    steady = {"color": "var(--accent)", "width": 1.6}
    steps = _steps(lines)
    traces = _noisy(steps, values, "step") if smoothed else [_line(steps, values, "step", steady)]
    named = hover + ("" if len(traces) > 1 else "<extra></extra>")
    return {"data": [{**trace, "hovertemplate": named} for trace in traces], "layout": layout}


def _line(
    steps: Sequence[int], values: Series, name: str, style: dict[str, Any], marks: bool = True
) -> Chart:
    xs, ys = thin(steps, values)
    mode = "lines+markers" if marks and len(steps) <= _FEW_STEPS else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": xs,
        "y": [None if y is None else float(f"{y:.6g}") for y in ys],
        "line": style,
        "marker": {"size": 5, "color": style["color"]},
        "hovertemplate": "%{y:.4~g}",
    }


def _steps(lines: Lines) -> list[int]:
    return [int(line["step"]) for line in lines]


def _title(text: str) -> Chart:
    return {"text": text, "standoff": 8, "font": {"size": 12.5}}


def _layout(x: Chart | None = None, y: Chart | None = None) -> Chart:
    quiet = {"linecolor": "var(--rule)", "tickfont": {"color": "var(--muted)"}}
    step = {"title": _title("step"), "showline": True, "separatethousands": True}
    return chart_layout(
        {**quiet, **step, **(x or {})},
        {**quiet, "separatethousands": True, **(y or {})},
        hovermode="x unified",
    )
