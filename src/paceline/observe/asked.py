"""What a folder that can be gone on with began with, so that nobody goes on with something else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.job import differing
from paceline.observe.run import write_atomic

ASKED_FILE = "asked.json"
_ASKED = TypeAdapter(dict[str, dict[str, Any]])


def must_be_same(folder: Path, what: str, asked: Mapping[str, Any]) -> None:
    """Begin with what is asked for, or see that the folder began with the same.

    Args:
        what: the folder holds, such as "search".

    Raises:
        InputError: it is another one, or damaged.
    """
    file = folder / ASKED_FILE
    if file.exists():
        before = read_json(file, _ASKED, "put back a copy, or remove its folder to start over")
        for name, old, new in differing(before, asked):
            raise InputError(
                f"--out {folder} has a {what} with {name} = {old}, which is {new} now: put it "
                "back, or give another folder."
            )
    write_atomic(file, _ASKED.dump_json(dict(asked), indent=1).decode())
