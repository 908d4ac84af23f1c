"""Jobs to start from: commented TOML files, in `templates/`, that a person changes."""

from importlib import resources
from pathlib import Path
from typing import Literal

from paceline.config.errors import InputError
from paceline.config.outputs import check_output, shown_path, writing

Kind = Literal["pretrain", "mixture", "stream", "sft", "lora", "dpo", "grpo", "distill", "images"]
"""What a Job trains; each is a file of `templates/`."""
_TEMPLATES = resources.files("paceline.config").joinpath("templates")


def write_new(kind: Kind, file: Path | None) -> Path:
    """Write a Job to start from.

    Args:
        kind: which.
        file: where; None: `<kind>.toml` in the current folder.

    Returns:
        the file.

    Raises:
        InputError: it exists, or can't be written.
    """
    path = file or Path(f"{kind}.toml")
    check_output("FILE", path)
    text = _TEMPLATES.joinpath(f"{kind}.toml").read_text().replace(f"{kind}.toml", str(path))
    with writing(shown_path(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x") as target:
                target.write(text)
        except FileExistsError:
            raise InputError(
                f"{shown_path(path)} is there already and is not overwritten: give another FILE."
            ) from None
    return path
