"""Ranks that note what they unpickle: `python -m tests.train.audited_rank train JOB ...` is
`paceline train JOB ...`, and leaves runs/<name>/unpickled-<rank>: a line per name looked up."""

import os
import sys

from paceline.observe.run import Run
from paceline.train import command, session
from paceline.train.session import MakeTask


def audited_rank(run: Run, make_task: MakeTask) -> None:
    """What a launched rank does, watched from its first line on."""
    file = run.path / f"unpickled-{os.environ['RANK']}"
    file.touch()

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            with file.open("a") as opened:
                print(*arguments, file=opened)

    sys.addaudithook(note)
    session.run_rank(run, make_task)


if __name__ == "__main__":
    from paceline.cli import main
    from tests.train.audited_rank import audited_rank as by_its_full_name

    command.run_rank = by_its_full_name
    main()
