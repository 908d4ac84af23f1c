"""Rewards: a network learns a task whose answers can be checked, from its own completions (GRPO).

The task: "417 + 1 ends in " is followed by a digit. A small decoder first learns lines of that form
with random digits, so that it answers with a digit and is right once in ten. Then it is told for
each of its completions whether it was right, and nothing else. The numbers of held-out prompts are
in neither.

    python -m benchmarks.rewards [--steps 300] [--seeds 3]
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown

_SHOWN_EVERY = 50
_NUMBERS = 500
BASE = """
name = "lines"
[model]
family = "decoder"
vocab_size = 258
hidden_size = 64
ffn_size = 128
num_layers = 2
num_heads = 4
max_seq_len = 32
[cluster]
devices_per_node = 1
[data]
source = "lines.txt"
tokenizer = "bytes"
[optim]
lr = 3e-3
warmup_steps = 10
[train]
steps = 150
global_batch = 32
seq_len = 32
"""
REWARDED = """
name = "right"
[model]
hf = "base"
[cluster]
devices_per_node = 1
[data]
source = "prompts.jsonl"
records = "prompts"
columns = ["answer"]
eval_fraction = 0.2
[finetune]
objective = "grpo"
grpo.reward = "reward.py:is_right"
grpo.group = 16
grpo.max_tokens = 1
[optim]
lr = 2e-3
weight_decay = 0.0
warmup_steps = 5
schedule = "constant"
[train]
weights = true
steps = {steps}
seed = {seed}
global_batch = 256
seq_len = 32
eval_every = {steps}
eval_batches = 4
[checkpoint]
every = {steps}
"""
REWARD = """
def is_right(prompt, completion, answer):
    return float(completion.strip() == answer)
"""


def prompt_of(number: int) -> str:
    """What is completed."""
    return f"{number} + 1 ends in "


def write_task(folder: Path, steps: int, seed: int) -> None:
    """Write texts, prompts, the reward function and both Jobs."""
    pick = random.Random(seed)
    lines = (f"{prompt_of(pick.randrange(1000))}{pick.randrange(10)}\n" for _ in range(6000))
    (folder / "lines.txt").write_text("".join(lines))
    prompts = (
        {"prompt": prompt_of(number), "answer": str((number + 1) % 10)}
        for number in pick.sample(range(1000), _NUMBERS)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(REWARD)
    (folder / "lines.toml").write_text(BASE)
    (folder / "right.toml").write_text(REWARDED.format(steps=steps, seed=seed))


def learn(folder: Path) -> tuple[list[float], float, float]:
    """Run both Jobs.

    Returns:
        the share of right completions in each step, that of held-out prompts at the end, and the
        seconds that learning from rewards took.
    """
    _paceline(folder, "train", "lines.toml")
    _paceline(folder, "export", "runs/lines", "base")
    began = time.perf_counter()
    _paceline(folder, "train", "right.toml")
    took_s = time.perf_counter() - began
    text = (folder / "runs" / "right" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    held_out = next(line["eval_figures"] for line in reversed(lines) if "eval_figures" in line)
    return [line["figures"]["reward"] for line in lines], held_out["reward"], took_s


def _paceline(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "paceline", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}")


def _page(runs: list[dict[str, Any]], steps: int, about: dict[str, Any]) -> str:
    shown = [*range(0, steps, _SHOWN_EVERY), steps - 1]
    rows = [
        (
            str(run["seed"]),
            *(f"{run['rewards'][at]:.2f}" for at in shown),
            f"{run['held_out']:.3f}",
            f"{run['took_s']:.0f}",
        )
        for run in runs
    ]
    header = ("seed", *(f"step {at + 1}" for at in shown), "held out, at the end", "s")
    share = mean(run["held_out"] for run in runs)
    sentence = f"{share:.1%} of completions of held-out prompts are right in the end."
    return f"Share of completions that are right. {sentence}\n\n{markdown(header, rows)}\n" + (
        f"{signature(about)}\n"
    )


def main() -> None:
    """Learn the task from several seeds."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    about, runs = taken_with("benchmarks.rewards"), []
    for seed in range(asked.seeds):
        with tempfile.TemporaryDirectory() as name:
            write_task(Path(name), asked.steps, seed)
            rewards, held_out, took_s = learn(Path(name))
        runs.append({"seed": seed, "rewards": rewards, "held_out": held_out, "took_s": took_s})
    page = _page(runs, asked.steps, about)
    print(page)
    keep(folder_of(asked.results, about), "rewards", {"about": about, "runs": runs}, page)


if __name__ == "__main__":
    main()
