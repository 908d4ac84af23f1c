"""Charts: the figures of a run over its steps, as plain data (see `render.charts`)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.noise_scale import noise_scales
from paceline.observe.summary import Lines, Summary, column, mean_terms, number
from paceline.observe.terms import colour, in_order
from paceline.render.charts import NOTHING, Plot, Series, bars, curve, plot, smooth, thin

# Bars of the step-time chart; more are averaged in groups of neighbours.
_MAX_BARS = 40
# Curves of a chart of parts; metrics.jsonl has them all.
_MOST_PARTS = 12
# Marks of steps without a finite loss.
_MAX_MARKS = 200
# Runs this short show a mark at every step.
_FEW_STEPS = 30
# Steps to either side over which the loss is smoothed, as a share of the run.
_SMOOTHING = 0.02
_PART = "loss."


def charts(lines: Lines, figures: Summary) -> dict[str, Plot]:
    """Every chart of a run by name; those that there is nothing for are empty.

    Args:
        lines: the steps, as `Run.metrics` returns them.
        figures: their summary.

    Returns:
        name -> {"data": traces, "layout": layout}, plain JSON without non-finite numbers.
    """
    names = (
        *("loss", "terms", "rate", "memory", "lr", "grad_norm", "latency", "backlog", "parts"),
        "noise",
    )
    if not lines:
        return dict.fromkeys(names, NOTHING)
    unit = figures.unit
    drawn = (
        _loss(lines, figures),
        _terms(lines),
        _curve(lines, f"{unit}_per_s", f"%{{y:,.4~r}} {unit}/s", smoothed=True),
        _curve(lines, "memory_bytes", "%{y:.4~s}B", tickformat="~s", ticksuffix="B"),
        _curve(lines, "lr", "%{y:.3~g}", exponentformat="power"),
        _curve(lines, "grad_norm", "%{y:.4~g}", smoothed=True),
        _curve(lines, "stream_latency_s", "%{y:.4~r} s", ticksuffix=" s"),
        _curve(lines, "stream_backlog_tokens", "%{y:.4~s} tokens", tickformat="~s"),
        _parts(lines),
        _noise(lines),
    )
    return dict(zip(names, drawn, strict=True))


def beside(runs: Mapping[str, Lines], key: str, title: str) -> Plot:
    """One figure of several runs over their steps.

    Args:
        runs: name -> lines, the one to compare with first.
        key: of the lines.
        title: of the vertical axis, with its unit.
    """
    colours = ("var(--muted)", "var(--accent)", "var(--accent-2)")
    traces = [
        _line(_steps(lines), column(lines, key), name, paint, 1.8)
        for (name, lines), paint in zip(runs.items(), colours, strict=False)
        if any(value is not None for value in column(lines, key))
    ]
    return _over_steps(traces, {"title": title, "rangemode": "tozero"}, showlegend=True)


def _loss(lines: Lines, figures: Summary) -> Plot:
    steps, losses = _steps(lines), column(lines, "loss")
    traces = _noisy(steps, losses, "training") if figures.loss is not None else []
    if figures.eval_loss is not None:
        evaluated = [line for line in lines if number(line.get("eval_loss")) is not None]
        held_out = column(evaluated, "eval_loss")
        line = _line(_steps(evaluated), held_out, "held out", "var(--accent-2)", 1.6)
        mark = {"size": 7, "color": "var(--accent-2)"}
        traces.append({**line, "mode": "lines+markers", "marker": mark})
    if figures.unigram_loss is not None:
        ends = [steps[0], steps[-1]] if len(steps) > 1 else [steps[0] - 1, steps[0] + 1]
        bound = _line(ends, [figures.unigram_loss] * 2, "unigram bound", "var(--muted)", 1.4)
        bound["line"]["dash"] = "dash"
        traces.append({**bound, "mode": "lines"})
    if None in losses:
        traces.append(_not_finite(steps, losses))
    name = "loss (nats per token)" if figures.unit == "tokens" else "loss"
    foot = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}
    return _over_steps(traces, {"title": name}, showlegend=True, yaxis2=foot)


def _noise(lines: Lines) -> Plot:
    """The noise scale of gradients, as it is known after each measurement."""
    found = [{"step": step, "noise_scale": scale} for step, scale in noise_scales(lines)]
    return _curve(found, "noise_scale", "%{y:.4~s} samples", tickformat="~s")


def _parts(lines: Lines) -> Plot:
    """The losses of a mixture's sources."""
    stated = [{"step": line["step"], **(line.get("figures") or {})} for line in lines]
    names = dict.fromkeys(name for each in stated for name in each if name.startswith(_PART))
    shown = list(names)[:_MOST_PARTS]
    if not shown:
        return NOTHING
    steps = _steps(lines)
    reach = round(len(steps) * _SMOOTHING)
    traces = [
        _line(
            steps,
            smooth(column(stated, name), reach),
            name.removeprefix(_PART),
            f"hsl({360 * number // len(shown) + 210}, 55%, 50%)",
            1.6,
        )
        for number, name in enumerate(shown)
    ]
    return _over_steps(traces, {"title": "loss of each source"}, showlegend=True)


