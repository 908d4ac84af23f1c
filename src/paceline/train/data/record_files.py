"""Rows of WebDataset's tar files and of MDS shards, read as streams.

WebDataset: files of a tar that share a name up to its first dot are a sample, one after another.
Of each sample its .json is read, an object, and its .txt, which is `text` where the object has
none; all else (images) is passed over. https://github.com/webdataset/webdataset

MDS (mosaicml-streaming): a shard is the number of samples, the places of their ends, a description
of the columns as JSON, and the samples. Columns of texts and of JSON are read; a pickle never is.
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html
"""

import itertools
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from paceline.config.errors import InputError

_READ_AT_ONCE = 2**20
_MOST_HEADER_BYTES = 2**20


class Record(NamedTuple):
    """A row of such a file."""

    where: str
    """For sentences: file and row."""
    values: dict[str, Any]


class _Member(tarfile.TarInfo):
    """A member of a tar in which damage is an error: `tarfile` takes it for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(tarfile)
        except _HEADER_ERROR as error:
            if type(error).__name__ == "EOFHeaderError":  # the block of zeros at the end
                raise
            raise _READ_ERROR(str(error)) from None


_HEADER_ERROR, _READ_ERROR = tarfile.HeaderError, tarfile.ReadError


def webdataset_records(stream: IO[bytes], path: object) -> Iterator[Record]:
    """The samples of a tar.

    Args:
        stream: of the tar, decompressed.
        path: for sentences.

    Raises:
        InputError: it is damaged, or a .json in it is no object.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
            for key, members in itertools.groupby(_files_of(tar), lambda each: _key(each[0])):
                values: dict[str, Any] = {}
                for name, content in members:
                    where = f"{path} file {name}"
                    if name.endswith(".json"):
                        values |= object_of(content, where)
                    else:
                        values.setdefault("text", _text(content, where))
                yield Record(f"{path} sample {key}", values)
    except tarfile.TarError as error:
        raise InputError(
            f"{path} can't be read as a tar ({error}): replace it or set data.format."
        ) from None


def _files_of(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """The files of texts and objects."""
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # which would grow with the archive
        if member.isfile() and member.name.endswith((".json", ".txt")):
            file = tar.extractfile(member)
            assert file is not None
            yield member.name, file.read()


def _key(name: str) -> str:
    path = PurePosixPath(name)
    return str(path.parent / path.name.partition(".")[0])


class _Columns(TypedDict):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]


_COLUMNS = TypeAdapter(_Columns)


def mds_records(stream: IO[bytes], path: object) -> Iterator[Record]:
    """The samples of a shard.

    Args:
        stream: of the shard, decompressed.
        path: for sentences.

    Raises:
        InputError: it is damaged.
    """
    (count,) = struct.unpack("<I", _exactly(stream, 4, path))
    ends = np.frombuffer(_exactly(stream, 4 * (count + 1), path), "<u4").astype(np.int64)
    header_bytes = int(ends[0]) - 4 * (count + 2)
    if not 0 < header_bytes <= _MOST_HEADER_BYTES or (np.diff(ends) < 0).any():
        _refuse(path)
    columns = _columns(_exactly(stream, header_bytes, path), path)
    for row, num_bytes in enumerate(np.diff(ends).tolist()):
        where = f"{path} row {row}"
        yield Record(where, _sample(_exactly(stream, num_bytes, path), columns, where, path))


def _columns(header: bytes, path: object) -> list[tuple[str, str, int | None]]:
    """Name, encoding and fixed size of each column."""
    try:
        columns = _COLUMNS.validate_json(header)
        parts = (columns["column_names"], columns["column_encodings"], columns["column_sizes"])
        return list(zip(*parts, strict=True))
    except (ValidationError, ValueError):
        _refuse(path)


def _sample(
    sample: bytes, columns: list[tuple[str, str, int | None]], where: str, path: object
) -> dict[str, Any]:
    num_sizes = sum(size is None for *_, size in columns)
    if len(sample) < 4 * num_sizes:
        _refuse(path)
    sizes = iter(np.frombuffer(sample[: 4 * num_sizes], "<u4").tolist())
    at, values = 4 * num_sizes, {}
    for name, encoding, fixed in columns:
        size = next(sizes) if fixed is None else fixed
        content = sample[at : at + size]
        at += size
        if encoding == "str":
            values[name] = _text(content, where)
        elif encoding == "json":
            values[name] = _json(content, where)
    if at != len(sample):
        _refuse(path)
    return values


def _exactly(stream: IO[bytes], num_bytes: int, path: object) -> bytes:
    """So many bytes; a damaged number of them takes no memory."""
    parts = []
    while num_bytes:
        part = stream.read(min(num_bytes, _READ_AT_ONCE))
        if not part:
            _refuse(path)
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _refuse(path: object) -> NoReturn:
    raise InputError(f"{path} is damaged, or no shard of MDS: replace it or set data.format.")


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{where} is not UTF-8 text: convert or remove it.") from None


def _json(content: bytes, where: str) -> Any:
    text = _text(content, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        reason = getattr(error, "msg", None) or error
        raise InputError(f"{where} is not JSON ({reason}): correct or remove it.") from None


def object_of(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a line or a file.

    Args:
        where: for sentences.

    Raises:
        InputError: it is not UTF-8, not JSON, or no object.
    """
    found = _json(content, where)
    if not isinstance(found, dict):
        raise InputError(f"{where} is not a JSON object: it must be one.")
    return found
