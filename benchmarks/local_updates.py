"""Final loss of workers that step each for itself, against replicas that agree at every step.

Four workers and a small decoder on a Markov chain of tokens that is ours; equal tokens, the same
seeds, held-out loss at the end. Prints a line per run, as JSON.

    python -m benchmarks.local_updates --steps 240 --seeds 0 1 2
"""

import argparse
import json
from collections.abc import Sequence

import torch

from paceline.comm.ranks import Ranks
from paceline.config.hardware import Cluster, Device
from paceline.config.job import read_job
from paceline.plan.resolve import resolve
from paceline.train.data import MicroBatch
from paceline.train.task import Task, decoder_on_meta, fill_decoder, next_token, whole
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
METHODS = {
    "synchronous": (),
    "local_sgd": ("comm.local.method=local_sgd", "comm.local.every=20"),
    "diloco": ("comm.local.method=diloco", "comm.local.every=20"),
    "streaming int4": (
        *("comm.local.method=streaming", "comm.local.every=20", "comm.local.fragments=2"),
        *("comm.local.overlap_steps=5", "comm.local.compress=int4"),
    ),
}
_NUM_HELD_OUT = 8


def _chain(length: int, num_rows: int, seed: int) -> torch.Tensor:
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
    tokens = _chain(SEQ + 1, BATCH, seed).chunk(NUM_WORKERS)[rank]
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
    staged = next_token(job, ranks)
    model = decoder_on_meta(job.model)
    task = Task(
        model, whole(staged), lambda first: iter(()), None, "tokens", staged=staged,
        fill=lambda module: fill_decoder(job.train, module),
    )  # fmt: skip
    trainer = Trainer.of(job, ranks, task)
    sent = 0.0
    for step in range(steps):
        read = trainer.step(step, _part(1_000_000 * (seed + 1) + step, rank))
        trainer.meet(step + 1, at_once=step + 1 == steps)
        sent += trainer.local.sent_bytes if trainer.local is not None else 0
    read()
    held_out = [_part(-1 - number, rank) for number in range(_NUM_HELD_OUT)]
    return trainer.evaluate(held_out), sent / steps


def main() -> None:
    """Run every method with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    asked = parser.parse_args()
    for seed in asked.seeds:
        cases = [(method, seed) for method in asked.methods]
        results = run_ranks(_train, NUM_WORKERS, asked.steps, cases, timeout_s=3600)[0]
        for (method, _), (loss, sent) in zip(cases, results, strict=True):
            line = {"method": method, "seed": seed, "loss": loss, "bytes_per_step": sent}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
