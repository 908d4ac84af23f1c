"""Fine-tuning on a small device: the memory that a run on 10 M parameters has resident.

A decoder of 10 M parameters learns Python for a few steps. Then it is fine-tuned on conversations,
all of it and by adapters, each as `paceline train` in a process of its own. What this process and
its children have resident together is read ten times a second, Python and torch included: the sum
of their Pss (/proc/PID/smaps_rollup), in which a page that processes share counts once. The most
that was seen counts; what came and went within a tenth of a second may be missing.

    python -m benchmarks.finetune_memory [--steps 40] [--repeats 3]
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.render.figures import bytes_text

_EVERY_S = 0.1
BASE = """
name = "base"
[model]
family = "decoder"
vocab_size = 258
hidden_size = 320
ffn_size = 896
num_layers = 9
num_heads = 8
num_kv_heads = 4
max_seq_len = 256
[cluster]
devices_per_node = 1
[data]
source = "python-stdlib"
tokenizer = "bytes"
[train]
steps = 5
global_batch = 4
seq_len = 256
"""
TUNED = """
name = "{method}-{repeat}"
[model]
hf = "base"
[cluster]
devices_per_node = 1
[data]
source = "talks.jsonl"
records = "chat"
[layout]
micro_batch = 1
[finetune]
method = "{method}"
[optim]
lr = {lr}
warmup_steps = 5
[train]
weights = true
steps = {steps}
global_batch = 4
seq_len = 256
[checkpoint]
every = {steps}
"""
_RATES = {"lora": "2e-3", "full": "3e-4"}


def write_task(folder: Path) -> None:
    """A base, and conversations to learn."""
    (folder / "base.toml").write_text(BASE)
    _watched(folder, "train", "base.toml")
    _watched(folder, "export", "runs/base", "base")
    talks = (
        {
            "prompt": f"What comes after {number}?",
            "completion": f"After {number} comes {number + 1}.",
        }
        for number in range(2000)
    )
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))


def tune(folder: Path, method: str, steps: int, repeat: int) -> dict[str, Any]:
    """One run, and what was seen of it."""
    settings = {"method": method, "steps": steps, "lr": _RATES[method], "repeat": repeat}
    (folder / "job.toml").write_text(TUNED.format(**settings))
    peak = _watched(folder, "train", "job.toml")
    run = folder / "runs" / f"{method}-{repeat}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    facts = json.loads((run / "facts.json").read_text())
    return {
        "method": method,
        "resident_bytes": peak,
        "num_params": facts["num_params"],
        "num_trained_params": facts.get("num_trained_params", facts["num_params"]),
        "step_s": median(line["step_time_s"] for line in lines[1:]),
        "losses": [lines[0]["loss"], lines[-1]["loss"]],
    }


def _watched(folder: Path, *arguments: str) -> int:
    """Run `paceline ARGUMENTS`; the most memory that it and its children had together, in bytes."""
    command = [str(Path(sys.executable).parent / "paceline"), *arguments]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident(process.pid))
            time.sleep(_EVERY_S)
    if process.returncode:
        raise SystemExit((folder / "said").read_text())
    return peak


def _resident(root: int) -> int:
    """Bytes of a process and those below it."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(root)
        for each in (found, *found.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_full_info().pss
    return total


def main() -> None:
    """Tune by each method, in turns, and keep what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method")
    asked = parser.parse_args()
    about = taken_with("benchmarks.finetune_memory")
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        write_task(folder)
        found = [
            tune(folder, method, asked.steps, repeat)
            for repeat in range(asked.repeats)
            for method in _RATES
        ]
    titles = (
        "trained",
        "parameters",
        "resident, most of the runs",
        "a step",
        "loss, first to last",
    )
    page = "# Fine-tuning 10 M parameters\n\n"
    page += markdown(titles, [_line(method, found) for method in _RATES], ("trained",))
    page += f"\n{asked.repeats} runs each of {asked.steps} steps of 4 x 256 tokens.\n"
    page += f"\n{signature(about)}\n"
    print(page)
    keep(folder_of(asked.results, about), "finetune_memory", {"about": about, "runs": found}, page)


def _line(method: str, found: list[dict[str, Any]]) -> list[str]:
    runs = [each for each in found if each["method"] == method]
    first, last = (median(each["losses"][at] for each in runs) for at in (0, 1))
    return [
        {"lora": "adapters (LoRA)", "full": "everything"}[method],
        f"{runs[0]['num_trained_params']:,} of {runs[0]['num_params']:,}",
        bytes_text(max(each["resident_bytes"] for each in runs)),
        f"{median(each['step_s'] for each in runs):.2f} s",
        f"{first:.2f} to {last:.2f}",
    ]


if __name__ == "__main__":
    main()
