"""`paceline bench kernels`: how fast the kernels are on this GPU, and which launches suit it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.bench.kernels.cases import KernelCase
from paceline.bench.kernels.every import cases
from paceline.bench.kernels.rows import CaseTimings, measure
from paceline.bench.kernels.timing import Ceilings, ceilings
from paceline.bench.kernels.tune import tuned
from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.kernels import launch, switch
from paceline.kernels.attention.rule import AttentionShape
from paceline.kernels.attention.table import measure as measure_attention
from paceline.observe.run import write_atomic

_TURNS, _QUICK_TURNS = 40, 5
# Of layers that people train; the last is latent attention's.
_ATTENTION_SHAPES = (
    AttentionShape(4, 32, 8, 4096, 128, 128),
    AttentionShape(1, 32, 8, 32768, 128, 128),
    AttentionShape(8, 16, 16, 2048, 64, 64),
    AttentionShape(2, 128, 128, 4096, 192, 128),
)


def kernels_command(only: Sequence[str], out: Path, *, tune: bool, quick: bool) -> dict[str, Any]:
    """Check and time the kernels, or find their launches.

    Args:
        only: operators by name; none for all.
        out: the table of launches to write (with tune); rows of other devices in it stay.
        tune: look for the best launches.
        quick: fewer turns.

    Returns:
        the rows as data.

    Raises:
        InputError: kernels can't run here, or an operator is unknown.
    """
    device = torch.device("cuda")
    _check_can_run(device)
    chosen = _chosen(only)
    console = Console()
    turns = _QUICK_TURNS if quick else _TURNS
    if tune:
        rows = [row for case in chosen for row in tuned(case, device, turns, console.print)]
        write_table(out, rows)
        choices = [] if only else _attention(out.with_name("attention.json"), device, console)
        console.print(f"{len(rows)} launches: {out}; use them: export {launch.OWN}={out}")
        return {"launches": rows, "attention": choices}
    ceiling = ceilings(device)
    console.print(
        f"copy {ceiling.copy_gb_s:.0f} GB/s, product {ceiling.matmul_tflop_s:.0f} TFLOP/s"
    )
    made = [row for case in chosen for row in _told(case, device, ceiling, turns, console)]
    return {"ceilings": ceiling._asdict(), "rows": [as_data(row) for row in made]}


def _check_can_run(device: torch.device) -> None:
    if not torch.cuda.is_available() or switch.is_interpreted():
        raise InputError(
            "paceline bench kernels measures a CUDA device and none can be used here: run it on a "
            "machine with a GPU, without TRITON_INTERPRET."
        )
    if problem := switch.why_not(device):
        raise InputError(f"paceline bench kernels can't run: {problem}.")


def _chosen(only: Sequence[str]) -> list[KernelCase]:
    every = list(cases())
    names = sorted({case.name for case in every})
    for name in only:
        if name not in names:
            raise InputError(f'--only "{name}" is no operator{nearest(name, names)}')
    return [case for case in every if not only or case.name in only]


def _attention(path: Path, device: torch.device, console: Console) -> list[dict[str, Any]]:
    """Measure torch's implementations of attention; a run finds the file beside the table."""
    found = []
    for shape in _ATTENTION_SHAPES:
        choice = measure_attention(shape, torch.bfloat16, device, path=path)
        console.print(f"attention {tuple(shape)}: {choice.backend}, {choice.why}", highlight=False)
        found.append({**shape._asdict(), **choice._asdict()})
    return found


def _told(
    case: KernelCase, device: torch.device, ceiling: Ceilings, turns: int, console: Console
) -> list[CaseTimings]:
    rows = measure(case, device, ceiling, turns)
    for row in rows:
        console.print(row, highlight=False)
    for sentence in rows[0].wrong:
        console.print(f"  {sentence}", style="red", highlight=False)
    return rows


def as_data(row: CaseTimings) -> dict[str, Any]:
    """A row for JSON."""
    timings = {name: timing._asdict() for name, timing in row.timings.items()}
    return {**row._asdict(), "timings": timings, "ratios": row.ratios}


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put rows into a table of launches; those for the same thing are replaced, others stay."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["device"], row["kernel"], row["dtype"], row["size"]

    old = [dict(row) for row in launch.rows_of(path)] if path.exists() else []
    merged = {key(row): row for row in [*old, *rows]}
    lines = ",\n  ".join(json.dumps(merged[each]) for each in sorted(merged))
    write_atomic(path, f'{{"rows": [\n  {lines}\n]}}\n')
