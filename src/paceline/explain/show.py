"""Show: an Explanation on a terminal. It works nothing out."""

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from paceline.explain.explain import Explanation
from paceline.explain.finding import Finding
from paceline.explain.rules import SHOWN
from paceline.explain.waterfall import Waterfall
from paceline.observe.terms import colour
from paceline.render.figures import bytes_text, share_text, time_text
from paceline.render.table import Table, stretch

_BAR = 28


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
    rows: list[tuple[RenderableType, ...]] = []
    if one.ideal_s is not None:
        mfu = share_text(one.ideal_s / one.step_s)
        rows.append(("at the peak", time_text(one.ideal_s), mfu, "", ""))
    before_s = 0.0
    for row in one.rows:
        share = row.measured_s / one.step_s
        rows.append(
            (
                row.term,
                time_text(row.measured_s),
                share_text(share),
                "" if row.predicted_s is None else time_text(row.predicted_s),
                stretch(before_s / one.step_s, share, colour(row.term), _BAR),
            )
        )
        before_s += row.measured_s
    predicted = "" if one.predicted_s is None else time_text(one.predicted_s)
    interval = " to ".join(map(time_text, one.interval_s or ()))
    rows.append((Text("the step", "bold"), time_text(one.step_s), "100%", predicted, interval))
    return Table(("a step", "measured", "share", "predicted", ""), rows, words=(0, 4))


def _flows_table(one: Explanation) -> Table:
    is_known = any(flow.expected_s is not None for flow in one.flows)
    expected = ["expected"] if is_known else []
    heads = ("communication", "ranks", "a step", "bytes", "on the link")
    rows = [
        (
            f"{flow.axis or '?'} {flow.op}",
            str(flow.num_ranks or "?"),
            f"{flow.num_calls:.0f}",
            bytes_text(flow.bytes) if flow.bytes else "?",
            time_text(flow.link_s),
            *(["-" if flow.expected_s is None else time_text(flow.expected_s)] if is_known else []),
            time_text(flow.exposed_s),
            "-" if flow.bus_bytes_per_s is None else f"{bytes_text(flow.bus_bytes_per_s)}/s",
        )
        for flow in one.flows
    ]
    return Table((*heads, *expected, "exposed", "bus rate"), rows)


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
        (f"  {time_text(each.gain_s)} of a step, confidence {each.confidence}", "dim"),
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
