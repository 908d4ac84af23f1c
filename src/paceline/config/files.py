"""Files: the one way to read what an earlier run, another program or a person wrote.

Such a file may be anything: empty, binary, nested without end, a folder, a pipe that nobody writes
to. Whoever reads one gets typed data, or an InputError that names the file and the way out. What
the data must be is the reader's to say, as a pydantic type; nothing here knows of Jobs or Runs.

Not here: traces (`observe.kineto`) and tensors, which are too large to be held as text.
"""

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from paceline.config.errors import InputError
from paceline.config.outputs import shown_path

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Of a file that is read whole. A Cluster with all its curves takes 0.2 MB, a plan 0.5."""
_MOST_TOML_BYTES = 2 << 20
# tomllib takes a minute for one key of 30,000 parts; a Job's longest has 5.
_LONG_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){64}")
# Of a wrong value or a decoder's message, what a sentence repeats.
_MOST_SHOWN = 120


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(file: Path, cure: str, most_bytes: int = MOST_BYTES) -> bytes:
    """The whole of a regular file.

    Args:
        file: what to read.
        cure: what the person may do where it can't be read: "give the path of a job.toml".
        most_bytes: a larger one is refused.

    Raises:
        InputError: there is none, it is no regular file, too large, or can't be read.
    """
    with opened(file, cure) as source:
        data = source.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise InputError(f"{shown_path(file)} has more than {most_bytes >> 20} MiB: {cure}.")
    return data


@contextmanager
def opened(file: Path, cure: str) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; waits for nobody, whatever the name stands for.

    Raises:
        InputError: as `read_bytes`; also where reading fails inside the `with`.
    """
    try:
        # A pipe without a writer would keep `open` waiting for ever.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as source:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputError(f"{shown_path(file)} is no regular file: {cure}.")
            yield source
    except FileNotFoundError:
        raise InputError(f"{shown_path(file)} does not exist: {cure}.") from None
    except IsADirectoryError:
        raise InputError(f"{shown_path(file)} is a folder: {cure}.") from None
    except OSError as error:
        raise InputError(f"{shown_path(file)} can't be read ({error.strerror}): {cure}.") from None
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{shown_path(file)} can't be a file ({error}): {cure}.") from None


def read_text(file: Path, cure: str, most_bytes: int = MOST_BYTES) -> str:
    """A file of UTF-8, without a byte order mark.

    Raises:
        InputError: as `read_bytes`, or it is no text.
    """
    data = read_bytes(file, cure, most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{shown_path(file)} is no text ({error.reason}): {cure}.") from None


def read_json(file: Path, kind: TypeAdapter[T], cure: str) -> T:
    """A file of JSON that holds a value of this type.

    Raises:
        InputError: as `read_bytes`, or it is no JSON, or holds another value.
    """
    data = read_bytes(file, cure).removeprefix(b"\xef\xbb\xbf")
    try:
        return parse_json(data, kind)
    except ValueError as error:
        raise InputError(f"{shown_path(file)} {error}: {cure}.") from None


def parse_json(text: str | bytes, kind: TypeAdapter[T]) -> T:
    """The value of this type that a text of JSON is.

    Raises:
        ValueError: it is none; reads as "is not valid JSON (...)", "holds a.b = 3, which must ...".
    """
    try:
        return kind.validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_problem(error)) from None


def read_toml(file: Path, cure: str) -> dict[str, Any]:
    """A file of TOML.

    Raises:
        InputError: as `read_text`, or it is no TOML.
    """
    text = read_text(file, cure, _MOST_TOML_BYTES)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise InputError(
            f"{shown_path(file)} is not valid TOML ({_short(str(error))}): {cure}."
        ) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text.

    Raises:
        ValueError: it is none, or nested or named in a way that nobody writes.
    """
    if _LONG_KEY.search(text):
        raise ValueError("it has a key of 64 parts or more")
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _problem(error: ValidationError) -> str:
    """What is wrong with a file's contents, from pydantic's first complaint."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"is not valid JSON ({_short(str(first['ctx']['error']))})"
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"lacks {where}"
    required = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    given = " = ".join(filter(None, [where, _short(repr(first["input"]))]))
    return f"holds {given}, which must be {required}"


def _short(text: str, most: int = _MOST_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
