"""The folder of a job that is being submitted: everything is written, or nothing is left.

Also what a job is called where its engine has no numbers.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path
from paceline.launch.contract import ID_FILE, Rendered, Request
from paceline.observe.run import write_atomic

_LONGEST = 40
"""Letters of a job's name: what an engine calls its parts, with more behind, has at most 63."""


@contextmanager
def job_folder(request: Request, rendered: Rendered, *others: str) -> Iterator[None]:
    """Write what was rendered; if the block that hands it over fails, remove it again.

    Args:
        others: files that the block makes, beside ID_FILE.

    Raises:
        InputError: the folder can't be written.
    """
    folder, is_new = request.folder, not request.folder.exists()
    try:
        for name, text in rendered.files.items():
            write_atomic(folder / name, text)
        yield
    except BaseException as error:
        for name in (*rendered.files, ID_FILE, *others):
            (folder / name).unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError(
                f"{shown_path(folder)} can't be written ({error.strerror}): launch from a folder "
                "that you may write to."
            ) from None
        raise


def job_name(request: Request) -> str:
    """What an engine calls the job: its name, as far as small letters, digits and '-' tell it, and
    a sum of its folder."""
    told = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-")
    told = told if told[:1].isalpha() else f"job-{told}"
    of_folder = hashlib.sha256(str(request.folder).encode()).hexdigest()[:8]
    return f"{told[: _LONGEST - 9].rstrip('-')}-{of_folder}"
