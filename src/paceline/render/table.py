"""Tables and lists that a terminal and a page show alike: one record each, drawn by rich or HTML.

Cells come as text; a figure stands right-aligned, words left.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from paceline.render.parts import Part

Cell = Any
"""Text; on a terminal anything that rich can draw, on a page a Part."""


@dataclass(frozen=True)
class Table(Part):
    """Rows under heads."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: Collection[int] = (0,)
    """Columns that hold words, counted from 0; the others hold figures, which never break."""
    codes: Collection[int] = ()
    """Columns of code, on a page."""
    foot: Sequence[Cell] = ()
    """The last row, where all are added up."""
    title: str = ""
    """Above it on a terminal; on a page the section has it."""
    note: str = ""
    """Below it on a terminal."""
    ruled: bool = False
    """Whether a terminal draws a line below the heads."""
    strong: int | None = None
    """The row that counts most."""
    widths: Sequence[int] = ()
    """Columns of a terminal that the first of its columns take, where several tables align."""
    one_line: bool = False
    """Whether words that have no room are cut rather than folded."""

    def __rich__(self) -> RichTable:
        table = RichTable(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            caption=self.note or None,
            caption_justify="left",
            box=SIMPLE_HEAD if self.ruled else None,
            header_style="bold" if self.ruled else "dim",
            show_header=any(self.heads),
            show_footer=bool(self.foot),
            pad_edge=False,
        )
        for at, head in enumerate(self.heads):
            is_word = at in self.words
            table.add_column(
                head,
                self.foot[at] if self.foot else "",
                justify="left" if is_word else "right",
                overflow="fold" if is_word else "ellipsis",
                # Where there is no room, a bar, whose column has no name, gets shorter first.
                no_wrap=bool(self.one_line and head) or not is_word,
                width=self.widths[at] if at < len(self.widths) else None,
            )
        for at, row in enumerate(self.rows):
            table.add_row(*row, style="bold" if at == self.strong else "")
        return table


@dataclass(frozen=True)
class Pairs(Part):
    """Names, and what they are."""

    rows: Sequence[tuple[Cell, ...]]
    codes: Collection[int] = ()
    """Columns of code, on a page."""
    title: str = ""
    """Above it on a terminal."""

    def __rich__(self) -> RenderableType:
        table = RichTable.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return Group(heading(self.title), table) if self.title else table


@dataclass(frozen=True)
class Bullets(Part):
    """Sentences as a list, whose lines hang."""

    rows: Sequence[str]

    def __rich__(self) -> RichTable:
        table = RichTable.grid(padding=(0, 1, 0, 0))
        for sentence in self.rows:
            table.add_row("-", sentence)
        return table


def heading(text: str) -> Text:
    """A head line on a terminal, with an empty line above it."""
    return Text(f"\n{text}", style="bold")


def share_bar(share: float, colour: str, width: int) -> ProgressBar:
    """A part of a whole, from the left, on a terminal; in ASCII where that has no more."""
    return ProgressBar(1.0, share, width, complete_style=colour, finished_style=colour)


def stretch(start: float, share: float, colour: str, width: int) -> Bar:
    """A part of a whole at its place in it, on a terminal: to be read without colours, too.

    Args:
        start: where it begins, 0 to 1.
        share: how long it is; drawn as an eighth of a character at least.
        colour: of the part.
        width: columns of the whole.
    """
    least = 1 / (8 * width)
    return Bar(1.0, min(start, 1 - least), start + max(share, least), width=width, color=colour)
