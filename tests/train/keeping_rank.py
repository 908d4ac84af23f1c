"""Ranks that leave their parameters behind: `python -m tests.train.keeping_rank train JOB ...` is
`paceline train JOB ...`, and writes runs/<name>/parameters-<rank>.pt when a rank is through."""

import os
from pathlib import Path

import torch

from paceline.train import command, session
from paceline.train.loop import RunContext
from paceline.train.task import Task
from paceline.train.trainer import Trainer


def keeping_rank(run_path: str, launcher_pid: int) -> None:
    """What a launched rank does, and a file besides."""
    train = session.train_loop

    def train_and_keep(trainer: Trainer, task: Task, around: RunContext) -> int:
        done = train(trainer, task, around)
        file = Path(run_path) / f"parameters-{os.environ['RANK']}.pt"
        torch.save(dict(trainer.module.named_parameters()), file)
        return done

    session.train_loop = train_and_keep
    session.launched_rank(run_path, launcher_pid)


if __name__ == "__main__":
    from paceline.cli import main
    from tests.train.keeping_rank import keeping_rank as by_its_full_name

    command.launched_rank = by_its_full_name
    main()