def _noisy(steps: Sequence[int], values: Series, name: str) -> list[Plot]:
    """Every step, and where there are enough of them a smoothed curve on top."""
    reach = round(len(steps) * _SMOOTHING)
    if not reach:
        return [_line(steps, values, name, "var(--accent)", 1.6)]
    smoothed = _line(steps, smooth(values, reach), f"{name}, smoothed", "var(--accent)", 2.2)
    pale = _line(steps, values, name, "var(--accent-pale)", 1.2)
    return [pale, {**smoothed, "mode": "lines"}]


def _not_finite(steps: Sequence[int], losses: Series) -> Plot:
    """Crosses along the foot of the chart: where a loss could not be drawn."""
    bad = [step for step, loss in zip(steps, losses, strict=True) if loss is None]
    shown = bad[:: math.ceil(len(bad) / _MAX_MARKS)]
    crosses = curve("not finite", shown, [0.02] * len(shown), mode="markers", yaxis="y2")
    mark = {"symbol": "x", "size": 7, "color": "var(--warn)"}
    return {**crosses, "marker": mark, "hovertemplate": "not finite"}


def _terms(lines: Lines) -> Plot:
    """Stacked bars: the profiled steps, or groups of all steps where none was profiled."""
    chosen = [line for line in lines if line.get("profiled")] or list(lines[1:] or lines)
    size = math.ceil(len(chosen) / _MAX_BARS)
    groups = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    means = [mean_terms(group) for group in groups]
    labels = [str(group[0]["step"]) for group in groups]
    traces = [
        bars(
            term,
            colour(term),
            x=labels,
            y=[mean.get(term, 0.0) * 1e3 for mean in means],
            hovertemplate="%{y:.4~g} ms",
        )
        for term in in_order({term for mean in means for term in mean})
    ]
    name = "step" if size == 1 else f"first step of each {size} averaged"
    across = {"type": "category", "nticks": 8, "tickangle": 0, "showgrid": False, "title": name}
    return _over_steps(traces, {"title": "ms per step"}, across, barmode="stack", bargap=0.18)


def _curve(lines: Lines, key: str, hover: str, smoothed: bool = False, **axis: Any) -> Plot:
    values, steps = column(lines, key), _steps(lines)
    if all(value is None for value in values):
        return NOTHING
    if smoothed:
        traces = _noisy(steps, values, "step")
    else:
        traces = [_line(steps, values, "step", "var(--accent)", 1.6)]
    named = hover + ("" if len(traces) > 1 else "<extra></extra>")
    drawn = [{**trace, "hovertemplate": named} for trace in traces]
    return _over_steps(drawn, {"rangemode": "tozero", **axis})


def _line(steps: Sequence[int], values: Series, name: str, paint: str, width: float) -> Plot:
    mode = "lines+markers" if len(steps) <= _FEW_STEPS else "lines"
    return curve(
        name,
        *thin(steps, values),
        mode=mode,
        line={"color": paint, "width": width},
        marker={"size": 5, "color": paint},
        hovertemplate="%{y:.4~g}",
    )


def _steps(lines: Lines) -> list[int]:
    return [int(line["step"]) for line in lines]


def _over_steps(
    traces: Sequence[Plot], up: Plot, across: Plot | None = None, **changes: Any
) -> Plot:
    muted = {"linecolor": "var(--rule)", "tickfont": {"color": "var(--muted)"}}
    quiet = {**muted, "separatethousands": True}
    steps = {**quiet, "title": "step", "showline": True, **(across or {})}
    return plot(traces, steps, {**quiet, **up}, hovermode="x unified", **changes)
