"""A case timed against its peers: what a row of the report says."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple

import torch

from paceline.bench.kernels.cases import Function, KernelCase
from paceline.bench.kernels.checks import faults
from paceline.bench.kernels.timing import Ceilings, Timing, Variant, alternate, copies, variant

OURS = "ours"
PEERS = ("eager", "compiled", "torch", "liger")


class CaseTimings(NamedTuple):
    """One case in one direction."""

    name: str
    shape: str
    direction: str
    timings: Mapping[str, Timing]
    """Of "ours" and of each peer that could do it."""
    gb_s: float
    tflop_s: float
    share: float
    """Of the nearer ceiling: copy or product."""
    wrong: tuple[str, ...]
    """What our results have wrong."""
    missing: tuple[str, ...]
    """Peers that failed, and why."""

    @property
    def ratios(self) -> dict[str, float]:
        """Time of each peer over ours."""
        ours = self.timings[OURS].ms
        return {name: timing.ms / ours for name, timing in self.timings.items() if name != OURS}

    def __str__(self) -> str:
        ms, low, high = self.timings[OURS]
        ratios = "  ".join(f"{ratio:.2f} x {name}" for name, ratio in self.ratios.items())
        rate = f"{self.tflop_s:.0f} TFLOP/s" if self.tflop_s else f"{self.gb_s:.0f} GB/s"
        return (
            f"{self.name:<22} {self.shape:<20} {self.direction:<8} {ms:8.3f} ms "
            f"({low:.3f} – {high:.3f})  {rate:>12} {self.share:5.0%}  {ratios}"
            f"{'  WRONG' if self.wrong else ''}"
        )


def measure(
    case: KernelCase,
    device: torch.device,
    ceilings: Ceilings,
    turns: int,
    others: Mapping[str, Function] | None = None,
) -> list[CaseTimings]:
    """Check a case, and time it in each direction beside eager and compiled torch.

    Args:
        case: what to run.
        device: a CUDA device.
        ceilings: of the same device, measured just now.
        turns: how often each variant is timed.
        others: more peers, by name, which take the same inputs.
    """
    inputs = copies(case, device)
    wrong = tuple(faults(case, inputs[0], device))
    peers = {
        "eager": case.function,
        "compiled": torch.compile(case.function, dynamic=False),
        **(others or {}),
    }
    rows = []
    for direction in case.directions:
        variants = {OURS: variant(case.function, inputs, direction, "triton", device)}
        missing = []
        for name, function in peers.items():
            try:
                variants[name] = variant(function, inputs, direction, "reference", device)
            except Exception as error:  # a peer that can't do a shape is no reason to stop
                missing.append(f"{name}: {type(error).__name__}: {error}"[:300])
        timings = _timings(variants, turns, device)
        rows.append(_row(case, direction, timings, ceilings, wrong, tuple(missing)))
    return rows


def _timings(
    variants: Mapping[str, Variant], turns: int, device: torch.device
) -> dict[str, Timing]:
    return dict(zip(variants, alternate(list(variants.values()), turns, device), strict=True))


def _row(
    case: KernelCase,
    direction: str,
    timings: Mapping[str, Timing],
    ceilings: Ceilings,
    wrong: tuple[str, ...],
    missing: tuple[str, ...],
) -> CaseTimings:
    cost, ms = case.cost(direction), timings[OURS].ms
    gb_s, tflop_s = cost.bytes / ms / 1e6, cost.flops / ms / 1e9
    share = max(gb_s / ceilings.copy_gb_s, tflop_s / ceilings.matmul_tflop_s)
    shown = (case.name, case.shape, direction)
    return CaseTimings(*shown, timings, gb_s, tflop_s, share, wrong, missing)


def as_markdown(rows: Sequence[CaseTimings]) -> str:
    """The rows as a table, with the geometric mean of each peer's ratios."""
    titles = ("operator", "shape", "direction", "ms", "GB/s", "TFLOP/s", "of the ceiling")
    names = [name for name in PEERS if any(name in row.timings for row in rows)]
    lines = [
        f"| {' | '.join((*titles, *(f'{name} / ours' for name in names)))} |",
        f"|{' --- |' * 3}{' ---: |' * (4 + len(names))}",
    ]
    for row in rows:
        ratios = [f"{row.ratios[name]:.2f}" if name in row.timings else "" for name in names]
        figures = (f"{row.timings[OURS].ms:.3f}", f"{row.gb_s:.0f}", f"{row.tflop_s:.0f}")
        cells = (row.name, row.shape, row.direction, *figures, f"{row.share:.0%}", *ratios)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Geometric means: {', '.join(_means(rows, names))}."])


def _means(rows: Sequence[CaseTimings], names: Sequence[str]) -> list[str]:
    ratios = {name: [row.ratios[name] for row in rows if name in row.timings] for name in names}
    return [f"{name} {geometric_mean(each):.2f} x ours" for name, each in ratios.items()]
