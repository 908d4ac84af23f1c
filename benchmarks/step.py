"""A Llama-shaped decoder on one device, as a person trains it: tokens/s, MFU, and where time goes.

How it works: each variant (kernels "reference" and "triton", eager and compiled; fp8 beside) is a
`paceline train` of its own, on the Python standard library's text, and takes turns with the others;
its figures are those of the Run: medians of the warm steps, terms from the profiled ones. Beside
them stands what the planner predicts. MFU is given in both conventions: attention counted whole, as
PaLM's formula does, and by half, what a causal mask leaves.

    python -m benchmarks.step [--models 1b 3b] [--rounds 2] [--steps 16]
    python -m benchmarks.step --tiny            a decoder for a CPU: does it run?

Results: benchmarks/results/<device>/step.json and .md.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tomli_w
import torch
from rich.console import Console

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from paceline.config.device import Device
from paceline.config.errors import RunError
from paceline.config.model import Model
from paceline.machine.discovery import this_machine
from paceline.observe.run import Run

_HEADS = {"num_kv_heads": 8, "vocab_size": 128256, "tie_embeddings": True}
MODELS: Mapping[str, dict[str, Any]] = {
    "1b": dict(hidden_size=2048, ffn_size=8192, num_layers=16, num_heads=32, head_dim=64, **_HEADS),
    "3b": dict(
        hidden_size=3072, ffn_size=8192, num_layers=28, num_heads=24, head_dim=128, **_HEADS
    ),
    "tiny": {
        "hidden_size": 64,
        "ffn_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 512,
    },
}
_MOST_S = 600


class Variant(NamedTuple):
    """How a step is computed."""

    kernels: str
    compile: bool
    precision: str
    graphs: bool = False
    """Whether compiled blocks are replayed as CUDA graphs."""

    def __str__(self) -> str:
        how = "graphs" if self.graphs else "compiled" if self.compile else "eager"
        return f"{self.precision} {self.kernels} {how}"


ON_CUDA = (
    Variant("reference", False, "bf16"),
    Variant("triton", False, "bf16"),
    Variant("reference", True, "bf16"),
    Variant("triton", True, "bf16"),
    Variant("triton", True, "bf16", graphs=True),
    Variant("triton", True, "fp8"),
)
ON_CPU = (Variant("reference", False, "fp32"),)


def main() -> int:
    """Train each variant in turns, print and keep the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=("1b", "3b"), default=["1b", "3b"])
    parser.add_argument("--rounds", type=int, default=1, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a decoder for a CPU")
    options = parser.parse_args()
    console = Console()
    if not options.tiny and not torch.cuda.is_available():
        console.print("This needs a CUDA device; --tiny tries the benchmark on a CPU.", style="red")
        return 2
    facts, device = taken_with("benchmarks.step"), this_machine().device
    names = ["tiny"] if options.tiny else options.models
    rows, failed = [], list[str]()
    for name in names:
        for variant in ON_CUDA if torch.cuda.is_available() else ON_CPU:
            try:
                runs = [train(name, variant, options.steps) for _ in range(options.rounds)]
            except RunError as error:  # the others are worth having
                failed.append(str(error))
                console.print(error, style="red", highlight=False)
                continue
            rows.append(_row(name, variant, runs, device))
            console.print(_line(rows[-1]), highlight=False)
    folder = folder_of(options.results, facts)
    data = {"facts": facts, "rows": rows, "failed": failed}
    keep(folder, "step", data, _page(rows, facts))
    return 1 if failed else 0


def job_of(name: str, variant: Variant, steps: int) -> dict[str, Any]:
    """The Job of a variant, as its TOML file has it."""
    seq_len = _seq_len(name)
    vocab = 512 if name == "tiny" else 4096
    return {
        "name": "step",
        "model": {"family": "decoder", "max_seq_len": seq_len, **MODELS[name]},
        "data": {"source": "python-stdlib", "tokenizer": f"bpe:{vocab}"},
        "train": {"steps": steps, "global_batch": 8, "seq_len": seq_len, "eval_every": steps},
        "layout": {
            "micro_batch": 1 if name == "3b" else 4,  # what fits 141 GB without recomputing
            "precision": variant.precision,
            "compile": variant.compile,
            "kernels": variant.kernels,
            "recompute": "none",
        },
        "cluster": {"num_nodes": 1, "devices_per_node": 1},
        "checkpoint": {"every": 0},
        "observe": {"profile_every": max(steps - 2, 4)},
    }


def _seq_len(name: str) -> int:
    return 128 if name == "tiny" else 4096


def train(name: str, variant: Variant, steps: int) -> dict[str, Any]:
    """One Run: medians of its warm steps, the mean of each term, and what was predicted.

    Raises:
        RunError: with what it said, where it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(tomli_w.dumps(job_of(name, variant, steps)))
        command = [sys.executable, "-m", "paceline", "train", str(job)]
        # What layout.compile compiles, and nothing else: each block.
        environment = {**os.environ, "TORCHINDUCTOR_CUDAGRAPHS": "1" if variant.graphs else "0"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=_MOST_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RunError(f"{name}, {variant} failed:\n{done.stdout}\n{done.stderr}")
        run = Run(Path(folder) / "runs/step")
        return figures_of(run.metrics(), run.plan())


def figures_of(lines: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a Run's metrics say of its steps; the first half warms up.

    Args:
        lines: of metrics.jsonl.
        plan: of the Run; its own layout stands first.
    """
    steps = [line for line in lines if "step_time_s" in line]
    warm = [line for line in steps[len(steps) // 2 :] if not line["profiled"]]
    profiled = [line["terms"] for line in steps if line["profiled"]]
    names = sorted({name for terms in profiled for name in terms})
    predicted = plan["layouts"][0] if plan["layouts"] else None
    return {
        "step_s": median(line["step_time_s"] for line in warm),
        "tokens_per_s": median(line["tokens_per_s"] for line in warm),
        "memory_bytes": max(line["memory_bytes"] for line in steps),
        "terms": {name: median(terms.get(name, 0.0) for terms in profiled) for name in names},
        "predicted_s": predicted["step_s"] if predicted else None,
    }


def _row(
    name: str, variant: Variant, runs: Sequence[dict[str, Any]], device: Device
) -> dict[str, Any]:
    model, seq_len = Model.parse({**MODELS[name], "max_seq_len": _seq_len(name)}), _seq_len(name)
    rates = [run["tokens_per_s"] for run in runs]
    rate, peak = median(rates), device.peak("bf16")
    flops = {
        kind: model.train_flops_per_token(seq_len, causal)
        for kind, causal in (("full", False), ("half", True))
    }
    return {
        "model": name,
        "variant": str(variant),
        "tokens_per_s": rate,
        "spread": [min(rates), max(rates)],
        "mfu": {kind: rate * each / peak.value if peak else None for kind, each in flops.items()},
        "step_s": median(run["step_s"] for run in runs),
        "predicted_s": runs[-1]["predicted_s"],
        "memory_bytes": max(run["memory_bytes"] for run in runs),
        "terms": runs[-1]["terms"],
    }


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['model']:<5} {row['variant']:<26} {' '.join(_cells(row))}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.1%}"

    predicted = row["predicted_s"]
    return [
        f"{row['tokens_per_s']:.0f}",
        share(row["mfu"]["full"]),
        share(row["mfu"]["half"]),
        f"{row['step_s'] * 1e3:.1f}",
        "–" if predicted is None else f"{predicted * 1e3:.1f}",
        f"{row['memory_bytes'] / 1e9:.1f}",
    ]


def _page(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    titles = ("tokens/s", "MFU, whole", "MFU, causal", "ms", "predicted ms", "GB")
    lines = [
        "# A step on this device",
        "",
        f"| model | variant | {' | '.join(titles)} |",
        f"| --- | --- |{' ---: |' * len(titles)}",
        *(f"| {row['model']} | {row['variant']} | {' | '.join(_cells(row))} |" for row in rows),
        "",
        "Milliseconds by term, of the profiled steps:",
        "",
    ]
    names = sorted({name for row in rows for name in row["terms"]})
    lines += [
        f"| model | variant | {' | '.join(names)} |",
        f"| --- | --- |{' ---: |' * len(names)}",
    ]
    for row in rows:
        cells = (f"{row['terms'].get(name, 0) * 1e3:.2f}" for name in names)
        lines.append(f"| {row['model']} | {row['variant']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", signature(dict(facts))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
