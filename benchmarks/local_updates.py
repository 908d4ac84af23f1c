"""Final loss of workers that step each for itself, against replicas that agree at every step.

How it works: four workers and a small decoder on a Markov chain of tokens that is ours; equal
tokens, the same seeds, schedules and inner learning rate, loss on held-out rows at the end. The
replicas that agree have their best learning rate of 0.005, 0.01 and 0.02 (loss after 800 steps,
mean of three seeds: 2.741, 2.737, 2.738). Nobody begins from a network that was trained before, as
DiLoCo's workers do in its paper. The difference is taken within a seed, then the mean of all.

What it doesn't say: anything about seconds (network.py does), or about many rounds on large data.

    python -m benchmarks.local_updates [--steps 800] [--seeds 0 1 2]

Prints a line per run, as JSON, and keeps them in results/<device>/local_updates.{json,md}. 15
minutes on two quiet cores; other work beside it costs time, but changes no figure.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from paceline.comm.compress.means import exact_bytes
from paceline.comm.rendezvous import Ranks
from paceline.config.hardware import Cluster, Device
from paceline.config.job import read_job
from paceline.plan.resolve import resolve
from paceline.train.data import MicroBatch
from paceline.train.language import decoder_task
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks

NUM_WORKERS, BATCH, SEQ, VOCAB = 4, 32, 32, 64
CPU = Device(name="CPU", kind="cpu", precisions=("fp32",))
MODEL = (
    f"model.vocab_size={VOCAB}", "model.hidden_size=48", "model.ffn_size=128", "model.num_layers=2",
    "model.num_heads=4", "model.num_kv_heads=4", f"model.max_seq_len={SEQ}", "model.head_dim=12",
    f"train.seq_len={SEQ}", f"train.global_batch={BATCH}", "optim.lr=1e-2", "optim.warmup_steps=20",
    "layout.precision=fp32", f"layout.dp={NUM_WORKERS}", "layout.micro_batch=8",
)  # fmt: skip
PEER = "synchronous"
_FEW_ROUNDS = ("comm.local.outer_lr=0.9", "comm.local.outer_momentum=0.6")
_STREAMING = (
    *("comm.local.method=streaming", "comm.local.every=20", "comm.local.fragments=2"),
    *("comm.local.overlap_steps=5", "comm.local.compress=int4"),
)
METHODS = {
    PEER: (),
    "local_sgd": ("comm.local.method=local_sgd", "comm.local.every=20"),
    "diloco": ("comm.local.method=diloco", "comm.local.every=20"),
    "diloco, momentum 0.6": ("comm.local.method=diloco", "comm.local.every=20", *_FEW_ROUNDS),
    "streaming int4": _STREAMING,
    "streaming int4, momentum 0.6": (*_STREAMING, *_FEW_ROUNDS),
}
"""Without more, the outer optimizer is that of DiLoCo's paper: learning rate 0.7, momentum 0.9."""
_NUM_HELD_OUT = 8


@dataclass(frozen=True)
class Run:
    """One training."""

    method: str
    seed: int
    loss: float
    """On held-out rows, at the end."""
    bytes_per_step: float
    """That a worker sends."""


def markov_rows(length: int, num_rows: int, seed: int) -> torch.Tensor:
    """Rows of a Markov chain whose transitions are the same for every seed: (rows, length)."""
    logits = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    transitions = logits.softmax(-1)
    stream = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCAB, (num_rows,), generator=stream)]
    for _ in range(length - 1):
        rows.append(torch.multinomial(transitions[rows[-1]], 1, generator=stream)[:, 0])
    return torch.stack(rows, dim=1)


def _part(seed: int, rank: int) -> list[MicroBatch]:
    """A worker's part of the batch of that seed."""
    tokens = markov_rows(SEQ + 1, BATCH, seed).chunk(NUM_WORKERS)[rank]
    return [MicroBatch(tokens[:, :-1], tokens[:, 1:], None)]


