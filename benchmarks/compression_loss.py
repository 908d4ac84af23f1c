"""Loss at the end of training with gradients in each compressed form, against exact sums.

How it works: one process is two replicas. Each has its own micro-batch of every step and its own
errors; their gradients go through the codecs of `comm.compress` as `comm.compress.means` sends
them: each replica's is coded, and what is decoded of both is added up. (PowerSGD is linear in the
replicas' gradients, so there its own code averages the one mean gradient with the sum of the
errors.) Decoder, text, AdamW, clipping and schedule are Paceline's; a run of a seed sees the same
tokens from the same weights in every form.

A form's distance is that of its held-out loss to the exact run's of the same seed; the table gives
the mean, least and most over the seeds. No link is needed, and no time is measured.

    python -m benchmarks.compression_loss [--forms int8 int4 quinary] [--seeds 0 1 2] [--steps 400]
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.provenance import folder_of, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.comm.collectives import wait
from paceline.comm.compress.codec import BlockCodec
from paceline.comm.compress.codecs import codec_of
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.compress.feedback import BufferPart
from paceline.comm.compress.low_rank import LowRankMeans
from paceline.comm.compress.scaled import ScaledMeans, ScaleUnits
from paceline.comm.rendezvous import Ranks
from paceline.config.comm import Codec, codec
from paceline.config.job import Job, read_job
from paceline.machine.discovery import num_cores, this_machine
from paceline.machine.freed_memory import keep_freed_memory
from paceline.plan.resolve import resolve
from paceline.train.data import prepare
from paceline.train.families import task_of
from paceline.train.learning_rates import learning_rate
from paceline.train.optimizers import build_optimizer

FORMS = ("quinary", "int4", "int8", "powersgd:32", "onebit", "powersgd:16", "topk:0.1")
EXACT = "none"
NUM_REPLICAS = 2
SETTINGS = (
    *("name=compression_loss", "data.tokenizer=bpe:512", "model.vocab_size=512"),
    *("model.hidden_size=128", "model.ffn_size=320", "model.num_layers=3", "model.num_heads=4"),
    *("model.num_kv_heads=4", "model.max_seq_len=64", "model.tie_embeddings=true"),
    *("layout.dp=1", "layout.micro_batch=8", "layout.precision=fp32", "layout.compile=false"),
    *("layout.recompute=none", f"train.global_batch={8 * NUM_REPLICAS}", "train.seq_len=64"),
    *("train.eval_batches=32", "optim.lr=1e-3", "optim.warmup_steps=20"),
)
"""A decoder of 0.6 M parameters, of which the embedding has as small a part as in network.py's."""

Mean = Callable[[list[Tensor]], Tensor]
"""Of the replicas' gradients, flat (n,) each, which it may change: as they arrive."""


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    form: str
    seed: int
    steps: int
    warmup_steps: int
    """Exact ones."""
    losses: list[float]
    """Of each step, mean of the replicas."""
    eval_loss: float


def job_of(steps: int, seed: int) -> Job:
    """What every run trains; a step has a micro-batch for each replica."""
    job = read_job(None, [*SETTINGS, f"train.steps={steps}", f"train.seed={seed}"])
    return resolve(job, this_machine().replace(num_nodes=1, devices_per_node=1)).job


def block_mean(coder: BlockCodec, num_values: int, units: ScaleUnits | None) -> Mean:
    """The mean in the form of a codec, with errors that are kept from call to call."""
    errors = [torch.zeros(num_values) for _ in range(NUM_REPLICAS)]
    payload = torch.zeros(coder.num_bytes(num_values), dtype=torch.uint8)

    def average(gradients: list[Tensor]) -> Tensor:
        if units is None:
            return coded(gradients)
        units.divide(*gradients, *errors)
        arrived = coded(gradients)
        units.multiply(arrived, *errors)
        units.learn(arrived)
        return arrived

    def coded(gradients: list[Tensor]) -> Tensor:
        arrived = torch.empty(num_values)
        for replica, (gradient, error) in enumerate(zip(gradients, errors, strict=True)):
            coder.encode_with_error(gradient / NUM_REPLICAS, error, payload)
            coder.decode(payload, arrived, add=replica > 0)
        return arrived

    return average


def low_rank_mean(means: LowRankMeans, parts: Sequence[BufferPart], num_values: int) -> Mean:
    """The mean in the form of thin products."""
    one, errors = means.mean_of(parts, torch.empty(0)), torch.zeros(num_values)

    def average(gradients: list[Tensor]) -> Tensor:
        total = torch.stack(gradients).mean(0)
        wait(one.average(total, errors))
        return total

    return average


def compressed_mean(form: Codec, named: Mapping[str, Tensor], least: int) -> tuple[list[str], Mean]:
    """Which tensors travel in a form, and their mean."""
    means = compressor_of(form, dist.group.WORLD)
    names = [k for k, p in named.items() if p.numel() >= least and means.takes(p.shape)]
    parts = [BufferPart(name, named[name].shape, True) for name in names]
    num_values = sum(part.num_values for part in parts)
    if isinstance(means, LowRankMeans):
        return names, low_rank_mean(means, parts, num_values)
    units = ScaleUnits(parts, {}, torch.empty(0)) if isinstance(means, ScaledMeans) else None
    return names, block_mean(codec_of(form), num_values, units)


