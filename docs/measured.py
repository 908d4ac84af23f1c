"""What the generators of docs/techniques share: measured files, tables and plots of a page."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TECHNIQUES = Path(__file__).parent / "techniques"
MEASURED = Path(__file__).parent.parent / "benchmarks/results/intel-r-xeon-r-processor-2-cores"


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """As Markdown; all but the first column are numbers."""
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rule, *lines))


def filled(page: str, tables: Mapping[str, str]) -> str:
    """A page with what stands between the marks of each table renewed."""
    for name, made in tables.items():
        marks = re.compile(rf"(<!-- {name}, made by \S+ -->\n).*?(<!-- end -->)", re.DOTALL)
        page, found = marks.subn(lambda at, made=made: f"{at[1]}{made}\n{at[2]}", page)
        assert found == 1, f"the page has {found} places for {name}"
    return page


def axes_of(title: str, x: str, y: str) -> tuple[Any, Any]:
    """Figure and axes of a plot that is the same file each time it is drawn (extra `docs`)."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "paceline"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(True, which="both", alpha=0.2)
    return figure, axes


def save(figure: Any, name: str) -> None:
    """As an SVG beside the pages."""
    figure.axes[0].legend(fontsize="small")
    figure.savefig(TECHNIQUES / f"{name}.svg", metadata={"Date": None})
