"""Trains for a client, from what is shared: a gradient a round on the next batch, or some steps.

A process of its own that stays from round to round: `python -m paceline.federate.client_training
FOLDER`. `training_process` is its other end.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.config.files import to_disk
from paceline.config.job import Job, read_job
from paceline.config.model import Model
from paceline.federate.optimizer_state import Optimizer, state_of, take_state
from paceline.federate.shared_file import FOUND
from paceline.models.decoder import Decoder
from paceline.models.peft_format import load_adapters, write_adapters
from paceline.models.weights import load_weights, write_weights
from paceline.train.families import task_of
from paceline.train.session import ranks_of
from paceline.train.stopping import exit_with_parent
from paceline.train.task import Step
from paceline.train.this_machine import resolve_on_this_machine
from paceline.train.trainer import Trainer

_STATE = "optimizer-"
"""Begins the names of files with an optimizer's state after a round."""


def main(folder: Path) -> None:
    """Answer rounds until the input ends, each with its number and its samples.

    A line of the input has a round's number, steps, and what these train; 0 steps: the gradient of
    all is asked for.

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
    batches: Iterator[Step] = iter(())
    for line in asked:
        *numbers, factor = line.split()
        number, num_steps = map(int, numbers)
        # Round 0 finds what round 1 will find.
        first = max(number - 1, 0) * num_steps if num_steps else number
        if first != following or not first:  # it had no part in some rounds
            batches = trainer.task.steps_from(first * samples)
        following = first + (num_steps or 1)
        _read(trainer, folder)
        if num_steps:
            optimizer = trainer.update.optimizer
            assert isinstance(optimizer, Optimizer)
            with _trains_only(trainer.module, factor), _kept_state(optimizer, folder, number):
                found = _change(trainer, range(first, following), batches)
        else:
            found = _gradient(trainer, number, next(batches))
        _write(job, {name: each * samples for name, each in found.items()}, folder / FOUND)
        print(number, samples, file=answers, flush=True)


def _read(trainer: Trainer, folder: Path) -> None:
    assert isinstance(trainer.module, Decoder)
    if trainer.job.finetune.is_adapted:
        load_adapters(trainer.module, str(folder / "adapters"))
    else:
        load_weights(trainer.module, folder / "weights")


def _gradient(trainer: Trainer, number: int, step: Step) -> dict[str, Tensor]:
    """The mean over a batch, by name."""
    tally = trainer.passes.forward_backward(number, trainer.passes.prepared(step))
    weight = float(tally.sums()[1] * trainer.passes.loss_scale.value)
    found = {
        name: torch.zeros_like(each) if each.grad is None else each.grad.float() / weight
        for name, each in trainer.module.state_dict(keep_vars=True).items()
    }
    trainer.update.optimizer.zero_grad()
    return found


def _change(trainer: Trainer, indices: range, batches: Iterator[Step]) -> dict[str, Tensor]:
    """What steps come to, by name.

    Args:
        indices: of the steps, for the learning rate's schedule over all rounds.
        batches: the next ones are theirs.
    """
    named = trainer.module.state_dict(keep_vars=True)
    before = {
        name: each.detach().float().clone() for name, each in named.items() if each.requires_grad
    }
    for index in indices:
        trainer.step(index, next(batches))()
    return {
        name: each.detach().float() - before[name] if name in before else torch.zeros_like(each)
        for name, each in named.items()
    }


@contextmanager
def _trains_only(module: nn.Module, factor: str) -> Iterator[None]:
    """One matrix of adapters is trained, or "all" that is."""
    others = [
        p
        for name, p in module.named_parameters()
        if p.requires_grad and factor != "all" and f"lora_{factor}." not in name
    ]
    for p in others:
        p.requires_grad_(False)
    yield
    for p in others:
        p.requires_grad_(True)


@contextmanager
def _kept_state(optimizer: Optimizer, folder: Path, number: int) -> Iterator[None]:
    """An optimizer goes on as the client's newest round before this one left it.

    So a round that is asked for once more, or round 0, which round 1 repeats, counts once. The
    state that it came from stays beside its own.
    """

    def number_of(file: Path) -> int:
        return int(file.stem.removeprefix(_STATE))

    kept = sorted(folder.glob(f"{_STATE}*[0-9].safetensors"), key=number_of)
    before = [file for file in kept if number_of(file) < number]
    take_state(optimizer, load_file(before[-1]) if before else {})
    yield
    if number:
        made = folder / f"{_STATE}{number}.safetensors"
        partial = made.with_suffix(".partial")
        save_file(state_of(optimizer), partial)
        to_disk(partial)
        partial.replace(made)
        for file in before[:-1]:
            file.unlink()


def _write(job: Job, found: dict[str, Tensor], folder: Path) -> None:
    """Write numbers by name, laid out as what is shared."""
    assert isinstance(job.model, Model)
    shutil.rmtree(folder, ignore_errors=True)
    if job.finetune.is_adapted:
        write_adapters(folder, job.model, found, job.finetune, None, torch.float32)
    else:
        write_weights(folder, job.model, found, max_shard_bytes=sys.maxsize)


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    main(Path(sys.argv[1]))
