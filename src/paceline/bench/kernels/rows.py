"""A case timed against its peers: what a row of the report says."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.bench.kernels.cases import Function, KernelCase
from paceline.bench.kernels.checks import faults
from paceline.bench.kernels.timing import Ceilings, Timing, alternate, copies, variant

OURS = "ours"


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
        found = alternate([*variants.values()], turns, device)
        timings = dict(zip(variants, found, strict=True))
        rows.append(_row(case, direction, timings, ceilings, wrong, tuple(missing)))
    return rows


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
