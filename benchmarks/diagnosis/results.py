"""What was found beside what was measured: one cell for a fault and a seed, and the tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.faults import HEALTHY, LISTED, Fault
from benchmarks.diagnosis.twins import gain_of
from benchmarks.provenance import folder_of, keep, signature
from benchmarks.tables import markdown
from paceline.explain.explain import explain
from paceline.explain.finding import Finding
from paceline.explain.rules import RESIDUALS
from paceline.observe.run import Run

MOST_ERROR = 0.30
"""How far an estimated gain may be from the measured one, as a share of it."""
MOST_HEALTHY_GAIN = 0.03
COLUMNS = ("fault", "seed", "first finding", "estimated", "measured", "error", "")
NUMBERS = ("estimated", "measured", "error", "seed")


@dataclass(frozen=True)
class Cell:
    """A fault at a seed."""

    fault: str
    seed: int
    expected: tuple[str, ...]
    findings: tuple[dict[str, Any], ...]
    """The first few: name, title, gain."""
    measured: dict[str, float] | None
    """Gain, its spread, seconds of both ways; None for a healthy run."""
    taken: dict[str, Any]
    """When and with what it was measured."""

    @classmethod
    def of(cls, name: str, seed: int, fault: Fault, folder: Path, taken: dict[str, Any]) -> "Cell":
        """Explain the faulty (or healthy) Run, and compare it with its twin."""
        is_healthy = not fault.expected
        run = Run(folder / ("healthy" if is_healthy else "faulty") / "runs/run")
        found = tuple(_described(finding) for finding in explain(run.path).findings[:5])
        measured = None
        if not is_healthy:
            measured = gain_of(fault, run, Run(folder / "mended/runs/run"))._asdict()
        return cls(name, seed, fault.expected, found, measured, taken)

    @property
    def first(self) -> str:
        """Name of the first finding."""
        return self.findings[0]["name"] if self.findings else "-"

    @property
    def estimate(self) -> float:
        """Estimated gain of the first finding."""
        return self.findings[0]["gain"] if self.findings else 0.0

    @property
    def is_named(self) -> bool:
        """Whether the first finding names the fault; for a healthy run: that no cause is found
        (that a step takes longer than predicted is none)."""
        if not self.expected:
            causes = [one["gain"] for one in self.findings if one["name"] not in RESIDUALS]
            return max(causes, default=0.0) <= MOST_HEALTHY_GAIN
        return self.first in self.expected

    @property
    def error(self) -> float | None:
        """The estimate over the measured gain, less one; None for a healthy run."""
        return None if self.measured is None else self.estimate / self.measured["gain"] - 1

    @property
    def is_near(self) -> bool:
        """Whether the fault is named and its estimate is near what mending gave."""
        return self.is_named and (self.error is None or abs(self.error) <= MOST_ERROR)

    @property
    def verdict(self) -> str:
        """What is wrong with the diagnosis, in a word."""
        if not self.is_named:
            return "false alarm" if not self.expected else "wrong name"
        return "" if self.is_near else "far off"


def _described(finding: Finding) -> dict[str, Any]:
    changes = list(finding.changes)
    return {
        "name": finding.name,
        "title": finding.title,
        "gain": finding.gain,
        "changes": changes,
        "evidence": [each.sentence for each in finding.evidence],
    }


def row(cell: Cell) -> tuple[str, ...]:
    """Cells of COLUMNS."""
    measured = "" if cell.measured is None else _percent(cell.measured["gain"])
    spread = "" if cell.measured is None else f" ± {100 * cell.measured['spread']:.1f}"
    error = "" if cell.error is None else f"{100 * cell.error:+.0f} %"
    return (
        cell.fault, str(cell.seed), cell.first, _percent(cell.estimate), measured + spread, error,
        cell.verdict,
    )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def sentences(cells: Sequence[Cell]) -> list[str]:
    """How many of the faults were named, and estimated well, at every seed."""
    text = []
    for what, names in (("of the fifteen", LISTED), ("more", None)):
        group = [
            cell for cell in cells
            if cell.expected and (cell.fault in names if names else cell.fault not in LISTED)
        ]  # fmt: skip
        if group:
            text.append(f"faults {what}: {_count(group)}")
    healthy = [cell for cell in cells if cell.fault in HEALTHY]
    if healthy:
        quiet = sum(cell.is_named for cell in healthy)
        text.append(
            f"healthy runs: {quiet} of {len(healthy)} have no finding above "
            f"{_percent(MOST_HEALTHY_GAIN)}"
        )
    return text


def _count(cells: Sequence[Cell]) -> str:
    names = {cell.fault for cell in cells}
    named = {name for name in names if all(c.is_named for c in cells if c.fault == name)}
    near = {name for name in names if all(c.is_near for c in cells if c.fault == name)}
    of_seeds = [
        sum(c.is_named and c.is_near for c in cells if c.seed == seed)
        for seed in sorted({c.seed for c in cells})
    ]
    return (
        f"{len(named)} of {len(names)} named first at every seed of theirs "
        f"({sum(c.is_named for c in cells)} of {len(cells)} runs); gain within "
        f"{_percent(MOST_ERROR)} at every one for {len(near)} "
        f"({sum(c.is_near for c in cells)} of {len(cells)} runs); both, seed by seed: "
        f"{', '.join(map(str, of_seeds))}"
    )


def write(results: Path, facts: dict[str, Any], cells: Sequence[Cell]) -> Path:
    """Write diagnosis.json and diagnosis.md into the machine's own folder."""
    figures = {"facts": facts, "cells": [asdict(cell) for cell in cells]}
    left = [name for name in COLUMNS if name not in NUMBERS]
    table = markdown(COLUMNS, [*map(row, cells)], left)
    text = "\n".join([table, *(f"- {each}" for each in sentences(cells)), "", signature(facts)])
    return keep(folder_of(results, facts), "diagnosis", figures, text + "\n")
