"""Page: one self-contained HTML file, to look at and to pass on.

A room says what its page shows as data: a `Page` with its parts. How that looks is here and nowhere
else: page.html has the frame, parts.html a macro for each part, style.css and charts.js what they
look like and how charts are drawn. plotly.js is written into the page, compressed (2 MB instead of
4.8; the browser unpacks it at once), and the page's content policy forbids it to load anything.
Charts and text take their colours from the same style sheet variables, so a page follows the
reader's light or dark setting.

jinja2 and plotly are imported only when a page is written.
"""

import base64
import gzip
import html
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from paceline.render.charts import Chart
from paceline.render.figures import date_text
from paceline.render.parts import Part, templates

_MARK = "paceline"
_TITLE = re.compile(r"<title>(.*) · Paceline</title>")
_HEAD = 2000
"""Characters that the head of a page with its title takes at most."""
_MOST_NEAR = 12

Card = tuple[str, str, str]
"""Label, figure and note of a key figure."""


@dataclass(frozen=True)
class Page:
    """What a page says, in the order in which it says it."""

    name: str
    """The head line."""
    next: str
    """What to do now, in a sentence; commands in backticks."""
    subtitle: Sequence[str]
    """Short facts."""
    lede: str
    """The page in a sentence or two."""
    cards: Sequence[Card] = ()
    """The key figures."""
    parts: Sequence[Part] = ()
    at: Path | None = None
    """Where it will stand, for links to pages near it; None: that isn't known."""

    @property
    def title(self) -> str:
        """What a browser's tab and links to it say."""
        is_report = self.at is not None and self.at.name == "report.html"
        return f"Run {self.name}" if is_report else self.name

    def html(self) -> str:
        """The whole file, without references to anything outside it."""
        charts = {chart.name: chart.plot for chart in _charts(self.parts)}
        return str(
            templates()
            .get_template("page.html")
            .render(
                page=self,
                mark=_MARK,
                near=[] if self.at is None else pages_near(self.at),
                charts=charts,
                written=date_text(time.time()),
                plotlyjs=_packed_plotly() if charts else "",
            )
        )


def _charts(parts: Iterable[Part]) -> Iterator[Chart]:
    for part in filter(None, parts):
        if isinstance(part, Chart):
            yield part
        yield from _charts(part.parts)


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
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
