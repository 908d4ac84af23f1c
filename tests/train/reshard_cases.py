"""What the tests of changed layouts run: parts of a small run, through the loop, on real data."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.comm import rendezvous
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_job, to_toml
from paceline.observe.profile import ProfiledWindows
from paceline.observe.run import Run
from paceline.plan.resolve import resolve
from paceline.train.best_evaluation import BestEvaluation
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.loading import load, newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.state import training_state
from paceline.train.families import task_of
from paceline.train.loop import train_loop
from paceline.train.metrics_buffer import MetricsBuffer
from paceline.train.run_context import RunContext
from paceline.train.start import identity
from paceline.train.trainer import Trainer
from tests.parallel.training import CPU
from tests.ranks import run_ranks

FIRST, SECOND = 2, 2
"""Steps under the first and under the second layout."""
# The learning rate differs from step to step: one that began anew would be seen. The vocabulary is
# that of bytes, up to a number that tensor parallelism can share out.
SMALL = (
    "model.hidden_size=32", "model.ffn_size=48", "model.num_layers=4", "model.num_heads=4",
    "model.num_kv_heads=4", "model.head_dim=8", "model.max_seq_len=24", "model.vocab_size=264",
    "train.seq_len=24", "train.global_batch=12", f"train.steps={FIRST + SECOND}", "optim.eps=1e-3",
    "optim.warmup_steps=1", "optim.clip_norm=0.5", "optim.lr=1e-2", "data.tokenizer=bytes",
)  # fmt: skip


class Leg(NamedTuple):
    """A part of a run, from its newest checkpoint on. Beside the folder of the Run lies what it
    reads: a text, and conversations where it trains on answers."""

    folder: Path
    num_ranks: int
    settings: tuple[str, ...]
    stop_after: int | None = None
    """Steps after which it is asked to stop; None: it runs to its end."""


class StopAfter:
    """A wish to stop that comes during a step; the loop asks once a step."""

    def __init__(self, steps: int | None) -> None:
        self.left = steps

    def __bool__(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left == 0

    def in_exchange(self) -> bool:
        return bool(self)

    def stepped(self, done: int) -> None:
        pass


def job_of(folder: Path, num_ranks: int, settings: Sequence[str]) -> Job:
    """The Job of a leg."""
    is_chat = "data.records=chat" in settings
    source = folder.parent / ("talks.jsonl" if is_chat else "text.txt")
    own = (f"data.source={source}", f"data.cache_dir={folder.parent / 'cache'}")
    machine = Cluster(device=CPU, devices_per_node=num_ranks, num_nodes=1)
    return resolve(read_job(None, [*SMALL, *own, *settings]), machine).job


def trainer_of(folder: Path, rank: int, num_ranks: int, settings: Sequence[str]) -> Trainer:
    """A rank of a leg, ready to train on the text."""
    job = job_of(folder, num_ranks, settings)
    mine = rendezvous.Ranks(rank, num_ranks, rank, num_ranks)
    return Trainer.of(job, mine, task_of(job, mine))


def go_on(rank: int, num_ranks: int, leg: Leg) -> list[dict[str, Any]]:
    """Train a leg through the loop, and return the lines of its steps."""
    run = Run(leg.folder)
    trainer = trainer_of(leg.folder, rank, num_ranks, leg.settings)
    lines: list[dict[str, Any]] = []
    context = RunContext(
        run=run,
        checkpointer=Checkpointer(run.checkpoint_folder, keep_last=2, say=lambda sentence: None),
        windows_from=lambda first: ProfiledWindows(run.trace_folder, rank, 0, first_step=first),
        stop=StopAfter(leg.stop_after),
        metrics_buffer=MetricsBuffer(lines.append, 0, 5),
        identity=identity(trainer.job, trainer.task.data_key),
        best=BestEvaluation(trainer.job),
    )
    if rank == 0:
        run.write("job.toml", to_toml(trainer.job))
    # No held-out batches: the loop would read some after the last step.
    trainer.task = dataclasses.replace(trainer.task, eval_steps=None)
    assert train_loop(trainer, context) == (leg.stop_after or FIRST + SECOND)
    return lines


def go_on_many(rank: int, num_ranks: int, legs: Sequence[Leg]) -> list[list[dict[str, Any]]]:
    return [go_on(rank, num_ranks, leg) for leg in legs]


def run_legs(legs: Sequence[Leg]) -> dict[Path, list[list[dict[str, Any]]]]:
    """Folder -> the lines of each rank."""
    lines: dict[Path, list[list[dict[str, Any]]]] = {}
    for num_ranks in sorted({leg.num_ranks for leg in legs}):
        mine = [leg for leg in legs if leg.num_ranks == num_ranks]
        if num_ranks == 1:
            per_rank = [go_on_many(0, 1, mine)]
        else:
            per_rank = run_ranks(go_on_many, num_ranks, mine)
        for leg, of_leg in zip(mine, zip(*per_rank, strict=True), strict=True):
            lines[leg.folder] = list(of_leg)
    return lines


def whole_state(folder: Path, model: Sequence[str]) -> dict[str, Any]:
    """The last checkpoint of a run, put together in one process."""
    trainer = trainer_of(folder, 0, 1, model)
    found, _ = newest_good(Run(folder).checkpoint_folder, LockstepRanks.alone(), print)
    assert found is not None
    assert found.step == FIRST + SECOND
    state = training_state(trainer.module, trainer.update.optimizer, found)
    return {**state, "facts": load(found, state, LockstepRanks.alone())}
