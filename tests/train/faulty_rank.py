"""A rank that raises in the middle of a layer: `python -m tests.train.faulty_rank train JOB ...` is
`paceline train JOB ...`, but for the last rank's fault."""

import os
import time
from pathlib import Path

from torch import Tensor

from paceline.models.decoder import Block
from paceline.observe.run import Run
from paceline.train import command, session
from paceline.train.session import MakeTask

CALL = 20
"""The block call, of the rank's own, that raises."""


def faulty_rank(run: Run, make_task: MakeTask) -> None:
    """What a launched rank does, with the fault in the last one."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        _break_blocks(run.path)
    session.run_rank(run, make_task)


def _break_blocks(run_path: Path) -> None:
    forward, calls = Block.forward, []

    def broken(block: Block, *inputs: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == CALL:
            (run_path / "died").write_text(str(time.time()))
            raise ValueError("the layer is on fire")
        return forward(block, *inputs)

    Block.forward = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    from paceline.cli import main
    from tests.train.faulty_rank import faulty_rank as by_its_full_name

    command.run_rank = by_its_full_name
    main()
