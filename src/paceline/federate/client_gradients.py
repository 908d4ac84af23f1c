"""Computes a client's gradients: each round's on the next batch of its Job, from what is shared.

A process of its own that stays from round to round: `python -m paceline.federate.client_gradients
FOLDER`. `gradients_process` is its other end.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.job import read_job
from paceline.config.model import Model
from paceline.federate.shared_file import GRADIENT
from paceline.models.decoder import Decoder
from paceline.models.peft_format import load_adapters, write_adapters
from paceline.models.weights import load_weights, write_weights
from paceline.train.families import task_of
from paceline.train.session import ranks_of
from paceline.train.stopping import exit_with_parent
from paceline.train.task import Step
from paceline.train.this_machine import resolve_on_this_machine
from paceline.train.trainer import Trainer


def main(folder: Path) -> None:
    """Answer rounds until the input ends, each with its number and its samples.

    Args:
        folder: the client's own: job.toml, and adapters/ or weights/, which each round reads anew.
    """
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    job = resolve_on_this_machine(read_job(folder / "job.toml")).job
    torch.manual_seed(job.train.seed)
    ranks = ranks_of(job)
    trainer = Trainer.of(job, ranks, task_of(job, ranks))
    samples, following = job.train.global_batch, 0
    steps: Iterator[Step] = iter(())
    for line in asked:
        if (number := int(line)) != following or not number:  # it had no part in some rounds
            steps = trainer.task.steps_from(number * samples)
        following = number + 1
        _read(trainer, folder)
        tally = trainer.passes.forward_backward(number, trainer.passes.prepared(next(steps)))
        weight = tally.sums()[1] * trainer.passes.loss_scale.value
        _write(trainer, samples / float(weight), folder / GRADIENT)
        trainer.update.optimizer.zero_grad()
        print(number, samples, file=answers, flush=True)


def _read(trainer: Trainer, folder: Path) -> None:
    assert isinstance(trainer.module, Decoder)
    if trainer.job.finetune.is_adapted:
        load_adapters(trainer.module, str(folder / "adapters"))
    else:
        load_weights(trainer.module, folder / "weights")


def _write(trainer: Trainer, factor: float, folder: Path) -> None:
    """Write the gradients times a factor, laid out as what is shared."""
    job, module = trainer.job, trainer.module
    assert isinstance(job.model, Model)
    found: dict[str, Tensor] = {
        name: torch.zeros_like(each) if each.grad is None else each.grad.float() * factor
        for name, each in module.state_dict(keep_vars=True).items()
    }
    shutil.rmtree(folder, ignore_errors=True)
    if job.finetune.is_adapted:
        write_adapters(folder, job.model, found, job.finetune, None, torch.float32)
    else:
        write_weights(folder, job.model, found, max_shard_bytes=sys.maxsize)


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    main(Path(sys.argv[1]))
