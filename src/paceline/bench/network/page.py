"""The page of `paceline bench collectives`: bus bandwidth by size, and the pairs as heat maps.

Its frame is that of all pages (`paceline.observe.page`). Python decides what is shown.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from paceline.bench.network.bandwidth import BandwidthRow, Curve, by_curve
from paceline.bench.network.measure import NetworkMeasurement
from paceline.bench.network.pairs import Matrix, Pairs
from paceline.bench.network.show import FITS, contention, fit_cells, others, where_text
from paceline.bench.network.sizes import size_text
from paceline.bench.network.slow import FACTOR, slow_links
from paceline.observe.page import COLOURS, Card, Chart, chart_layout, render_page
from paceline.observe.summary import bytes_text, step_time_text

# From slow to fast; apart for every kind of colour vision.
_SCALE = [[0.0, "#b2182b"], [0.5, "#f4c98b"], [1.0, "#2166ac"]]
_MOST_FIGURES = 16  # ranks whose cells have room for a figure


def render(
    measured: NetworkMeasurement, source: str, cluster_file: Path | None, at: Path | None = None
) -> str:
    """The page as text: complete HTML without references to anything outside it.

    Args:
        measured: what is drawn.
        source: on what and when, in a sentence.
        cluster_file: where the curves will stand for the planner; None: nowhere.
        at: where the page will stand, where it is known.
    """
    pairs = measured.pairs
    slow = [] if pairs is None else _slow(pairs)
    return render_page(
        "paceline.bench.network",
        "network.html",
        name="The links between the ranks",
        subtitle=[source],
        next_=_next(slow, cluster_file),
        lede=" ".join(slow) or _lede(measured),
        at=at,
        cards=_cards(measured),
        charts=_charts(measured),
        groups=_groups(measured),
        heads=[*(name.capitalize() for name in FITS), "Contention"],
        rows=[
            _cells(curve, rows)
            for curve, rows in by_curve(measured.rows).items()
            if curve[1] == "backend"
        ],
        factor=FACTOR,
    )


def _next(slow: Sequence[str], cluster_file: Path | None) -> str:
    if slow:
        return "look at the slow link's cable, port and route, and measure again."
    if cluster_file is None:
        return "`paceline bench` measures what training uses here, for the planner."
    return f"`paceline plan my.toml --cluster {cluster_file}` plans with these links."


def _slow(pairs: Pairs) -> list[str]:
    return [each.sentence for each in slow_links(pairs.best_bytes_per_s, pairs.hosts)]


def _lede(measured: NetworkMeasurement) -> str:
    count = f"{len(measured.hosts)} ranks on {len(set(measured.hosts))} host"
    plural = "s" if len(set(measured.hosts)) > 1 else ""
    looked = "" if measured.pairs is None else ", and no link is far below the rest"
    return f"{count}{plural}{looked}."


def _cards(measured: NetworkMeasurement) -> list[Card]:
    cards: list[Card] = []
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        of_op = [row for row in measured.rows if row.op == op and row.algorithm == "backend"]
        if of_op:
            best = max(of_op, key=lambda row: row.bus_bytes_per_s)
            note = f"{best.num_ranks} ranks, {size_text(best.num_bytes)}"
            figure = f"{bytes_text(best.bus_bytes_per_s)}/s"
            cards.append((f"{op.replace('_', '-')}, bus", figure, note))
    if measured.pairs is not None:
        late = median(others(measured.pairs.latency_s))
        cards.append(("latency of a message", step_time_text(late), "median of all pairs"))
        alone = measured.pairs.alone_bytes_per_s
        if alone is not None:
            company = contention(measured.pairs.bytes_per_s, alone)
            cards.append(("pairs in company", f"{company:.2f} x", "as long as alone, median"))
    return cards


def _groups(measured: NetworkMeasurement) -> list[tuple[str, str]]:
    """Name of a chart and head line, for each kind of group."""
    keys = {(row.links, row.num_ranks) for row in measured.rows}
    return [(f"bus-{links}-{number}", where_text(number, links)) for links, number in sorted(keys)]


def _charts(measured: NetworkMeasurement) -> dict[str, Chart]:
    charts = {name: _bandwidths(measured, name) for name, _ in _groups(measured)}
    pairs = measured.pairs
    if pairs is not None:
        rates = {"together": pairs.bytes_per_s, "alone": pairs.alone_bytes_per_s}
        for name, matrix in rates.items():
            if matrix is not None:
                charts[name] = _heat(pairs.hosts, matrix, 1e-6, "MB/s")
        charts["latency"] = _heat(pairs.hosts, pairs.latency_s, 1e6, "us", slow_is_high=True)
    return charts


def _bandwidths(measured: NetworkMeasurement, name: str) -> Chart:
    """Bus bandwidth by size, a line for each collective; the backend's are drawn through."""
    traces, colours = [], dict[str, str]()
    for (op, algorithm, links, number), rows in by_curve(measured.rows).items():
        if name == f"bus-{links}-{number}":
            colour = colours.setdefault(op, COLOURS[len(colours) % len(COLOURS)])
            label = op if algorithm == "backend" else f"{op}, {algorithm}"
            dash = "solid" if algorithm == "backend" else "dot"
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": label,
                    "x": [row.num_bytes for row in rows],
                    "y": [float(f"{row.bus_bytes_per_s:.4g}") for row in rows],
                    "error_y": _spread(rows),
                    "line": {"color": colour, "dash": dash, "width": 1.5},
                    "visible": True if algorithm == "backend" else "legendonly",
                    "hovertemplate": "%{x:.4~s}B: %{y:.3~s}B/s",
                }
            )
    shown = [row for row in measured.rows if name == f"bus-{row.links}-{row.num_ranks}"]
    ticks = sorted({row.num_bytes for row in shown})
    names = [size_text(size) for size in ticks]
    rate = {"title": {"text": "bus bandwidth, B/s"}, "tickformat": "~s", "dtick": 1}
    layout = chart_layout(
        {"type": "log", "title": {"text": "buffer"}, "tickvals": ticks, "ticktext": names},
        {"type": "log", **rate},
        showlegend=True,
        legend={"x": 1.01, "y": 1},
    )
    return {"data": traces, "layout": layout}


