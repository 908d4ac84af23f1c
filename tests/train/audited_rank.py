"""Ranks that note what they unpickle: `python -m tests.train.audited_rank train JOB ...` is
`paceline train JOB ...`, and leaves runs/<name>/unpickled-<rank>: a line per name looked up."""

import os
import sys
from pathlib import Path

from paceline.train import command, session


def audited_rank(run_path: str, launcher_pid: int) -> None:
    """What a launched rank does, watched from its first line on."""
    file = Path(run_path) / f"unpickled-{os.environ['RANK']}"
    file.touch()

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            with file.open("a") as opened:
                print(*arguments, file=opened)

    sys.addaudithook(note)
    session.launched_rank(run_path, launcher_pid)


if __name__ == "__main__":
    from paceline.cli import main
    from tests.train.audited_rank import audited_rank as by_its_full_name

    command.launched_rank = by_its_full_name
    main()
