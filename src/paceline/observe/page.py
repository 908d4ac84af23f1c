"""Page: one self-contained HTML file, to look at and to pass on.

page.html beside this file has what all pages share: style sheet, head line, what to do next, key
figures, the script that draws the charts, and links to the pages of other commands that are near. A
page extends it by its own template, from the tables and lists of pieces.html. plotly.js is written
into the page, compressed (2 MB instead of 4.8; the browser unpacks it at once), and the page's
content policy forbids it to load anything. Charts and text take their colours from the same style
sheet variables, so a page follows the reader's light or dark setting.

plotly is imported only when a page is written.
"""

import base64
import gzip
import html
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

_MARK = "paceline"
_TITLE = re.compile(r"<title>(.*) · Paceline</title>")
_HEAD = 2000
"""Characters that the head of a page with its title takes at most."""
_MOST_NEAR = 12

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#b8a800")
"""Okabe and Ito's, which stay apart for every kind of colour vision, in light and dark."""

Card = tuple[str, str, str]
"""Label, figure and note of a key figure."""

Chart = dict[str, Any]
"""A plotly figure, or a part of one, as plain data."""


def chart_layout(x: Chart, y: Chart, **changes: Any) -> Chart:
    """The layout of a chart in the look of the pages.

    Args:
        x: of the horizontal axis, over what all axes have.
        y: of the vertical one.
        changes: what else differs from a chart whose legend lies above it and is not shown.
    """
    axis = {"gridcolor": "var(--grid)", "zeroline": False, "automargin": True}
    return {
        "autosize": True,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "font": {"family": "var(--font)", "size": 12.5, "color": "var(--muted)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "var(--raised)", "bordercolor": "var(--rule)"},
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {**axis, **x},
        "yaxis": {**axis, **y},
        **changes,
    }


def where_equal(low: float, high: float) -> Chart:
    """The line of a chart on which what is across equals what is up."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high],
        "y": [low, high],
        "line": {"color": "var(--muted)", "width": 1, "dash": "dash"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def time_unit(seconds: float) -> tuple[float, str]:
    """How many of its unit a second has, and the unit that times of such a length are drawn in."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def render_page(
    package: str,
    template: str,
    *,
    name: str,
    subtitle: Sequence[str],
    next_: str,
    lede: str,
    cards: Sequence[Card],
    charts: Mapping[str, Any],
    at: Path | None = None,
    **values: Any,
) -> str:
    """A page as text: complete HTML without references to anything outside it.

    Args:
        package: the room whose folder has the template, e.g. "paceline.observe".
        template: a file that extends page.html.
        name: the head line.
        subtitle: short facts below it.
        next_: what to do now, in a sentence; commands in backticks.
        lede: the page in a sentence or two.
        cards: the key figures.
        charts: name -> plotly figure as plain data; the one called x is drawn in #chart-x.
        at: where the page will stand, for links to those near it; None: that isn't known.
        values: what else the template asks for.
    """
    is_report = at is not None and at.name == "report.html"
    return _template(package, template).render(
        name=name,
        title=f"Run {name}" if is_report else name,
        mark=_MARK,
        next=next_,
        near=[] if at is None else pages_near(at),
        subtitle=subtitle,
        lede=lede,
        cards=cards,
        charts=charts,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotlyjs=_packed_plotly() if charts else "",
        **values,
    )


def pages_near(at: Path) -> list[tuple[str, str]]:
    """Pages that commands left near a place, the newest first: title and relative address.

    Runs, plans and tunings stand in folders of their own, which stand beside each other; a tuning
    keeps runs of its own in heats/.
    """
    here = at.parent.resolve()
    folders = [here, here.parent, here.parent.parent]
    patterns = ["*.html", "*/report.html", "*/plan.html", "*/tune.html", "heats/*/report.html"]
    patterns += [f"{place}/*/*.html" for place in ("runs", "plans", "tunes")]
    found = {file for folder in folders for pattern in patterns for file in folder.glob(pattern)}
    titles = {file: title for file in found if (title := _title(file)) is not None}
    titles.pop(here / at.name, None)
    newest = sorted(titles, key=lambda file: -file.stat().st_mtime)[:_MOST_NEAR]
    return [(titles[file], quote(os.path.relpath(file, here))) for file in newest]


def _title(file: Path) -> str | None:
    """Of a page of ours; None of any other file."""
    try:
        with file.open(errors="replace") as page:
            head = page.read(_HEAD)
    except OSError:
        return None
    found = _TITLE.search(head)
    return html.unescape(found[1]) if found and f'content="{_MARK}"' in head else None


@cache
def _packed_plotly() -> str:
    """plotly.js, gzipped, as base64."""
    # Here, because only pages need it and everything else starts faster without.
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _template(package: str, template: str) -> jinja2.Template:
    rooms = dict.fromkeys((package, "paceline.observe"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(room, ".") for room in rooms]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A number that is not finite is not JSON; it must not reach the page.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.get_template(template)
