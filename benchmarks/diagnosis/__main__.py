"""Measure every fault at every seed, explain it, and write the table."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.diagnosis import __doc__ as about
from benchmarks.diagnosis.clusters import cluster_for
from benchmarks.diagnosis.faults import FAULTS, LISTED, fault_of
from benchmarks.diagnosis.results import COLUMNS, NUMBERS, Cell, row, sentences, write
from benchmarks.diagnosis.twins import FIRST_TURN, TURN, FailedError, measure, warm_up
from benchmarks.provenance import RESULTS, ROOT, taken_with
from paceline.machine.discovery import this_machine

# The least and the most.
_TURNS, _QUICK_TURNS = range(4, 9), range(2, 3)
_DONE = "measured"


def main() -> None:
    options = _options()
    console = Console(highlight=False, width=None if Console().is_terminal else 140)
    facts = taken_with("benchmarks.diagnosis")
    warm_up()
    cells = []
    for cell in _cells(options, console):
        cells.append(cell)
        console.print(f"  {' | '.join(row(cell))}", markup=False)
        for finding in cell.findings[:3]:
            console.print(f"    {finding['name']}: {finding['title']}", style="dim", markup=False)
    console.print(_table(cells))
    console.print("\n".join(sentences(cells)))
    if options.keep:
        console.print(f"results: {write(options.results, facts, cells)}")


def _cells(options: argparse.Namespace, console: Console) -> Iterator[Cell]:
    """Each fault at each seed; what was measured before is only explained again."""
    has_bf16 = "bf16" in this_machine().device.precisions
    arithmetic = () if has_bf16 else ('layout.precision="fp32"',)
    wanted = [(name, seed) for name in options.fault for seed in options.seed]
    for number, (name, seed) in enumerate(wanted, start=1):
        fault = fault_of(name, seed)
        folder = options.work / f"{'-'.join(re.findall(r'[a-zA-Z0-9]+', name))}-{seed}"
        done = folder / _DONE
        if options.measured and not done.exists():
            continue
        if fault.needs_bf16 and not has_bf16:
            console.print(f"left out: {name}, for this machine has no bf16", markup=False)
            continue
        if options.again or not done.exists():
            done.unlink(missing_ok=True)
            console.print(f"{number} of {len(wanted)}: {name}, seed {seed}", markup=False)
            cluster = cluster_for(fault, options.work / "clusters")
            steps = FIRST_TURN + TURN * options.turns.stop
            drawn = (f"train.seed={seed}", f"train.steps={steps}")
            settings = (f'cluster.file="{cluster}"', *drawn, *arithmetic)
            taken = taken_with("benchmarks.diagnosis")
            try:
                measure(fault, folder, settings, options.turns)
            except FailedError as error:
                console.print(f"  {error}", markup=False)
                continue
            done.write_text(json.dumps(taken))
        yield Cell.of(name, seed, fault, folder, json.loads(done.read_text()))


def _table(cells: list[Cell]) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for cell in cells:
        table.add_row(*row(cell))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnosis", description=(about or "").partition("\n")[0]
    )
    parser.add_argument(
        "--fault", nargs="+", choices=FAULTS, metavar="NAME", help=f"some of: {', '.join(FAULTS)}"
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--quick", action="store_true", help="the fifteen faults, once, in two turns"
    )
    parser.add_argument("--measured", action="store_true", help="only explain what was measured")
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs/diagnosis", help="folder of the runs; kept"
    )
    parser.add_argument("--keep", action="store_true", help="write the table among the results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.turns = _QUICK_TURNS if options.quick else _TURNS
    options.fault = options.fault or [*(LISTED if options.quick else FAULTS)]
    options.seed = options.seed[:1] if options.quick else options.seed
    return options


if __name__ == "__main__":
    main()
