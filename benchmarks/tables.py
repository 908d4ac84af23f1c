"""Tables of figures: for a page, for the terminal, and the spread of a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """Median and range of a figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))

    def text(self, form: str) -> str:
        """Each in this form: "94 (48 – 98)"."""
        return f"{self.median:{form}} ({self.low:{form}} – {self.high:{form}})"


def markdown(
    titles: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str] = ()
) -> str:
    """A table for a page; columns with the titles in `left` are text, the others figures."""
    rule = ["---" if title in left else "---:" for title in titles]
    return "".join(f"| {' | '.join(part)} |\n" for part in (titles, rule, *lines))


def terminal_table(
    title: str, titles: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str] = ()
) -> Table:
    """The same for the terminal."""
    table = Table(title=title, title_justify="left")
    for name in titles:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table
