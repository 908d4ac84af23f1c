"""Show: collectives in tables as nccl-tests prints them, pairs as a heat map, in a terminal."""

from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from paceline.bench.network.bandwidth import BandwidthRow, Curve, by_curve, fit
from paceline.bench.network.measure import NetworkMeasurement
from paceline.bench.network.pairs import Matrix, Pairs
from paceline.bench.network.slow import slow_links
from paceline.bench.network.sweep import SkippedSizes
from paceline.render.figures import buffer_text, bytes_text, time_text
from paceline.render.table import Table

FITS = ("collective", "ranks", "links", "latency", "rate", "median error", "worst")
"""Columns of `fit_cells`."""
_WIDEST_WITH_FIGURES = 12
"""Ranks whose matrix is printed with figures; more are printed as colours."""
# From slow to fast, dark enough for white figures; steps of a half.
_COLOURS = ("#7f1d1d", "#b45309", "#a16207", "#4d7c0f", "#166534")


def shown_network(measured: NetworkMeasurement) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [
        _table(key, rows, measured.rows) for key, rows in _tables(measured.rows)
    ]
    if measured.rows:
        parts.append(_fits(measured.rows))
    parts += _left(measured.left)
    if measured.pairs is not None:
        parts += _pairs(measured.pairs)
    return Group(*parts)


def _tables(rows: Sequence[BandwidthRow]) -> Iterator[tuple[Curve, list[BandwidthRow]]]:
    """Tables of the backend's rows by op and group, with ours in columns of their own."""
    for key, of_curve in by_curve(rows).items():
        if key[1] == "backend":
            yield key, of_curve


def _table(key: Curve, rows: Sequence[BandwidthRow], all_rows: Sequence[BandwidthRow]) -> Table:
    op, _, links, num_ranks = key
    ours = _fastest_of_ours(key, all_rows)
    contended = any(row.contention is not None for row in rows)
    fastest = max(row.bus_bytes_per_s for row in rows)
    factor, unit = (1e9, "GB/s") if fastest >= 1e9 else (1e6, "MB/s")
    heads = ["size", "ms", "p10", "p90", "algbw", f"busbw {unit}"]
    heads += ["of alone"] * contended + ["ours", "by"] * bool(ours)
    shown: list[list[str | Text]] = []
    for row in rows:
        cells: list[str | Text] = [buffer_text(row.num_bytes)]
        cells += [f"{each * 1e3:.3g}" for each in (row.seconds, row.low_s, row.high_s)]
        rates = row.algorithm_bytes_per_s, row.bus_bytes_per_s
        cells += [f"{rate / factor:.3g}" for rate in rates]
        if contended:
            cells.append("" if row.contention is None else f"{row.contention:.2f} x")
        shown.append([*cells, *_of_ours(ours.get(row.num_bytes), row)])
    words = [at for at, head in enumerate(heads) if head == "by"]
    return Table(heads, shown, words, title=f"{op}, {where_text(num_ranks, links)}", ruled=True)


def where_text(num_ranks: int, links: str) -> str:
    """Which ranks: "4 ranks of a node"."""
    which = {
        "inside": "of a node",
        "across": "across nodes, one of each",
        "both": "across nodes, all of each",
    }
    return f"{num_ranks} ranks {which[links]}"


def _fastest_of_ours(key: Curve, rows: Sequence[BandwidthRow]) -> dict[int, BandwidthRow]:
    """By size."""
    op, _, links, num_ranks = key
    found: dict[int, BandwidthRow] = {}
    for row in rows:
        same = (row.op, row.links, row.num_ranks) == (op, links, num_ranks)
        if same and row.algorithm != "backend":
            best = found.get(row.num_bytes)
            if best is None or row.seconds < best.seconds:
                found[row.num_bytes] = row
    return found


def _of_ours(best: BandwidthRow | None, backend: BandwidthRow) -> tuple[str | Text, ...]:
    """Milliseconds and name of our fastest, bold where it beats the backend."""
    if best is None:
        return ()
    style = "bold" if best.seconds < backend.seconds else ""
    return Text(f"{best.seconds * 1e3:.3g}", style=style), best.algorithm


