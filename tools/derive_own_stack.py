"""Derive the constants of our runtime on GPUs from published steps of stacks like it.

Our runtime is FSDP2 and DTensor on PyTorch's kernels. Of each source with such a stack (torchtitan,
torchao) the median of measured over predicted seconds is taken, with all constants at their
defaults; their geometric mean goes to every kind of kernel, since what is behind it isn't known to
be any one of them. The interval is the least that holds four of five lines of each source when only
the other sources are asked. Writes src/paceline/config/catalogue/own_stack.json.

    python tools/derive_own_stack.py
"""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.published import PublishedRun, read_runs
from paceline.published.works import LanguageWork

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "data" / "published_llm_runs.csv"
FILE = ROOT / "src" / "paceline" / "config" / "catalogue" / "own_stack.json"
KERNELS = ("matmul_time", "attention_time", "memory_time")


def main() -> None:
    """Write the file."""
    found = derived(read_runs([RUNS]))
    FILE.write_text(json.dumps(found, indent=2) + "\n")
    print(FILE)


def derived(runs: list[PublishedRun]) -> dict[str, object]:
    """The content of the file."""
    sources: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.step_s and run.work is not None and run.work.software.family == "fsdp compiled":
            sources[run.group].append(run)
    needed = {name: float(np.median([off(run, 1.0) for run in some])) for name, some in
              sources.items()}  # fmt: skip
    wide = []
    for name, some in sources.items():
        others = _mean([factor for other, factor in needed.items() if other != name])
        away = np.abs(np.log([off(run, others) for run in some]))
        wide.append(float(np.exp(np.quantile(away, 0.8)) - 1))
    factor = round(_mean(list(needed.values())), 2)
    words = ", ".join(f"{name} {needed[name]:.2f} ({len(sources[name])} lines)" for name in needed)
    return {
        "constants": dict.fromkeys(KERNELS, factor),
        "error": round(max(wide), 2),
        "origin": f"cited: published steps of like stacks, measured over predicted: {words}",
    }


def off(run: PublishedRun, factor: float) -> float:
    """Measured over predicted seconds with this factor on every kernel."""
    work = run.work
    assert isinstance(work, LanguageWork)
    assert run.step_s is not None
    plain = replace(work.setting, stack=work.setting.stack.replace(constants={}))
    return run.step_s / replace(work, setting=plain).seconds(dict.fromkeys(KERNELS, factor))


def _mean(factors: list[float]) -> float:
    return float(np.exp(np.mean(np.log(factors))))


if __name__ == "__main__":
    main()
