"""Ranks that leave their parameters behind: `python -m tests.train.keeping_rank train JOB ...` is
`paceline train JOB ...`, and writes runs/<name>/parameters-<rank>.pt when a rank is through."""

import os

import torch

from paceline.observe.run import Run
from paceline.train import command, session
from paceline.train.run_context import RunContext
from paceline.train.session import MakeTask
from paceline.train.trainer import Trainer


def keeping_rank(run: Run, make_task: MakeTask) -> None:
    """What a launched rank does, and a file besides."""
    train = session.train_loop

    def train_and_keep(trainer: Trainer, context: RunContext) -> int:
        done = train(trainer, context)
        file = run.path / f"parameters-{os.environ['RANK']}.pt"
        torch.save(dict(trainer.module.named_parameters()), file)
        return done

    session.train_loop = train_and_keep
    session.run_rank(run, make_task)


if __name__ == "__main__":
    from paceline.cli import main
    from tests.train.keeping_rank import keeping_rank as by_its_full_name

    command.run_rank = by_its_full_name
    main()