def _fits(rows: Sequence[BandwidthRow]) -> Table:
    """Latency and bandwidth of every curve of the backend, and how wrong a line is."""
    return Table(
        FITS,
        [fit_cells(key, each) for key, each in by_curve(rows).items() if key[1] == "backend"],
        words=(0, 2),
        title="As latency + bytes / rate (least relative squares)",
        ruled=True,
    )


def fit_cells(curve: Curve, rows: Sequence[BandwidthRow]) -> list[str]:
    """A curve as latency and rate, and how wrong that is: the cells of FITS."""
    op, _, links, num_ranks = curve
    line = fit(rows)
    rate = "–" if line.bytes_per_s == float("inf") else f"{bytes_text(line.bytes_per_s)}/s"
    return [op, str(num_ranks), links, time_text(line.latency_s), rate, *line.error_texts]


def _left(left: Sequence[SkippedSizes]) -> Iterator[str]:
    """What was left out, by size and reason."""
    more = {"time": "a larger --budget", "memory": "more free memory"}
    groups: dict[tuple[int, str], dict[str, list[str]]] = {}
    for each in left:
        of_group = groups.setdefault((each.above_bytes, each.reason), {})
        of_group.setdefault(each.name, []).append(str(each.num_ranks))
    for (size, reason), names in groups.items():
        told = "; ".join(f"{name} of {', '.join(numbers)} ranks" for name, numbers in names.items())
        yield f"Not measured above {buffer_text(size)}, which needs {more[reason]}: {told}."


def _pairs(pairs: Pairs) -> Iterator[RenderableType]:
    title = f"Messages of {buffer_text(pairs.num_bytes)} from rank (row) to rank (column), MB/s"
    alone = pairs.alone_bytes_per_s
    yield f"{title}, all pairs of a round at once:"
    yield _heat(pairs.bytes_per_s)
    if alone is not None:
        yield "One pair at a time:"
        yield _heat(alone)
        yield f"A pair takes {contention(pairs.bytes_per_s, alone):.2f} x as long in company."
    yield f"Latency: {time_text(median(others(pairs.latency_s)))} (median of all pairs)."
    for each in slow_links(pairs.best_bytes_per_s, pairs.hosts):
        yield Text(each.sentence, style="bold red")


def contention(together: Matrix, alone: Matrix) -> float:
    """How many times longer a message takes while other pairs are at work, too: median."""
    return median(apart / both for both, apart in zip(others(together), others(alone), strict=True))


def others(matrix: Matrix) -> list[float]:
    """All but the diagonal."""
    return [
        value for row, values in enumerate(matrix) for at, value in enumerate(values) if at != row
    ]


def _heat(matrix: Matrix) -> Grid:
    """Every rank's row, the slower the redder."""
    fastest = max(others(matrix))
    with_figures = len(matrix) <= _WIDEST_WITH_FIGURES
    table = Grid(box=None, padding=0, show_header=with_figures)
    table.add_column("", justify="right", style="bright_black")
    for rank in range(len(matrix)):
        table.add_column(f"{rank} ", justify="right")
    for row, values in enumerate(matrix):
        cells = [
            _cell(value, fastest, with_figures=with_figures) if at != row else Text("")
            for at, value in enumerate(values)
        ]
        table.add_row(f"{row} ", *cells)
    return table


def _cell(value: float, fastest: float, *, with_figures: bool) -> Text:
    text = f" {value / 1e6:,.0f} " if with_figures else "  "
    return Text(text, style=f"white on {colour(value / fastest)}")


def colour(share: float) -> str:
    """Of a rate over the fastest: green down to 0.71, then redder with every half."""
    steps = 0
    while steps < len(_COLOURS) - 1 and share < 0.71 / 2**steps:
        steps += 1
    return _COLOURS[-1 - steps]
