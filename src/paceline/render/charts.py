"""Charts: plotly figures as plain data, in the look of the pages.

Colours are names of style-sheet variables, such as "var(--accent)", or fixed ones; the page puts in
what the variables stand for, because plotly does not know style sheets. Nothing here imports
plotly, and nothing is drawn: the page does that.

Long curves are thinned: each bucket of points keeps its lowest and its highest value, so that no
spike is lost and a curve of any length costs the same. None is a gap.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.render.parts import Part

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#b8a800")
"""Okabe and Ito's, which stay apart for every kind of colour vision, in light and dark."""

Plot = dict[str, Any]
"""A plotly figure, or a part of one, as plain data."""
Axis = Plot | str
"""A plotly axis as far as it differs from the others, or only its title."""
Series = Sequence[float | None]

NOTHING: Plot = {"data": [], "layout": {}}

# Points of one curve: about one for each pixel of the page.
_MOST_POINTS = 1000


@dataclass(frozen=True)
class Chart(Part):
    """The place of a plot on a page."""

    name: str
    """Unique on its page."""
    plot: Plot
    size: str = "middle"
    """Its height: "tall", "middle" or "low"."""
    title: str = ""
    """Above it, where its section has several."""

    def __bool__(self) -> bool:
        return bool(self.plot["data"])


def plot(traces: Iterable[Plot], x: Axis, y: Axis, **changes: Any) -> Plot:
    """Traces on two axes.

    Args:
        traces: what is drawn.
        x: the horizontal axis.
        y: the vertical one.
        changes: what else of the layout differs: from a chart whose legend lies above it and is
            not shown.
    """
    layout = {
        "autosize": True,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "font": {"family": "var(--font)", "size": 12.5, "color": "var(--muted)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "var(--raised)", "bordercolor": "var(--rule)"},
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": _axis(x),
        "yaxis": _axis(y),
    }
    return {"data": list(traces), "layout": {**layout, **changes}}


def _axis(given: Axis) -> Plot:
    known: Plot = {"title": given} if isinstance(given, str) else dict(given)
    if "title" in known:
        known["title"] = {"text": known["title"], "standoff": 8, "font": {"size": 12.5}}
    return {"gridcolor": "var(--grid)", "zeroline": False, "automargin": True, **known}


def curve(name: str, x: Iterable[float], y: Iterable[float | None], **changes: Any) -> Plot:
    """A line with a mark at each point."""
    ys = [None if value is None else float(f"{value:.6g}") for value in y]
    line = {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": ys}
    return {**line, **changes}


def bars(name: str, colour: Any, **changes: Any) -> Plot:
    """Bars without outlines, of one colour or each of its own."""
    return {
        "type": "bar",
        "name": name,
        "marker": {"color": colour, "line": {"width": 0}},
    } | changes


def where_equal(low: float, high: float) -> Plot:
    """The line on which what is across equals what is up."""
    style = {"color": "var(--muted)", "width": 1, "dash": "dash"}
    line = curve("", [low, high], [low, high], mode="lines", line=style)
    return {**line, "hoverinfo": "skip", "showlegend": False}


def time_unit(seconds: float) -> tuple[float, str]:
    """How many of its unit a second has, and the unit that times of such a length are drawn in."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def thin(xs: Sequence[int], ys: Series, most: int = _MOST_POINTS) -> tuple[list[int], Series]:
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
