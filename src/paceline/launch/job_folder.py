"""The folder of a job that is being submitted: everything is written, or nothing is left."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path
from paceline.launch.contract import ID_FILE, Rendered, Request
from paceline.observe.run import write_atomic


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
