"""Show: the planner's answers on a terminal, from 80 columns on. Nothing is worked out here.

A bar stands a little further to the right on each line, so that the lines together are one bar,
which can be read without colours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from paceline.observe.terms import TERM_COLOURS
from paceline.plan.answer.answer import Answer
from paceline.plan.answer.describe import (
    GOODPUT_HEADS,
    MEMORY_COLOURS,
    all_settings,
    chosen_text,
    counted,
    detail_text,
    differing,
    figure_cells,
    goodput_cells,
    goodput_sentences,
    goodput_text,
    hardware_rows,
    known,
    outlook_rows,
    sentences,
    settings_text,
    spare_text,
    step_title,
)
from paceline.plan.prediction import MEMORY_TERMS, Prediction
from paceline.plan.search.budget import Purchase, TrainingRun
from paceline.render.figures import amount_text, bytes_text, duration_text, share_text, time_text
from paceline.render.table import Bullets, Pairs, Table, heading, stretch

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
            yield heading(f"nearest to fitting: {settings_text(found.shortage.nearest.layout)}")
            yield memory_bars(found.shortage.nearest, found.limit_bytes, width)
        return
    if found.counts.points > 1:
        yield ""
        yield ranking(found.ranked[:num], best, found.limit_bytes, width, found.unit)
    yield heading(f"{chosen_text(found)}: {settings_text(best.layout)}")
    yield Text(", ".join(f"{name} = {value}" for name, value in all_settings(best.layout)), "dim")
    yield time_bars(best, found.unit, width)
    yield memory_bars(best, found.limit_bytes, width)
    leaner = [one for one in found.front[1:] if one.step_s < _SLOWEST_OF_FRONT * best.step_s]
    if leaner:
        yield heading("the fastest with less memory")
        yield ranking(leaner[:_FRONT], best, None, width, found.unit)
    yield heading("what decides")
    yield Bullets(sentences(found))
    if found.outlook is not None:
        yield heading("the whole run")
        yield Pairs(outlook_rows(found.outlook, found.unit))
    if found.outlook is not None and found.goodput is not None:
        yield heading("what failures leave of it")
        yield Table(GOODPUT_HEADS, goodput_cells(found.goodput, found.outlook.train_s), words=(0,))
        yield Bullets(goodput_sentences(found.goodput))
    if assumed := [row for row in hardware_rows(best) if row[1] == "assumed"]:
        yield heading("assumed of devices and links")
        yield Bullets([f"{figure}: {source}" for figure, _, source in assumed])
    yield Text(f"\n{known(best)}", style="dim")


def ranking(
    ranked: Sequence[Prediction],
    best: Prediction,
    limit_bytes: float | None,
    width: int,
    unit: str = "tokens",
) -> Table:
    """Layouts, the fastest first, each with what it says besides its axes."""
    told = differing(one.layout for one in ranked)
    heads = ["layout", "step", "slower", f"{unit}/s", "MFU", "memory"]
    rows: list[list[RenderableType]] = []
    for one in ranked:
        name, detail = Text(one.layout.summary), Text(detail_text(one.layout, told), style="dim")
        figures = figure_cells(one, best)
        if width >= _WIDE:
            rows.append([name, *figures, detail])
        else:
            rows.append([Group(name, Padding(detail, (0, 0, 0, 2))), *figures])
    if width >= _WIDE:
        heads.append("with")
    limit = f"of {bytes_text(limit_bytes)} that a layout may use on a device"
    return Table(heads, rows, words=(0, 6), note="" if limit_bytes is None else limit)


def time_bars(one: Prediction, unit: str, width: int) -> RenderableType:
    """The step's seconds by term."""
    title = f"step {step_title(one)}, {amount_text(one.tokens_per_s)} {unit}/s"
    return _bars(title, one.time_s, TERM_COLOURS, time_text, width)


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
    if others / whole >= 5e-4:
        shown["others"] = others
    table = Grid.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    start, bar_width = 0.0, max(10, min(_MOST_BAR, width - _BEFORE_BAR))
    for term, value in shown.items():
        share, colour = value / whole, colours.get(term, colours["unattributed"])
        bar = stretch(start, share, colour, bar_width)
        table.add_row(term, text(value), f"{share:.1%}", bar)
        start += share
    return Group(heading(title), table)


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
            console.print(heading(f"{title}: {_offer(run)}"))
            console.print(Padding(settings_text(run.best.layout), (0, 0, 0, 2)))
    console.print()


def purchase_table(bought: Purchase) -> Table:
    """Runs, the fastest first, failures included."""
    rows = []
    for run in bought.runs:
        marks = {"fastest": bought.fastest, "cheapest": bought.cheapest}
        rows.append(
            (
                _offer(run),
                duration_text(run.days * 86400),
                f"{run.usd:,.0f}",
                time_text(run.best.step_s),
                share_text(run.best.mfu),
                goodput_text(run.goodput),
                " and ".join(name for name, marked in marks.items() if marked is run),
            )
        )
    heads = ("devices", "time", "USD", "step", "MFU", "goodput", "")
    return Table(heads, rows, words=(0, 6))


def _offer(run: TrainingRun) -> str:
    device = run.cluster.device
    return f"{run.cluster.num_nodes} x {run.cluster.devices_per_node} {device.name}"
