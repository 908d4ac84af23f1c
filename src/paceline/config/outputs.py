"""Outputs: the places that a person names for what a command writes.

They are looked at before anything is read or computed, so that minutes of work never end in a
refusal. Imports nothing that takes time: the command line calls this while it reads its options.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config.errors import InputError

_MOST_SHOWN = 200
_MOST_NAME_BYTES = 255  # of one part of a path, on every file system that Linux has


def output(option: str, *, is_folder: bool = False) -> Callable[[Path | None], Path | None]:
    """A callback for an option of the command line: see `check_output`."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            check_output(option, path, is_folder=is_folder)
        return path

    return check


def check_output(option: str, path: Path, *, is_folder: bool = False) -> None:
    """Refuse what can't be written.

    Args:
        option: how the command line names it: "--html".
        path: need not exist yet, nor the folders that lead to it.
        is_folder: whether a folder is to be made there, not a file.

    Raises:
        InputError: something else has that name, or the nearest folder that exists can't be
            written to.
    """
    cure = f"give {'a folder' if is_folder else 'the path of a file'} that can be written"
    try:
        whole = Path(os.path.abspath(path))  # noqa: PTH100  # resolve() would follow links
        if any(len(os.fsencode(part)) > _MOST_NAME_BYTES for part in whole.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if whole.exists() and whole.is_dir() != is_folder:
            kind = "a file" if is_folder else "a folder"
            raise InputError(f"{option} {shown_path(path)} is {kind}: {cure}.")
        place = next(each for each in (whole, *whole.parents) if each.exists())
        if place != whole and not place.is_dir():
            raise OSError(errno.ENOTDIR, f"{shown_path(place)} is a file")
        if not os.access(place, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _refusal(f"{option} {shown_path(path)}", error, cure) from None


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Where what is written inside fails, the person is told what and why.

    Args:
        what: is written: "--html page.html".

    Raises:
        InputError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise _refusal(what, error, "give a place that can") from None


def shown_path(path: Path) -> str:
    """A path as a sentence shows it, on one line; of one without end its beginning."""
    text = str(path).replace("\0", "\\0").replace("\n", "\\n")
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _refusal(what: str, error: Exception, cure: str) -> InputError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError(f"{what} can't be written ({why}): {cure}.")
