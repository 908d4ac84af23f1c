"""The page of `paceline validate`: predicted against measured, every line a point."""

from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.observe.run import write_atomic
from paceline.published.validate.table import sentence, tables, unpredicted
from paceline.published.validate.validate import Report, Scored
from paceline.render.charts import COLOURS, NOTHING, Axis, Chart, Plot, curve, plot, where_equal
from paceline.render.page import Page
from paceline.render.parts import Section
from paceline.render.table import Table

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
    reasons = Table(("source", "lines and why"), unpredicted(report), words=(0, 1))
    page = Page(
        name="How wrong the planner is",
        next="`paceline plan my.toml`, knowing how wrong it is.",
        subtitle=[],
        lede=sentence(report),
        parts=(
            *_charts(report),
            *(Section(each.heads[0].capitalize(), each, note=each.note) for each in tables(report)),
            Section("Not predicted", reasons),
        ),
        at=at,
    )
    return page.html()


def _charts(report: Report) -> Iterator[Section]:
    time = _scatter(
        report.tested,
        lambda one: one.run.step_s or 0.0,
        lambda one: one.prediction.step_s if one.prediction else 0.0,
        "seconds of a step",
    )
    yield Section(
        "Step time",
        Chart("time", time, "tall"),
        note="Every published run is a point; on the dashed line prediction and measurement agree. "
        "Click a source to hide it, double-click to see it alone.",
    )
    yield Section(
        "Error by number of devices",
        Chart("error", _errors_by_devices(report.tested), "low"),
        note="Of the metric that the source measured: above zero it was predicted too high.",
    )
    memory = _scatter(
        [one for one in report.scored if one.memory_ratio is not None],
        lambda one: (one.run.peak_memory_bytes or 0.0) / 1e9,
        lambda one: (one.memory_bytes or 0.0) / 1e9,
        "peak memory, GB",
    )
    yield Section("Peak memory, predicted and measured", Chart("memory", memory))


def _scatter(
    some: list[Scored],
    measured: Callable[[Scored], float],
    predicted: Callable[[Scored], float],
    unit: str,
) -> Plot:
    """Both axes alike and logarithmic, with the line where prediction and measurement agree."""
    if not some:
        return NOTHING
    values = [f(one) for one in some for f in (measured, predicted)]
    agree = where_equal(min(values) * 0.8, max(values) * 1.25)
    points = _points(some, lambda one: (measured(one), predicted(one)))
    measured_axis = {"type": "log", "title": f"measured {unit}"}
    return _below([agree, *points], measured_axis, {"type": "log", "title": f"predicted {unit}"})


def _errors_by_devices(some: list[Scored]) -> Plot:
    """Where errors come from: predicted over measured by the number of devices."""
    if not some:
        return NOTHING

    def place(one: Scored) -> tuple[float, float]:
        assert one.run.work is not None
        return one.run.work.layout.num_ranks, (one.ratio or 1.0) - 1

    zero = {"zeroline": True, "zerolinecolor": "var(--muted)"}
    error = {**zero, "tickformat": "+.0%", "title": "error of the metric"}
    return _below(_points(some, place), {"type": "log", "title": "devices"}, error)


def _below(traces: list[Plot], x: Axis, y: Axis) -> Plot:
    """With a legend below it."""
    legend = {"orientation": "h", "x": 0, "y": -0.14, "yanchor": "top"}
    return plot(traces, x, y, showlegend=True, legend=legend)


def _points(some: list[Scored], place: Callable[[Scored], tuple[float, float]]) -> list[Plot]:
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
            curve(
                group,
                [float(f"{x:.5g}") for x, _ in places],
                [y for _, y in places],
                type="scattergl" if len(some) > 5000 else "scatter",
                mode="markers",
                text=[_hover(one) for one in ones],
                hovertemplate="%{text}<br>measured %{x:.4~g}, predicted %{y:.4~g}",
                marker=marker,
            )
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
