"""The page of `paceline bench collectives`: bus bandwidth by size, and the pairs as heat maps."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from paceline.bench.network.bandwidth import BandwidthRow, Curve, by_curve
from paceline.bench.network.measure import NetworkMeasurement
from paceline.bench.network.pairs import Matrix, Pairs
from paceline.bench.network.show import FITS, contention, fit_cells, others, where_text
from paceline.bench.network.slow import FACTOR, slow_links
from paceline.render.charts import COLOURS, Chart, Plot, curve, plot
from paceline.render.figures import buffer_text, bytes_text, plural, time_text
from paceline.render.page import Card, Page
from paceline.render.parts import Section
from paceline.render.table import Table

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
    fits = [
        _cells(each, rows) for each, rows in by_curve(measured.rows).items() if each[1] == "backend"
    ]
    page = Page(
        name="The links between the ranks",
        next=_next(slow, cluster_file),
        subtitle=[source],
        lede=" ".join(slow) or _lede(measured),
        cards=_cards(measured),
        parts=(
            *([] if pairs is None else _pairs(pairs)),
            *_groups(measured),
            Section(
                "As latency and bandwidth",
                Table((*FITS, "contention"), fits, words=(0, 2)),
                note="Seconds = latency + bytes / rate, by least relative squares. Where the error "
                "is large, that line is no description; the planner reads the measured curve. "
                "Contention: how many times longer the largest size takes while all groups "
                "exchange than while one does.",
            ),
        ),
        at=at,
    )
    return page.html()


def _pairs(pairs: Pairs) -> Iterator[Section]:
    """Each rank to each other."""
    red = (
        "A red row and column is a host's card, a single red cell a link: named above where it is "
        f"slower than the rest by a factor of {FACTOR}."
    )
    if pairs.alone_bytes_per_s is None:
        bandwidth = _heat(pairs.hosts, pairs.bytes_per_s, 1e-6, "MB/s")
        yield Section("Bandwidth", Chart("together", bandwidth, "tall"), note=red)
    else:
        yield Section(
            "Bandwidth, one pair at a time",
            Chart("alone", _heat(pairs.hosts, pairs.alone_bytes_per_s, 1e-6, "MB/s"), "tall"),
            note=f"What each link can do. {red}",
        )
        yield Section(
            "Bandwidth, all pairs of a round at once",
            Chart("together", _heat(pairs.hosts, pairs.bytes_per_s, 1e-6, "MB/s"), "tall"),
            note="As pipelines and rings load the network: ranks of one host share its cards.",
        )
    late = _heat(pairs.hosts, pairs.latency_s, 1e6, "us", slow_is_high=True)
    yield Section(
        "Latency",
        Chart("latency", late, "tall"),
        note="One way, of a message of a few bytes: half of the way there and back.",
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
    hosts = plural(len(set(measured.hosts)), "host")
    looked = "" if measured.pairs is None else ", and no link is far below the rest"
    return f"{len(measured.hosts)} ranks on {hosts}{looked}."


def _cards(measured: NetworkMeasurement) -> list[Card]:
    cards: list[Card] = []
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        of_op = [row for row in measured.rows if row.op == op and row.algorithm == "backend"]
        if of_op:
            best = max(of_op, key=lambda row: row.bus_bytes_per_s)
            note = f"{best.num_ranks} ranks, {buffer_text(best.num_bytes)}"
            figure = f"{bytes_text(best.bus_bytes_per_s)}/s"
            cards.append((f"{op.replace('_', '-')}, bus", figure, note))
    if measured.pairs is not None:
        late = median(others(measured.pairs.latency_s))
        cards.append(("latency of a message", time_text(late), "median of all pairs"))
        alone = measured.pairs.alone_bytes_per_s
        if alone is not None:
            company = contention(measured.pairs.bytes_per_s, alone)
            cards.append(("pairs in company", f"{company:.2f} x", "as long as alone, median"))
    return cards


def _groups(measured: NetworkMeasurement) -> Iterator[Section]:
    """A chart for each kind of group."""
    for links, number in sorted({(row.links, row.num_ranks) for row in measured.rows}):
        rows = [row for row in measured.rows if (row.links, row.num_ranks) == (links, number)]
        yield Section(
            f"Bus bandwidth, {where_text(number, links)}",
            Chart(f"bus-{links}-{number}", _bandwidths(rows), "tall"),
            note="As nccl-tests defines it: what has to leave each rank, over the time. Bars reach "
            "from the 10th to the 90th percentile. Click a name to show or hide it: our own "
            "algorithms are dotted, and hidden at first.",
        )


def _bandwidths(rows: Sequence[BandwidthRow]) -> Plot:
    """Bus bandwidth by size, a line for each collective; the backend's are drawn through."""
    traces, colours = [], dict[str, str]()
    for (op, algorithm, _, _), of_curve in by_curve(rows).items():
        is_ours = algorithm != "backend"
        paint = colours.setdefault(op, COLOURS[len(colours) % len(COLOURS)])
        traces.append(
            curve(
                f"{op}, {algorithm}" if is_ours else op,
                [row.num_bytes for row in of_curve],
                [row.bus_bytes_per_s for row in of_curve],
                error_y=_spread(of_curve),
                line={"color": paint, "dash": "dot" if is_ours else "solid", "width": 1.5},
                visible="legendonly" if is_ours else True,
                hovertemplate="%{x:.4~s}B: %{y:.3~s}B/s",
            )
        )
    ticks = sorted({row.num_bytes for row in rows})
    names = [buffer_text(size) for size in ticks]
    return plot(
        traces,
        {"type": "log", "title": "buffer", "tickvals": ticks, "ticktext": names},
        {"type": "log", "title": "bus bandwidth, B/s", "tickformat": "~s", "dtick": 1},
        showlegend=True,
        legend={"x": 1.01, "y": 1},
    )


def _spread(rows: Sequence[BandwidthRow]) -> Plot:
    """From the 10th to the 90th percentile."""
    high, low = (
        [row.bus_bytes_per_s * abs(row.seconds / edge - 1) for row, edge in edges]
        for edges in ([(row, row.low_s) for row in rows], [(row, row.high_s) for row in rows])
    )
    return {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1}


def _heat(
    hosts: Sequence[str], matrix: Matrix, factor: float, unit: str, *, slow_is_high: bool = False
) -> Plot:
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
    down = {**axis, "title": "sending rank", "autorange": "reversed"}
    return plot([trace], {**axis, "title": "receiving rank"}, down)


def _cells(which: Curve, rows: Sequence[BandwidthRow]) -> list[str]:
    company = [row.contention for row in rows if row.contention is not None]
    return [*fit_cells(which, rows), f"{company[-1]:.2f} x" if company else "–"]
