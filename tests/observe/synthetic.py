"""A made-up Run with realistic numbers: what the loop would have written, without training."""

import math
import random
from pathlib import Path
from typing import Any

from paceline.observe.run import Run, json_lines

JOB = """\
name = "demo"

[model]
family = "decoder"
vocab_size = 4096
hidden_size = 256

[cluster]
num_nodes = 1
devices_per_node = 2

[layout]
dp = 2
fsdp = 1
micro_batch = 8
precision = "fp32"

[train]
steps = {steps}
global_batch = 16
seq_len = 256
"""

REASONS = {
    "layout.dp": "every one of the 2 devices takes part",
    "layout.fsdp": "a whole replica fits on one device",
    "layout.micro_batch": "the largest divisor of 8 samples a rank up to 8",
    "layout.precision": "the safest fast arithmetic of <this CPU> & no other",
}

FACTS: dict[str, Any] = {
    "paceline": "0.1.0",
    "commit": "3f2a91c",
    "torch": "2.13.0+cpu",
    "python": "3.11.2",
    "host": "node-07",
    "device": "Xeon Platinum 8481C",
    "num_ranks": 2,
    "threads_per_rank": 1,
    "num_params": 5_310_720,
    "train_flops_per_token": 33_500_000.0,
    "peak_flops": None,
    "unit": "tokens",
    "data": {
        "train_tokens": 5_912_344,
        "eval_tokens": 61_022,
        "vocab_size": 4096,
        "unigram_loss": 6.31,
    },
    "started": 1_763_630_000.0,
}

# Shares of a profiled step; what is left is unattributed.
_SHARES = {
    "matmul": 0.52,
    "attention": 0.09,
    "other_kernels": 0.17,
    "optimizer": 0.05,
    "exposed_comm.dp": 0.08,
    "data_wait": 0.004,
    "host_gap": 0.06,
    "checkpoint_stall": 0.0,
}


def lines(num_steps: int, profile_every: int = 60, unit: str = "tokens") -> list[dict[str, Any]]:
    """The metrics.jsonl of a run that learns, with noise, spikes and a slow first step."""
    rng = random.Random(7)
    return [_line(rng, step, num_steps, profile_every, unit) for step in range(1, num_steps + 1)]


def _line(
    rng: random.Random, step: int, num_steps: int, profile_every: int, unit: str
) -> dict[str, Any]:
    done = step / num_steps
    loss = 3.6 + 4.8 * math.exp(-6 * done) + rng.gauss(0, 0.08)
    seconds = 0.41 * rng.uniform(0.96, 1.06) * (2.4 if step == 1 else 1.0)
    profiled = bool(profile_every) and step >= profile_every and step % profile_every < 2
    line = {
        "step": step,
        unit: step * 4096,
        "loss": loss,
        "lr": 2e-3 * min(step / 20, 0.55 + 0.45 * math.cos(math.pi * done)),
        "grad_norm": 0.6 + 2.5 * math.exp(-8 * done) + abs(rng.gauss(0, 0.15)),
        "step_time_s": seconds,
        "terms": _terms(rng, seconds, profiled),
        "profiled": profiled,
        f"{unit}_per_s": 4096 / seconds,
        "mfu": None,
        "memory_bytes": 790_000_000 + min(step, 50) * 400_000,
        "skipped": 0,
        "time": 1_763_630_000.0 + 0.42 * step,
    }
    if step == num_steps or step % max(1, num_steps // 6) == 0:
        line["eval_loss"] = loss + 0.09
        if unit == "tokens":
            line["eval_perplexity"] = math.exp(loss + 0.09)
    return line


def _terms(rng: random.Random, seconds: float, profiled: bool) -> dict[str, float]:
    shares = _SHARES if profiled else {"data_wait": 0.003, "optimizer": 0.05}
    terms = {term: seconds * share * rng.uniform(0.9, 1.1) for term, share in shares.items()}
    return {**terms, "checkpoint_stall": 0.0, "unattributed": seconds - sum(terms.values())}


def run(
    path: Path,
    steps: list[dict[str, Any]],
    facts: dict[str, Any] | None = None,
    num_steps: int | None = None,
) -> Run:
    """Write a Run directory that holds these steps."""
    made = Run(path)
    made.write("job.toml", JOB.format(steps=num_steps or max(1, len(steps))))
    made.write_json("plan.json", {"reasons": REASONS})
    made.write_json("facts.json", FACTS if facts is None else facts)
    made.write("metrics.jsonl", json_lines(steps))
    return made
