"""Show: the planner's answers on a terminal, from 80 columns on.

Tables and bars of `plan.answer.answer.Answer` and `plan.search.budget.Purchase`; nothing is worked
out here. A bar stands a little further to the right on each line, so that the lines together are
one bar, which can be read without colours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.observe.summary import (
    TERM_COLOURS,
    bytes_text,
    duration_text,
    rate_text,
    step_time_text,
)
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.describe import (
    MEMORY_COLOURS,
    all_settings,
    chosen_text,
    counted,
    detail_text,
    differing,
    goodput_text,
    known,
    outlook_rows,
    sentences,
    settings_text,
    slower_text,
    spare_text,
    step_title,
)
from paceline.plan.prediction import MEMORY_TERMS, Prediction
from paceline.plan.search.budget import Purchase, TrainingRun

# From here on a table has a column for what else a layout says; else it goes below the axes.
_WIDE = 120
_MOST_BAR = 60
# What stands on a line before its bar.
_BEFORE_BAR = 40
# Shares below this are added up as "others".
_LEAST_SHARE = 0.005
_FRONT = 5
_SLOWEST_OF_FRONT = 1.5


def show(found: Answer, console: Console, num: int) -> None:
    """Print the answer with the `num` best layouts."""
    for part in _parts(found, console.width, num):
        console.print(part)


def _parts(found: Answer, width: int, num: int) -> Iterator[RenderableType]:
    yield Text(counted(found), style="dim")
    best = found.best
    if best is None:
        if found.shortage is not None:
            yield _title(f"nearest to fitting: {settings_text(found.shortage.nearest.layout)}")
            yield memory_bars(found.shortage.nearest, found.limit_bytes, width)
        return
    if found.counts.points > 1:
        yield ""
        yield ranking(found.ranked[:num], best, found.limit_bytes, width, found.unit)
    yield _title(f"{chosen_text(found)}: {settings_text(best.layout)}")
    yield Text(", ".join(f"{name} = {value}" for name, value in all_settings(best.layout)), "dim")
    yield time_bars(best, found.unit, width)
    yield memory_bars(best, found.limit_bytes, width)
    leaner = [one for one in found.front[1:] if one.step_s < _SLOWEST_OF_FRONT * best.step_s]
    if leaner:
        yield _title("the fastest with less memory")
        yield ranking(leaner[:_FRONT], best, None, width, found.unit)
    yield _title("what decides")
    yield bullets(sentences(found))
    if found.outlook is not None:
        yield _title("the whole run")
        yield pairs(outlook_rows(found.outlook, found.unit))
    yield Text(f"\n{known(best)}", style="dim")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(*names: str) -> Table:
    """A table whose figures never break; the first column takes what is left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(names[0], overflow="fold")
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def ranking(
    ranked: Sequence[Prediction],
    best: Prediction,
    limit_bytes: float | None,
    width: int,
    unit: str = "tokens",
) -> Table:
    """Layouts, the fastest first, each with what it says besides its axes."""
    wide = width >= _WIDE
    names = ("layout", "step", "slower", f"{unit}/s", "MFU", "memory")
    table = _table(*names)
    if wide:
        table.add_column("with", overflow="fold")
    told = differing(one.layout for one in ranked)
    for one in ranked:
        detail = Text(detail_text(one.layout, told), style="dim")
        name = Text(one.layout.summary)
        table.add_row(
            name if wide else Group(name, Padding(detail, (0, 0, 0, 2))),
            step_time_text(one.step_s),
            slower_text(one, best),
            rate_text(one.tokens_per_s),
            "unknown" if one.mfu is None else f"{one.mfu:.1%}",
            bytes_text(one.peak_memory_bytes),
            *([detail] if wide else []),
        )
    if limit_bytes is not None:
        table.caption = f"of {bytes_text(limit_bytes)} that a layout may use on a device"
        table.caption_justify = "left"
    return table


def time_bars(one: Prediction, unit: str, width: int) -> RenderableType:
    """The step's seconds by term."""
    title = f"step {step_title(one)}, {rate_text(one.tokens_per_s)} {unit}/s"
    return _bars(title, one.time_s, TERM_COLOURS, step_time_text, width)


def memory_bars(one: Prediction, limit_bytes: float | None, width: int) -> RenderableType:
    """The heaviest device's bytes by term."""
    heaviest = one.heaviest
    place = f" of pipeline rank {heaviest.rank}" if len(one.memory) > 1 else ""
    title = f"memory {bytes_text(heaviest.total_bytes)}{place}, {spare_text(one, limit_bytes)}"
    terms = {term: heaviest.terms[term] for term in MEMORY_TERMS if term in heaviest.terms}
    return _bars(title, terms, MEMORY_COLOURS, bytes_text, width)


def _bars(
    title: str,
    terms: Mapping[str, float],
    colours: Mapping[str, str],
    text: Callable[[float], str],
    width: int,
) -> RenderableType:
    whole = sum(terms.values()) or 1.0
    shown = {term: value for term, value in terms.items() if value / whole >= _LEAST_SHARE}
    others = whole - sum(shown.values())
    rows = [*shown.items()] + ([("others", others)] if others / whole >= 5e-4 else [])
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    end, bar_width = 0.0, max(10, min(_MOST_BAR, width - _BEFORE_BAR))
    for term, value in rows:
        start, end = end, end + value / whole
        bar = Text(_bar(start, end, bar_width), style=colours.get(term, colours["unattributed"]))
        table.add_row(term, text(value), f"{value / whole:.1%}", bar)
    return Group(_title(title), table)


def _bar(start: float, end: float, width: int) -> str:
    """The part of a bar from start to end (shares of the whole), at its place."""
    first, last = round(start * width), round(end * width)
    first = min(first, width - 1)
    return " " * first + "█" * max(1, last - first)


def bullets(texts: Sequence[str]) -> Table:
    """Sentences as a list, whose lines hang."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for text in texts:
        table.add_row("-", text)
    return table


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and what they are."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


# ---- budgets -------------------------------------------------------------------------------------


def show_purchase(bought: Purchase, console: Console) -> None:
    """Print the runs that were looked at, and what money and time buy."""
    if bought.runs:
        console.print(purchase_table(bought))
    for title, run in (
        ("the fastest for the money", bought.fastest),
        ("the cheapest in time", bought.cheapest),
    ):
        if run is not None:
            console.print(_title(f"{title}: {_offer(run)}"))
            console.print(Padding(settings_text(run.best.layout), (0, 0, 0, 2)))
    console.print()


def purchase_table(bought: Purchase) -> Table:
    """Runs, the fastest first, failures included."""
    table = _table("devices", "time", "USD", "step", "MFU", "goodput")
    table.add_column("")
    for run in bought.runs:
        table.add_row(
            _offer(run),
            duration_text(run.days * 86400),
            f"{run.usd:,.0f}",
            step_time_text(run.best.step_s),
            "unknown" if run.best.mfu is None else f"{run.best.mfu:.1%}",
            goodput_text(run.goodput),
            _marks(bought, run),
        )
    return table


def _offer(run: TrainingRun) -> str:
    device = run.cluster.known_device
    return f"{run.cluster.num_nodes} x {run.cluster.devices_per_node} {device.name}"


def _marks(bought: Purchase, run: TrainingRun) -> str:
    marks = ["fastest"] if run is bought.fastest else []
    return " and ".join(marks + (["cheapest"] if run is bought.cheapest else []))
