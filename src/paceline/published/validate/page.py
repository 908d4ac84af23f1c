"""The page of `paceline validate`: predicted against measured, every line a point.

Its frame is that of all pages (`paceline.observe.page`). Python decides what is shown.
"""

from collections.abc import Callable
from pathlib import Path

from paceline.observe.page import COLOURS, Chart, chart_layout, render_page, where_equal
from paceline.observe.run import write_atomic
from paceline.published.validate.table import sentence, tables, unpredicted
from paceline.published.validate.validate import Report, Scored

_LEGEND_BELOW: Chart = {
    "showlegend": True,
    "legend": {"orientation": "h", "x": 0, "y": -0.14, "yanchor": "top"},
}
_SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up")


def write_page(report: Report, path: Path) -> Path:
    """Write the page and return its path."""
    return write_atomic(path, render(report, path))


def render(report: Report, at: Path | None = None) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        report: what it shows.
        at: where the page will stand, where it is known.
    """
    return render_page(
        "paceline.published.validate",
        "validate.html",
        name="How wrong the planner is",
        subtitle=[],
        next_="`paceline plan my.toml`, knowing how wrong it is.",
        lede=sentence(report),
        cards=[],
        charts={name: chart for name, chart in _charts(report).items() if chart["data"]},
        at=at,
        tables=list(tables(report)),
        unpredicted=unpredicted(report),
    )


def _charts(report: Report) -> dict[str, Chart]:
    return {
        "time": _scatter(
            report.tested,
            lambda one: one.run.step_s or 0.0,
            lambda one: one.prediction.step_s if one.prediction else 0.0,
            "seconds of a step",
        ),
        "error": _errors_by_devices(report.tested),
        "memory": _scatter(
            [one for one in report.scored if one.memory_ratio is not None],
            lambda one: (one.run.peak_memory_bytes or 0.0) / 1e9,
            lambda one: (one.memory_bytes or 0.0) / 1e9,
            "peak memory, GB",
        ),
    }


def _scatter(
    some: list[Scored],
    measured: Callable[[Scored], float],
    predicted: Callable[[Scored], float],
    unit: str,
) -> Chart:
    """Both axes alike and logarithmic, with the line where prediction and measurement agree."""
    if not some:
        return {"data": [], "layout": {}}
    values = [f(one) for one in some for f in (measured, predicted)]
    agree = where_equal(min(values) * 0.8, max(values) * 1.25)
    points = _points(some, lambda one: (measured(one), predicted(one)))
    layout = chart_layout(
        {"type": "log", "title": {"text": f"measured {unit}"}},
        {"type": "log", "title": {"text": f"predicted {unit}"}},
        **_LEGEND_BELOW,
    )
    return {"data": [agree, *points], "layout": layout}


def _errors_by_devices(some: list[Scored]) -> Chart:
    """Where errors come from: predicted over measured by the number of devices."""
    if not some:
        return {"data": [], "layout": {}}

    def place(one: Scored) -> tuple[float, float]:
        assert one.run.work is not None
        return one.run.work.layout.num_ranks, (one.ratio or 1.0) - 1

    line = {"zeroline": True, "zerolinecolor": "var(--muted)"}
    layout = chart_layout(
        {"type": "log", "title": {"text": "devices"}},
        {**line, "tickformat": "+.0%", "title": {"text": "error of the metric"}},
        **_LEGEND_BELOW,
    )
    return {"data": _points(some, place), "layout": layout}


def _points(some: list[Scored], place: Callable[[Scored], tuple[float, float]]) -> list[Chart]:
    """One trace per source."""
    groups = list(dict.fromkeys(one.run.group for one in some))
    traces = []
    for index, group in enumerate(groups):
        ones = [one for one in some if one.run.group == group]
        places = [place(one) for one in ones]
        marker = {
            "size": 6,
            "opacity": 0.75,
            "color": COLOURS[index % len(COLOURS)],
            "symbol": _SYMBOLS[index // len(COLOURS) % len(_SYMBOLS)],
        }
        traces.append(
            {
                "type": "scattergl" if len(some) > 5000 else "scatter",
                "mode": "markers",
                "name": group,
                "x": [float(f"{x:.5g}") for x, _ in places],
                "y": [float(f"{y:.5g}") for _, y in places],
                "text": [_hover(one) for one in ones],
                "hovertemplate": "%{text}<br>measured %{x:.4~g}, predicted %{y:.4~g}",
                "marker": marker,
            }
        )
    return traces


def _hover(one: Scored) -> str:
    work = one.run.work
    assert work is not None
    axes = " ".join(
        f"{axis}{getattr(work.layout, axis)}"
        for axis in ("pp", "dp", "fsdp", "cp", "tp", "ep")
        if getattr(work.layout, axis) != 1
    )
    words = ", ".join(word for word in work.network_words if word)
    ran = f"{work.num_devices} {work.device.name} {axes}".strip()
    return f"{one.run.name}: {words} on {ran}, run by {work.software.family}"
