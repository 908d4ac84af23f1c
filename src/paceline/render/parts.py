"""Parts: what a page is put together from, as records that say what there is to show.

Each is drawn by the macro of its name in parts.html. A part that has nothing to show is false, and
a page leaves it out: so a page lists all that it may have. Tables are in `render.table`, charts in
`render.charts`.

Sentences may have `code` in backticks. Nothing here imports jinja2 before a page is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


class Part:
    """Something to see on a page."""

    parts: "Sequence[Part]" = ()
    """What it has inside it."""

    def __bool__(self) -> bool:
        return any(self.parts) or bool(getattr(self, "rows", ()))

    def __html__(self) -> str:
        return str(getattr(_macros(), type(self).__name__.lower())(self))


class Sure(Part):
    """Something that is there whenever it is named."""

    def __bool__(self) -> bool:
        return True


@cache
def templates() -> Any:
    """The environment of the templates of this folder."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("paceline.render", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A number that is not finite is not JSON; it must not reach the page.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


@cache
def _macros() -> Any:
    return templates().get_template("parts.html").module


class Section(Part):
    """A head line, a sentence or two below it, and parts."""

    def __init__(self, title: str, *parts: Part, note: str = "") -> None:
        self.title, self.parts, self.note = title, parts, note


class Subsection(Section):
    """A section of a section."""


class Pair(Part):
    """Parts that stand beside each other, two in a row."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts


class Details(Part):
    """A part that a click shows."""

    def __init__(self, title: str, part: Part) -> None:
        self.title, self.parts = title, (part,)


@dataclass(frozen=True)
class Note(Sure):
    """A sentence or two."""

    text: str
    warns: bool = False


@dataclass(frozen=True)
class Code(Sure):
    """Text as it stands in a file or on a command line."""

    text: str


@dataclass(frozen=True)
class Swatch(Sure):
    """A name with its colour: a cell of a table, or an entry of a legend."""

    name: str
    colour: str


@dataclass(frozen=True)
class Legend(Part):
    """The colours of a picture."""

    rows: Sequence[Swatch]


@dataclass(frozen=True)
class Whole(Part):
    """A whole as one thin bar of shares, which sum to at most 1."""

    rows: Sequence[tuple[Swatch, float]]


@dataclass(frozen=True)
class Wholes(Part):
    """Wholes below each other, each with a name before it and a figure behind."""

    rows: Sequence[tuple[str, Whole, str]]


@dataclass(frozen=True)
class Step:
    """A row of `Steps`. Positions and lengths are shares of the width, 0 to 1."""

    swatch: Swatch
    start: float
    length: float
    figures: Sequence[str]
    """At its right."""
    below: tuple[float, float] | None = None
    """The thin bar: where it begins and how long it is."""
    mood: str = ""
    """How the last figure is coloured: "over" (worse), "under" (better) or not."""


@dataclass(frozen=True)
class Steps(Part):
    """A waterfall: bars below each other, each where the one before it ended, with figures."""

    heads: Sequence[str]
    rows: Sequence[Step]
    total: Sequence[str]
    """Name and figures of the last line."""


@dataclass(frozen=True)
class Strips(Part):
    """Lanes of coloured strips over one axis of time, grouped."""

    rows: Sequence[tuple[str, Sequence[tuple[str, Sequence[tuple[int, int, str, str]]]]]]
    """Name of a group; of each of its lanes the name and (start, width, colour, tip) in cells."""
    cells: int
    """That the whole width has."""
    length: str
    """What the whole width stands for."""


@dataclass(frozen=True)
class Article(Sure):
    """A finding: its title, what it is worth, the evidence, and what to do."""

    title: str
    aside: str
    tag: str
    sentences: Sequence[str]
    advice: str
    code: str