def _spread(rows: Sequence[BandwidthRow]) -> Chart:
    """From the 10th to the 90th percentile."""
    high, low = (
        [row.bus_bytes_per_s * abs(row.seconds / edge - 1) for row, edge in edges]
        for edges in ([(row, row.low_s) for row in rows], [(row, row.high_s) for row in rows])
    )
    return {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1}


def _heat(
    hosts: Sequence[str], matrix: Matrix, factor: float, unit: str, *, slow_is_high: bool = False
) -> Chart:
    number = len(matrix)
    values = [
        [float(f"{value * factor:.4g}") if row != at else None for at, value in enumerate(line)]
        for row, line in enumerate(matrix)
    ]
    names = [
        f"{rank} ({host})" if len(set(hosts)) > 1 else str(rank) for rank, host in enumerate(hosts)
    ]
    trace = {
        "type": "heatmap",
        "z": values,
        "x": names,
        "y": names,
        "xgap": 1,
        "ygap": 1,
        "colorscale": _SCALE,
        "reversescale": slow_is_high,
        "hoverongaps": False,
        "hovertemplate": f"from %{{y}} to %{{x}}: %{{z:,.4~g}} {unit}<extra></extra>",
        "colorbar": {"title": {"text": unit}, "thickness": 12},
        "zmin": 0,
        "zmax": max(value for line in values for value in line if value is not None),
        **({"texttemplate": "%{z:,.3~s}"} if number <= _MOST_FIGURES else {}),
    }
    axis = {"type": "category", "showgrid": False}
    layout = chart_layout(
        {**axis, "title": {"text": "receiving rank"}},
        {**axis, "title": {"text": "sending rank"}, "autorange": "reversed"},
    )
    return {"data": [trace], "layout": layout}


def _cells(curve: Curve, rows: Sequence[BandwidthRow]) -> list[str]:
    company = [row.contention for row in rows if row.contention is not None]
    return [*fit_cells(curve, rows), f"{company[-1]:.2f} x" if company else "–"]