def _train(
    rank: int, num_ranks: int, steps: int, cases: Sequence[tuple[str, int]]
) -> list[tuple[float, float]]:
    """For each case the held-out loss at the end, and the mean bytes sent a step."""
    return [_train_one(rank, num_ranks, steps, *case) for case in cases]


def _train_one(
    rank: int, num_ranks: int, steps: int, method: str, seed: int
) -> tuple[float, float]:
    settings = [*MODEL, *METHODS[method], f"train.steps={steps}", f"train.seed={seed}"]
    cluster = Cluster(device=CPU, devices_per_node=num_ranks, num_nodes=1)
    job = resolve(read_job(None, settings), cluster).job
    ranks = Ranks(rank, num_ranks, rank, num_ranks)
    trainer = Trainer.of(job, ranks, decoder_task(job.model, job, ranks))
    each_step = exact_bytes(4 * job.model.num_params, num_ranks)
    sent = 0.0
    for step in range(steps):
        read = trainer.step(step, _part(1_000_000 * (seed + 1) + step, rank))
        trainer.agreement.meet(step + 1, at_once=step + 1 == steps)
        sent += trainer.replicas.sent().get("dp.bytes", each_step)
    read()
    held_out = [_part(-1 - number, rank) for number in range(_NUM_HELD_OUT)]
    return trainer.evaluate(held_out)[0], sent / steps


def runs_of(seed: int, methods: Sequence[str], steps: int) -> list[Run]:
    """Train once by each method, from the same weights on the same tokens."""
    cases = [(method, seed) for method in methods]
    results = run_ranks(_train, NUM_WORKERS, steps, cases, timeout_s=4 * 3600)[0]
    return [Run(*case, *result) for case, result in zip(cases, results, strict=True)]


def table(runs: Iterable[Run]) -> str:
    """A line for each method, in Markdown; the peer is among them."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run.method, {})[run.seed] = run
    lines = [
        "| method | kB sent a step | held-out loss (seeds) | to synchronous (seeds) |",
        "|---|---:|---:|---:|",
    ]
    for method, by_seed in found.items():
        losses = [run.loss for run in by_seed.values()]
        apart = [run.loss / found[PEER][seed].loss - 1 for seed, run in by_seed.items()]
        sent = mean(run.bytes_per_step for run in by_seed.values())
        lines.append(
            f"| {method} | {sent / 1e3:.1f} | {mean(losses):.4f} ({min(losses):.4f} – "
            f"{max(losses):.4f}) | {mean(apart):+.2%} ({min(apart):+.2%} – {max(apart):+.2%}) |"
        )
    return "\n".join(lines) + "\n"


def facts(steps: int) -> dict[str, Any]:
    """What the figures were taken with and on."""
    about = {"steps": steps, "settings": [*MODEL], "methods": METHODS}
    return {**taken_with("benchmarks.local_updates"), **about}


def write_results(results: Path, about: dict[str, Any], runs: Sequence[Run]) -> Path:
    """Write local_updates.json with every run, and local_updates.md with the table."""
    kept = {"facts": about, "runs": [asdict(run) for run in runs]}
    size = f"{about['steps']} steps, {NUM_WORKERS} workers on"
    page = f"{table(runs)}\n{size} {signature(about)}\n"
    return keep(folder_of(results, about), "local_updates", kept, page)


def main() -> None:
    """Run every method with every seed."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=[], choices=[*METHODS], metavar="METHOD")
    asked = parser.parse_args()
    methods = [name for name in METHODS if name == PEER or name in (asked.methods or METHODS)]
    about = facts(asked.steps)
    runs: list[Run] = []
    for seed in asked.seeds:
        runs += runs_of(seed, methods, asked.steps)
        for run in runs[-len(methods) :]:
            print(json.dumps(asdict(run)), flush=True)
    print(f"{table(runs)}\nresults: {write_results(asked.results, about, runs)}")


if __name__ == "__main__":
    main()
