"""The command `paceline cost`: account for runs, print it, and write a page."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.config.errors import InputError
from paceline.launch.attempts import ask_engines
from paceline.launch.cost import Price, RunCost, cost_of, cost_of_launches, runs_of
from paceline.launch.cost_show import show, to_json, together
from paceline.launch.records import Engines, submitted_numbers
from paceline.launch.run_records import RunRecords
from paceline.observe.run import Run, write_atomic


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
        InputError: a path is no run, or a file of it is damaged. Of all in runs/, the damaged ones
            are left out with a sentence, where another one is left.
    """
    console, engines, costs = Console(highlight=False), Engines(), []
    runs = runs_of(paths)
    for run in runs:
        try:
            told = ask_engines(run, engines)
            costs.append(_cost_of(run, price))
        except InputError as error:
            if paths or (run == runs[-1] and not costs):
                raise
            told = [f"{run.path.name} is left out: {error}"]
        for sentence in told:
            console.print(sentence, markup=False, soft_wrap=True)
    for one in costs:
        show(one, console)
    if len(costs) > 1:
        console.print(together(costs))
    if html is not None:
        from paceline.launch import cost_page  # the templates are needed for this alone

        write_atomic(html, cost_page.render(costs, html))
        console.print(f"{html}: the same as a page", markup=False)
    if as_json:
        plain = [to_json(one) for one in costs]
        print(json.dumps(plain[0] if len(plain) == 1 else plain))


def _cost_of(run: Run, price: Price | None) -> RunCost:
    if not run.exists and submitted_numbers(run.path):
        return cost_of_launches(run, price)
    return cost_of(RunRecords.of(run), price)
