"""Write the tables of docs/kernels.md.

    python docs/make_kernels_page.py

Resources are those of benchmarks/kernels/resources.csv (`make kernels-report`); measured rows those
of benchmarks/results/<device>/kernels.json, which benchmarks/kernels/run.py wrote on a GPU.
"""

import csv
import json
from pathlib import Path
from typing import Any

from measured import filled, table

DOCS = Path(__file__).parent
PAGE = DOCS / "kernels.md"
RESOURCES = DOCS.parent / "benchmarks/kernels/resources.csv"
RESULTS = DOCS.parent / "benchmarks/results"
SECTIONS = ("activations", "norm", "experts")
CAPABILITY = "90"
NOT_YET = "No GPU has been at hand so far: `python -m benchmarks.kernels.run` is ready for one."


def resources_table(operator: str) -> str:
    """What each kernel of an operator needs of a Hopper, in the variant that needs most."""
    titles = ("kernel", "size", "launch", "registers", "shared, kB", "programs")
    most: dict[tuple[str, str], dict[str, str]] = {}
    with RESOURCES.open() as file:
        for row in csv.DictReader(file):
            name, _, kernel = row["kernel"].partition(".")
            key = (kernel, row["size"])
            if (name, row["sm"], row["dtype"]) == (operator, CAPABILITY, "bf16"):
                most[key] = max(most.get(key, row), row, key=lambda each: int(each["registers"]))
    lines = [
        (
            f"`{kernel}`",
            size,
            row["launch"].replace("=", " "),
            row["registers"],
            f"{int(row['shared_bytes']) / 1024:.0f}",
            row["programs_per_sm"],
        )
        for (kernel, size), row in most.items()
    ]
    return table(titles, lines)


def measured_table() -> str:
    """Shares of the ceilings on each GPU that was measured."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/kernels.json"))]
    lines = [_line(data, row) for data in found for row in data["rows"]]
    titles = ("device", "operator", "shape", "direction", "ms", "of the ceiling")
    return table(titles, lines) if lines else NOT_YET


def _line(data: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    shown = (row["name"], row["shape"], row["direction"])
    ms = row["timings"]["ours"]["ms"]
    return (data["facts"]["device"], *shown, f"{ms:.3f}", f"{row['share']:.0%}")


def pages() -> dict[Path, str]:
    """The page as it should be."""
    tables = {name: resources_table(name) for name in SECTIONS}
    return {PAGE: filled(PAGE.read_text(), {**tables, "measured": measured_table()})}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
