"""A rank that fails in an exchange: `python -m tests.train.faulty_exchange train JOB ...` is
`paceline train JOB ...`, but for the last rank's fault."""

import os

from torch import Tensor

from paceline.comm.compress.blockwise import Blockwise
from paceline.observe.run import Run
from paceline.train import command, session
from paceline.train.session import MakeTask

CALL = 40
"""The decoding, of the rank's own, that raises."""


def faulty_rank(run: Run, make_task: MakeTask) -> None:
    """What a launched rank does, with the fault in the last one."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        _break_decoding()
    session.run_rank(run, make_task)


def _break_decoding() -> None:
    decode, calls = Blockwise.decode, []

    def broken(codec: Blockwise, *given: Tensor, **named: bool) -> None:
        calls.append(1)
        if len(calls) == CALL:
            raise ValueError("the payload is torn")
        decode(codec, *given, **named)

    Blockwise.decode = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    from paceline.cli import main
    from tests.train.faulty_exchange import faulty_rank as by_its_full_name

    command.run_rank = by_its_full_name
    main()
