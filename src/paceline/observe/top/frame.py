"""Frame: one picture of a run, fitted to a terminal; or one line for each of several runs."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from paceline.observe import summary
from paceline.observe.rank_spread import spread_of
from paceline.observe.terms import colour
from paceline.observe.top.gpus import GpuStatus
from paceline.observe.top.state import RunState
from paceline.render.figures import (
    amount_text,
    bytes_text,
    duration_text,
    loss_text,
    mfu_text,
    plural,
    share_text,
    time_text,
)
from paceline.render.table import Table, share_bar

_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-=+*#@"
# Terms and ranks stand beside each other where there is room for both.
_WIDE = 110
_SPARK = 32
_BAR = 20
_HEAD_ROWS = 9
# What memory may take of its limit, and a lag of the step, before it is marked.
_FULL, _LATE = 0.92, 0.1
_STATES = {"running": "green", "complete": "cyan", "starting": "yellow", "stopping": "yellow"}


def frame(
    state: RunState, width: int, height: int, gpus: Sequence[GpuStatus] = (), *, plain: bool = False
) -> RenderableType:
    """A run as a picture of at most `height` rows.

    Args:
        state: of the run.
        width: columns of the terminal.
        height: rows of the terminal.
        gpus: of this machine.
        plain: with characters of ASCII only.
    """
    room = height - _HEAD_ROWS - 1 - len(_damage(state)) - len(_interruptions(state))
    if width >= _WIDE:
        side = Grid.grid(expand=True, padding=(0, 3))
        side.add_column(ratio=1)
        side.add_column(ratio=1)
        side.add_row(_terms(state, room), _ranks(state, gpus, room))
        return Group(_head(state, width), _figures(state, plain), *_damage(state), Text(), side)
    num_terms = min(len(state.terms.terms_s) + 1, max(2, room // 2))
    return Group(
        _head(state, width),
        _figures(state, plain),
        *_damage(state),
        Text(),
        _terms(state, num_terms),
        _ranks(state, gpus, room - num_terms),
    )


def overview(states: Sequence[RunState]) -> Table:
    """Several runs, one line each; a column that no run fills is left out."""
    rows = [_line(state) for state in states]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    words = [
        at
        for at, name in enumerate(names)
        if name in ("run", "state", "interruptions", "late rank")
    ]
    return Table(names, [[row[name] for name in names] for row in rows], words, one_line=True)


def sparkline(values: Sequence[float], width: int = _SPARK, *, plain: bool = False) -> str:
    """Values as a row of bars between their least and their largest, oldest first.

    Where there are more values than columns a column is the mean of its share of them.
    """
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    levels = _PLAIN_LEVELS if plain else _LEVELS
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in means)


def _head(state: RunState, width: int) -> RenderableType:
    grid = Grid.grid(expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    name = Text.assemble((state.name, "bold"), "  ", (state.word, _STATES.get(state.word, "red")))
    where = f"{state.num_ranks} x {state.device}"
    grid.add_row(name, Text(where, "bright_black", overflow="ellipsis"))
    bar = Grid.grid()
    bar.add_row(ProgressBar(total=max(1, state.num_steps), completed=state.step, width=width))
    return Group(grid, bar)


def _figures(state: RunState, plain: bool) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    for style in ("bright_black", "", "bright_black"):
        grid.add_column(style=style, no_wrap=True)
    rate = f"{state.unit}_per_s"
    for name, text, column in (
        ("step", f"{state.step:,} of {state.num_steps:,}{_left(state)}", None),
        ("loss", _loss(state), "loss"),
        ("throughput", _rate(state), rate),
        ("step time", time_text(state.typical("step_time_s")), "step_time_s"),
        ("memory", *_memory(state)),
        ("checkpoint", _checkpoint(state), None),
    ):
        values = [v for v in summary.column(state.lines, column) if v is not None] if column else []
        grid.add_row(name, text, Text(sparkline(values, plain=plain), "cyan"))
    return Group(grid, *_interruptions(state))


def _interruptions(state: RunState) -> list[Text]:
    """A line each: who trains, and how often and for what last it was interrupted."""
    found = state.generations
    if found is None:
        return []
    rows = [
        ("generation", f"{found.newest.number}: {found.newest.who}"),
        ("lost", found.summary),
    ]
    if (last := found.last_loss) is not None:
        ago = duration_text(max(0.0, state.now_s - last.time_s))
        rows.append(("last lost", f"{ago} ago, {last.sentence}"))
    lines = [Text.assemble((f"{name:10}  ", "bright_black"), text) for name, text in rows]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _damage(state: RunState) -> list[Text]:
    steps = f"{state.num_damaged} lines of metrics.jsonl hold no step and are left out"
    told = [steps] if state.num_damaged else []
    told += [state.damage] if state.damage else []
    return [Text(text, "yellow", no_wrap=True, overflow="ellipsis") for text in told]


def _left(state: RunState) -> str:
    if state.word == "complete" or state.remaining_s is None:
        return ""
    return f", {duration_text(state.remaining_s)} left"


def _loss(state: RunState) -> str:
    held_out, skipped = state.last("eval_loss"), state.last("skipped")
    parts = [loss_text(state.last("loss"))]
    if held_out is not None:
        parts.append(f"held out {loss_text(held_out)}")
    if skipped:
        parts.append(f"{skipped:.0f} steps skipped")
    return ", ".join(parts)


def _rate(state: RunState) -> str:
    rate = amount_text(state.typical(f"{state.unit}_per_s"))
    return f"{rate} {state.unit}/s, {mfu_text(state.typical('mfu'))}"


def _memory(state: RunState) -> tuple[Text, str]:
    spread = spread_of(state.figure("memory_bytes"))
    most = state.last("memory_bytes") if spread is None else spread.most
    whose = "" if spread is None else f" on rank {spread.at}"
    text = f"{bytes_text(most)}{whose}"
    limit = state.memory_limit_bytes
    if most is None or limit is None:
        return Text(text), "memory_bytes"
    style = "red" if most > _FULL * limit else ""
    return Text(f"{text}, {most / limit:.0%} of {bytes_text(limit)}", style), "memory_bytes"


def _checkpoint(state: RunState) -> str:
    if state.checkpoint is None:
        return "none yet"
    step, written_s = state.checkpoint
    return f"step {step:,}, {duration_text(max(0.0, state.now_s - written_s))} ago"


def _terms(state: RunState, rows: int) -> Table:
    """Where the time of a step goes: the largest terms that fit."""
    times = state.terms
    kind = "profiled step" if times.profiled else "step"
    largest = sorted(times.rows(), key=lambda row: -row[1])[: rows - 1]
    return Table(
        (f"term, mean of {plural(times.num_steps, kind)}", "ms", "share", ""),
        [
            (term, f"{ms:.1f}", share_text(share), share_bar(share, colour(term), _BAR))
            for term, ms, share in largest
        ],
        words=(0, 3),
        one_line=True,
    )


def _ranks(state: RunState, gpus: Sequence[GpuStatus], num_rows: int) -> RenderableType:
    """Each rank's busy time, lag, wait for a core and memory: of those that don't fit the latest
    are shown."""
    busy, memory = state.figure("busy_s"), state.figure("memory_bytes")
    waits = state.figure("core_wait_s")
    heads = ("rank", "busy ms", "lag ms", "no core ms", "memory")
    spread = spread_of(busy)
    if spread is None:
        return _gpus(gpus, num_rows)
    rows: list[Sequence[str | Text]] = []
    if isinstance(busy, list) and isinstance(memory, list):
        shown = sorted(range(len(busy)), key=lambda rank: -busy[rank])[: max(1, num_rows - 1)]
        for rank in sorted(shown):
            lag_s = max(0.0, busy[rank] - spread.median)
            style = "red" if lag_s > _LATE * (state.step_s or 0) else ""
            wait = f"{waits[rank] * 1e3:.1f}" if isinstance(waits, list) else ""
            figures = (f"{busy[rank] * 1e3:.1f}", f"{lag_s * 1e3:.1f}", wait)
            cells = (str(rank), *figures, bytes_text(memory[rank]))
            rows.append([Text(cell, style) for cell in cells])
    else:
        lag_ms = (spread.most - spread.median) * 1e3
        rows.append((f"{spread.at} (latest)", f"{spread.most * 1e3:.1f}", f"{lag_ms:.1f}"))
        rows.append(("median", f"{spread.median * 1e3:.1f}"))
    table = Table(heads, rows, words=())
    return Group(table, _gpus(gpus, num_rows - len(rows) - 1)) if gpus else table


def _gpus(gpus: Sequence[GpuStatus], num_rows: int) -> RenderableType:
    rows = []
    for gpu in gpus[: max(0, num_rows - 1)]:
        rest = ["?" if n is None else f"{n:.0f}" for n in (gpu.celsius, gpu.watts, gpu.megahertz)]
        busy = "?" if gpu.busy is None else f"{gpu.busy:.0%}"
        rows.append((str(gpu.index), busy, bytes_text(gpu.memory_bytes), *rest))
    return Table(("GPU here", "busy", "memory", "°C", "W", "MHz"), rows, words=()) or Text()


def _line(state: RunState) -> dict[str, str | Text]:
    late, mfu, remaining_s = state.late, state.typical("mfu"), state.remaining_s
    return {
        "run": Text(state.name, "bold"),
        "state": Text(state.word, _STATES.get(state.word, "red")),
        "step": f"{state.step:,}/{state.num_steps:,}",
        "loss": loss_text(state.last("loss")),
        "rate": f"{amount_text(state.typical(f'{state.unit}_per_s'))}/s",
        "MFU": "" if mfu is None else f"{mfu:.1%}",
        "a step": time_text(state.typical("step_time_s")),
        "left": "" if remaining_s is None else duration_text(remaining_s),
        "interruptions": "" if state.generations is None else state.generations.summary,
        "late rank": "" if late is None else f"{late[0]}: {late[1] * 1e3:.0f} ms",
    }
