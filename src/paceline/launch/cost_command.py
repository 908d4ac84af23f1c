"""The command `paceline cost`: account for runs, print it, and write a page."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.launch.attempts import ask_engines
from paceline.launch.cost import Price, cost_of, cost_of_launches, runs_of
from paceline.launch.cost_show import show, to_json, together
from paceline.launch.records import Engines, launches_of
from paceline.launch.run_records import RunRecords
from paceline.observe.run import write_atomic


def cost_command(
    paths: Sequence[Path], price: Price | None, *, html: Path | None, as_json: bool
) -> None:
    """Say what runs cost, on the terminal.

    Args:
        paths: runs, by name or directory; none: those in runs/.
        price: for all of them; None: each Job's own.
        html: write a page too.
        as_json: make the last line of stdout one JSON object, or a list of them.

    Raises:
        InputError: a path is no run, or a file of it is damaged.
    """
    runs, engines, console = runs_of(paths), Engines(), Console(highlight=False)
    for sentence in [sentence for run in runs for sentence in ask_engines(run, engines)]:
        console.print(sentence, markup=False, soft_wrap=True)
    costs = [
        cost_of_launches(run, price)
        if not run.exists and launches_of(run.path)
        else cost_of(RunRecords.of(run), price)
        for run in runs
    ]
    for one in costs:
        show(one, console)
    if len(costs) > 1:
        console.print(together(costs))
    if html is not None:
        from paceline.launch import cost_page  # the templates are needed for this alone

        write_atomic(html, cost_page.render(costs, html))
        console.print(f"{html}: the same as a page", markup=False)
    if as_json:
        told = [to_json(one) for one in costs]
        print(json.dumps(told[0] if len(told) == 1 else told))