class Replicas:
    """The gradients of all replicas, and their mean.

    Args:
        module: computes them, one replica after the other.
        form: they travel in; None: none.
        least: values of a tensor that is compressed.
    """

    def __init__(self, module: nn.Module, form: Codec | None, least: int) -> None:
        self._named = dict(module.named_parameters())
        self._average: Mean | None = None
        if form is not None:
            names, self._average = compressed_mean(form, self._named, least)
            self._compressed = [self._named[name] for name in names]
        self._given: list[Tensor] = []

    def take(self, *, exact: bool) -> None:
        """Keep what one replica's backward pass left apart, unless it is to be summed up."""
        if not exact and self._average is not None:
            self._given.append(torch.cat([_taken(p) for p in self._compressed]))

    def finish(self) -> None:
        """Leave the mean as the parameters' gradients."""
        for parameter in self._named.values():
            if parameter.grad is not None:
                parameter.grad /= NUM_REPLICAS
        if self._given and self._average is not None:
            arrived = self._average(self._given).split([p.numel() for p in self._compressed])
            for parameter, values in zip(self._compressed, arrived, strict=True):
                parameter.grad = values.view(parameter.shape).clone()
            self._given = []


def _taken(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of a decoder has a gradient"
    gradient, parameter.grad = parameter.grad, None
    return gradient.flatten()


def train(form: str, seed: int, steps: int, warmup_steps: int) -> Trained:
    """Train in a form of exchange.

    Args:
        form: as in comm.dp.compress.
        seed: of weights and batches.
        steps: of the whole run.
        warmup_steps: the first ones, that are exact.
    """
    job = job_of(steps, seed)
    task = task_of(job, Ranks())
    module = task.module.to_empty(device="cpu")
    assert task.fill is not None
    assert task.eval_steps is not None
    task.fill(module)
    optimizer = build_optimizer(module.named_parameters(), job.optim, job.layout)
    chosen = None if form == EXACT else codec(form)
    replicas = Replicas(module, chosen, job.comm.compress_from)
    losses = []
    for index, batch in enumerate(islice(task.steps_from(0), steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.optim, index, steps)
        found = []
        for micro_batch in batch:
            loss = task.loss(module, micro_batch)
            loss.backward()
            replicas.take(exact=index < warmup_steps)
            found.append(loss.item())
        replicas.finish()
        clip_grad_norm_(module.parameters(), job.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(found))
    with torch.no_grad():
        held_out = [task.loss(module, one).item() for step in task.eval_steps() for one in step]
    return Trained(form, seed, steps, warmup_steps, losses, mean(held_out))


def table(runs: Sequence[Trained]) -> str:
    """Held-out losses beside those of exact sums, of the seeds that are there."""
    exact = {run.seed: run.eval_loss for run in runs if run.form == EXACT}
    lines = []
    for form in dict.fromkeys(run.form for run in runs):
        of = [run for run in runs if run.form == form and run.seed in exact]
        if not of:
            continue
        apart = [run.eval_loss / exact[run.seed] - 1 for run in of]
        loss = mean(run.eval_loss for run in of)
        spread = f"{min(apart):+.2%} – {max(apart):+.2%}"
        lines.append((form, f"{loss:.4f}", f"{mean(apart):+.2%}", spread, str(len(of))))
    return markdown(("form", "held-out loss", "to exact", "least – most", "seeds"), lines)


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were taken with and on."""
    job = job_of(options.steps, 0)
    prepare(job.data)  # tokenised once, not by every process
    about = {"num_params": job.model.num_params, "settings": SETTINGS}
    return {**taken_with("benchmarks.compression_loss"), **about}


def write(file: Path, about: dict[str, Any], runs: Sequence[Trained]) -> None:
    """Write every step's loss as JSON, and the table beside it."""
    result = {"facts": about, "runs": [asdict(run) for run in runs]}
    file.write_text(json.dumps(result) + "\n")
    size = f"{about['num_params'] / 1e6:.2f} M parameters, {NUM_REPLICAS} replicas"
    steps = f"{runs[0].steps} steps, the first {runs[0].warmup_steps} exact"
    text = f"{table(runs)}\n{size}, {steps}; {signature(about)}\n"
    file.with_suffix(".md").write_text(text)


def _prepare_process() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    """Run every form with every seed, a process for each core."""
    options = _options()
    about = facts(options)
    name = f"compression_loss_after_{options.warmup_steps}.json"
    file = folder_of(options.results, about) / name
    cases = [(form, seed) for form in (EXACT, *options.forms) for seed in options.seeds]
    spawn = multiprocessing.get_context("spawn")
    runs: list[Trained] = []
    with ProcessPoolExecutor(num_cores(), spawn, initializer=_prepare_process) as pool:
        jobs = [pool.submit(train, *case, options.steps, options.warmup_steps) for case in cases]
        for done in as_completed(jobs):
            runs.append(done.result())
            print(f"seed {runs[-1].seed}  {runs[-1].form:<12} {runs[-1].eval_loss:.4f}", flush=True)
            order = sorted(runs, key=lambda run: cases.index((run.form, run.seed)))
            write(file, about, order)
    print(table(order))
    print(f"results: {file}, load {os.getloadavg()[0]:.1f}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--forms", nargs="+", default=[*FORMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="more than the learning rate's 20")
    parser.add_argument("--warmup-steps", type=int, default=0, help="the first ones, exact")
    return parser.parse_args()


if __name__ == "__main__":
    main()
