"""How fast the kernels are on this GPU, against eager torch, torch.compile and Liger-Kernel.

What `paceline bench kernels` does (ceilings, checks, turns), with Liger-Kernel as one more peer
where it is installed, kept as a result.

    python -m benchmarks.kernels.run [--quick] [--only NAME ...]

It needs a CUDA device and less than 8 minutes. Results: benchmarks/results/<device>/kernels.json
and .md, with versions, device and commit.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from paceline.bench.kernels.command import as_data
from paceline.bench.kernels.every import cases
from paceline.bench.kernels.rows import OURS, CaseTimings, measure
from paceline.bench.kernels.timing import Ceilings, ceilings


def main() -> int:
    """Measure, print and keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns: does it run at all?")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="operators, by their names")
    options = parser.parse_args()
    console = Console()
    if not torch.cuda.is_available():
        console.print("This benchmark needs a CUDA device and torch sees none here.", style="red")
        return 2
    device, started = torch.device("cuda"), time.monotonic()
    facts, ceiling = _facts(), ceilings(device)
    rows: list[CaseTimings] = []
    for case in cases():
        if not options.only or case.name in options.only:
            turns = 5 if options.quick else 40
            rows += measure(case, device, ceiling, turns, _peers(case.name))
            console.print(rows[-1], highlight=False)
    facts["seconds"] = round(time.monotonic() - started, 1)
    _write(folder_of(options.results, facts), facts, ceiling, rows)
    return 1 if any(row.wrong for row in rows) else 0


def _facts() -> dict[str, Any]:
    facts = taken_with("benchmarks.kernels.run")
    for name in ("triton", "liger-kernel"):
        try:
            facts["versions"][name] = version(name)
        except PackageNotFoundError:
            facts["versions"][name] = None
    return {**facts, "cuda": torch.version.cuda}


def _peers(name: str) -> dict[str, Callable[..., Any]]:
    """Peers of a case beside eager and compiled torch: functions of its inputs."""
    if name == "adamw":
        return {"torch": _fused_adamw}
    return {"liger": _liger(name)} if name in LIGER and find_spec("liger_kernel") else {}


PEERS = ("eager", "compiled", "torch", "liger")
LIGER: Mapping[str, tuple[str, str, tuple[Any, ...]]] = {
    "rms_norm": ("rms_norm", "LigerRMSNormFunction", (1e-6, 0.0, "llama", False)),
    "add_rms_norm": ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", (1e-6,)),
    "swiglu": ("swiglu", "LigerSiLUMulFunction", ()),
    "rope": ("rope", "LigerRopeFunction", ()),
    "cross_entropy": ("cross_entropy", "LigerCrossEntropyFunction", (None,)),
    "linear_cross_entropy": (
        "fused_linear_cross_entropy",
        "LigerFusedLinearCrossEntropyFunction",
        (),
    ),
}
"""Of a case: Liger's module, its autograd function, and what it takes after the case's inputs."""


def _liger(name: str) -> Callable[..., Any]:
    module, function, more = LIGER[name]
    apply = getattr(import_module(f"liger_kernel.ops.{module}"), function).apply
    if name == "rope":  # heads before positions, and tables without a dimension of heads
        return lambda q, k, cos, sin: apply(
            q.transpose(1, 2), k.transpose(1, 2), cos.squeeze(2), sin.squeeze(2)
        )
    if name.endswith("cross_entropy"):  # a tuple, of which the first is the loss
        return lambda *inputs: apply(*inputs, *more)[0]
    return lambda *inputs: apply(*inputs, *more)


def _fused_adamw(*state: Tensor) -> list[Tensor]:
    """What torch.optim.AdamW(fused=True) launches."""
    number = len(state) // 5
    lists = [list(state[first : first + number]) for first in range(0, len(state), number)]
    params, grads, firsts, seconds, steps = lists
    grads = [grad.to(params[0].dtype) for grad in grads]  # it takes one type only
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params, grads, firsts, seconds, [], steps, amsgrad=False, lr=1e-3, beta1=0.9,
        beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip
    return [*params, *firsts, *seconds]


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


def _write(
    folder: Path, facts: dict[str, Any], ceiling: Ceilings, rows: Sequence[CaseTimings]
) -> None:
    data = {"facts": facts, "ceilings": ceiling._asdict(), "rows": [as_data(row) for row in rows]}
    said = dict.fromkeys(each for row in rows for each in (*row.wrong, *row.missing))
    text = (
        "# Kernels on this device",
        "",
        f"Ceilings in the same run: copy {ceiling.copy_gb_s:.0f} GB/s, bf16 product "
        f"{ceiling.matmul_tflop_s:.0f} TFLOP/s.",
        "",
        as_markdown(rows),
        *(f"- {each}" for each in said),
        "",
        signature(facts),
    )
    keep(folder, "kernels", data, "\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
