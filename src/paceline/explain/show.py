"""Show: an Explanation on a terminal. It works nothing out."""

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.explain.explain import Explanation
from paceline.explain.finding import Finding
from paceline.explain.rules import SHOWN
from paceline.explain.waterfall import Waterfall
from paceline.observe.summary import bytes_text, colour, step_time_text

_BAR = 28
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show(one: Explanation, console: Console, top: int, *, all_findings: bool) -> None:
    """Print an Explanation.

    Args:
        one: what to print.
        console: where to.
        top: findings to print.
        all_findings: those with little gain, too.
    """
    console.print(Text(one.headline, style="bold"))
    console.print()
    if one.waterfall is not None:
        console.print(_waterfall_table(one.waterfall))
    if one.flows:
        console.print()
        console.print(_flows_table(one))
    for left in one.unexplained:
        console.print()
        console.print(Text(left.sentence, style="yellow"))
    if one.waterfall is not None:
        console.print()
        console.print(_findings(one, top, all_findings=all_findings))
    for note in one.notes:
        console.print(Text(note, style="dim"))
    if one.next_command:
        console.print(Text.assemble("\nnext: ", (one.next_command, "bold cyan")), soft_wrap=True)


def _waterfall_table(one: Waterfall) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("a step")
    table.add_column("measured", justify="right")
    table.add_column("share", justify="right")
    table.add_column("predicted", justify="right")
    table.add_column("")
    if one.ideal_s is not None:
        share = one.ideal_s / one.step_s
        table.add_row("at the peak", step_time_text(one.ideal_s), f"{share:.1%}", "", "")
    before_s = 0.0
    for row in one.rows:
        share = row.measured_s / one.step_s
        table.add_row(
            row.term,
            step_time_text(row.measured_s),
            f"{share:.1%}",
            "" if row.predicted_s is None else step_time_text(row.predicted_s),
            _bar(before_s / one.step_s, share, colour(row.term)),
        )
        before_s += row.measured_s
    predicted = "" if one.predicted_s is None else step_time_text(one.predicted_s)
    interval = ""
    if one.interval_s is not None:
        interval = " to ".join(step_time_text(each) for each in one.interval_s)
    table.add_row("[bold]the step", step_time_text(one.step_s), "100%", predicted, interval)
    return table


def _bar(begin: float, share: float, style: str) -> Text:
    """A stretch of the step as it lies within it, by eighths of a character."""
    first, last = round(begin * _BAR * 8), round((begin + share) * _BAR * 8)
    last = max(last, first + 1)
    lead, rest = divmod(first, 8)
    eighths = last - first
    if rest:  # A block can't begin within a character: it begins at the next one.
        lead += 1
        eighths = max(1, eighths - (8 - rest))
    full, part = divmod(eighths, 8)
    return Text(" " * lead + _EIGHTHS[8] * full + _EIGHTHS[part].strip(), style=style)


def _flows_table(one: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("communication", no_wrap=True)
    is_known = any(flow.expected_s is not None for flow in one.flows)
    expected = ["expected"] if is_known else []
    for name in ("ranks", "a step", "bytes", "on the link", *expected, "exposed", "bus rate"):
        table.add_column(name, justify="right")
    for flow in one.flows:
        rate = flow.bus_bytes_per_s
        table.add_row(
            f"{flow.axis or '?'} {flow.op}",
            str(flow.num_ranks or "?"),
            f"{flow.num_calls:.0f}",
            bytes_text(flow.bytes) if flow.bytes else "?",
            step_time_text(flow.link_s),
            *([_time_or_dash(flow.expected_s)] if is_known else []),
            step_time_text(flow.exposed_s),
            "-" if rate is None else f"{bytes_text(rate)}/s",
        )
    return table


def _time_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else step_time_text(seconds)


def _findings(one: Explanation, top: int, *, all_findings: bool) -> RenderableType:
    worth = [each for each in one.findings if all_findings or each.gain >= SHOWN]
    if not worth:
        style = "default" if one.unexplained else "green"
        return Text("No rule found a cause that costs more than 1 % of the step.", style=style)
    left = len(one.findings) - len(worth[:top])
    more = [Text(f"{left} more with --all --top {len(one.findings)}", style="dim")] if left else []
    return Group(*(_finding(each) for each in worth[:top]), *more)


def _finding(each: Finding) -> RenderableType:
    """Gain, name and title; then evidence, what to do and the settings."""
    style = "red" if each.gain >= 0.1 else "yellow" if each.gain >= 0.03 else "default"
    head = Text.assemble(
        (f"{each.gain:6.1%}  ", f"bold {style}"),
        (f"{each.name}", "bold"),
        (f"  {step_time_text(each.gain_s)} of a step, confidence {each.confidence}", "dim"),
    )
    told: list[Text] = [
        Text(each.title),
        *(Text(one.sentence, style="dim") for one in each.evidence),
    ]
    if each.advice:
        told.append(Text(each.advice))
    if each.changes:
        texts = " ".join(f"--set '{text}'" for text in each.changes)
        told.append(Text(texts, style="cyan"))
    return Group(head, Padding(Group(*told), (0, 0, 1, 8)))
