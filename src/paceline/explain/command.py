"""The command `paceline explain`: read, explain, print."""

import json
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from paceline.explain.explain import Explanation, explain_subject
from paceline.explain.show import show
from paceline.explain.subject import Subject
from paceline.observe.run import write_atomic


def explain_command(
    path: Path,
    *,
    top: int,
    all_findings: bool,
    as_json: bool,
    against: Path | None = None,
    html: Path | None = None,
) -> None:
    """Explain a Run, a trace or a folder of traces, on the terminal.

    Args:
        path: what to explain.
        top: findings to print.
        all_findings: those that gain less than 1 %, too.
        as_json: make the last line of stdout one JSON object.
        against: another one, to subtract from.
        html: write a page too: of the comparison where there is another one.

    Raises:
        InputError: nothing there can be explained.
    """
    console = Console()
    with console.status(f"reading {path}") if console.is_terminal else nullcontext():
        subject = Subject.of(path)
        one = explain_subject(subject)
        beside = None if against is None else Subject.of(against)
        other = None if beside is None else explain_subject(beside)
    show(one, console, top, all_findings=all_findings)
    if other is not None:
        from paceline.explain.difference import show_difference

        show_difference(one, other, console)
    if html is not None:
        write_atomic(html, _page(subject, one, beside, other, html))
        console.print(f"{html}: the same as a page", markup=False)
    if as_json:
        print(json.dumps(one.to_json()))


def _page(
    subject: Subject, one: Explanation, beside: Subject | None, other: Explanation | None, at: Path
) -> str:
    """The templates and plotly are needed for this alone."""
    if beside is None or other is None:
        from paceline.explain import page

        return page.render(subject, one, at)
    from paceline.explain import comparison

    return comparison.render(subject, one, beside, other, at)
