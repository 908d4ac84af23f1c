"""The log of a stream: tokens in the order in which they arrived, in segments of bounded size.

A folder holds log.json and tokenizer.json, which never change, and segments named by the running
number of their first token. A segment is a chain of records: a header with length and checksum,
how far each source has been read with this record, where in it documents start, and tokens. So what
a source gave and how far it was read come to the disk together or not at all. A segment's first
record has no tokens, and how far all sources had been read before it.

Beside a segment stands its index (first token, place and time of arrival of each record with
tokens), which is made again from the records when a writer starts. `head` says how many tokens may
be read: a writer raises it when records are on the disk.

A process that is killed leaves a torn record at the end, which the next writer cuts off: it is
beyond the head. What is damaged before the head is never cut, for a checkpoint may have passed it.
"""

import json
import os
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Literal, NamedTuple, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.frozen import FrozenConfig
from paceline.observe.run import write_atomic

TOKENIZER_FILE = "tokenizer.json"
INDEX_ENTRY = np.dtype([("token", "<u8"), ("place", "<u8"), ("arrived", "<f8")])
_LOG_FILE, _HEAD_FILE, _LOCK_FILE = "log.json", "head", "writer.lock"
_SEGMENT, _INDEX = ".segment", ".index"
_MAGIC = b"PLR1"
# Checksum, body's bytes, first token, time of arrival, tokens, documents, bytes of positions.
_HEADER = struct.Struct("<4sIIQdIII")
_CHECKED_FROM = 8
_HEAD = struct.Struct("<IQ")
_MOST_BODY_BYTES = 2**31
_HEAD_LOOKS, _LOOK_S = 5, 0.01
_PATIENCE_S = 2.0

Positions = dict[str, int]
"""How far each source has been read, in units of its own."""
_POSITIONS = TypeAdapter(Positions)
WAY_OUT = "put back a copy of it, or name another data.stream.log"


class LogMeta(FrozenConfig):
    """What never changes of a log: log.json."""

    format_version: Literal[1] = 1
    id: str
    """Made at random: a run goes on with the log that it began with."""
    tokenizer: str
    """As the Job gave it."""
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: int

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


_META = TypeAdapter(LogMeta)


class Record(NamedTuple):
    """What arrived together."""

    first_token: int
    arrived: float
    """Unix time; of several texts the oldest one's."""
    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int64]
    """Running numbers of tokens."""
    positions: Positions
    """Of the sources that gave something, after it."""


@dataclass(frozen=True)
class Segment:
    """A file of the log."""

    path: Path

    @property
    def first_token(self) -> int:
        """By its name."""
        return int(self.path.stem)

    @property
    def index(self) -> Path:
        """The file of its index."""
        return self.path.with_suffix(_INDEX)

    @property
    def num_bytes(self) -> int:
        """That it takes, with its index."""
        sizes = 0
        for path in (self.path, self.index):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes


def segments(folder: Path) -> list[Segment]:
    """The segments of a log, by their tokens."""
    return [Segment(path) for path in sorted(folder.glob(f"{'[0-9]' * 20}{_SEGMENT}"))]


def read_log_meta(folder: Path) -> LogMeta:
    """Read log.json.

    Raises:
        InputError: there is none, or it is damaged.
    """
    return files.read_json(folder / _LOG_FILE, _META, WAY_OUT)


def has_log(folder: Path) -> bool:
    """Whether a folder is one of a log."""
    return (folder / _LOG_FILE).is_file()


def create_log(folder: Path, meta: LogMeta, tokenizer: bytes) -> None:
    """Make an empty log; log.json comes last, and with it the log is there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / TOKENIZER_FILE, tokenizer.decode())
    write_atomic(folder / _LOG_FILE, json.dumps(meta.model_dump(), indent=2) + "\n")


def is_written(folder: Path) -> bool:
    """Whether a process appends to a log now."""
    lock = FileLock(folder / _LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


# ---- records -------------------------------------------------------------------------------------


def encode(record: Record) -> bytes:
    """A record as it stands in a segment."""
    starts = (record.document_starts - record.first_token).astype("<u4").tobytes()
    positions = json.dumps(record.positions, separators=(",", ":")).encode()
    body = positions + starts + record.tokens.tobytes()
    sizes = len(record.tokens), len(record.document_starts), len(positions)
    header = _HEADER.pack(_MAGIC, 0, len(body), record.first_token, record.arrived, *sizes)
    checked = header[_CHECKED_FROM:] + body
    return _MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked


def read_record(file: IO[bytes], dtype: np.dtype) -> Record | None:
    """The record at the place where a file stands; None: it is torn or damaged there."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, checksum, size, first, arrived, num_tokens, num_starts, num_said = _HEADER.unpack(header)
    expected = num_said + 4 * num_starts + dtype.itemsize * num_tokens
    if magic != _MAGIC or size != expected or size > _MOST_BODY_BYTES:
        return None
    body = file.read(size)
    if len(body) < size or zlib.crc32(body, zlib.crc32(header[_CHECKED_FROM:])) != checksum:
        return None
    try:
        positions = _POSITIONS.validate_json(body[:num_said])
    except ValidationError:
        return None
    starts = np.frombuffer(body, "<u4", num_starts, num_said).astype(np.int64) + first
    tokens = np.frombuffer(body, dtype, num_tokens, num_said + 4 * num_starts)
    return Record(first, arrived, tokens, starts, positions)


# ---- the head ------------------------------------------------------------------------------------


class Head:
    """How many tokens of a log may be read."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _HEAD_FILE

    def read(self) -> int:
        """Zero where nothing was written yet.

        Raises:
            InputError: it is damaged.
        """
        for _ in range(_HEAD_LOOKS):
            try:
                data = self._file.read_bytes()
            except FileNotFoundError:
                return 0
            if len(data) == _HEAD.size:
                checksum, num_tokens = _HEAD.unpack(data)
                if zlib.crc32(data[4:]) == checksum:
                    return num_tokens
            time.sleep(_LOOK_S)  # it is being written
        raise InputError(
            f"{self._file} is damaged: remove it, and all that is whole in the segments counts."
        )

    def write(self, num_tokens: int) -> None:
        """In place: a reader that sees half of it looks again."""
        data = struct.pack("<Q", num_tokens)
        number = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(number, struct.pack("<I", zlib.crc32(data)) + data, 0)
        finally:
            os.close(number)


# ---- the writer ----------------------------------------------------------------------------------


class LogWriter:
    """The one process that appends to a log.

    Args:
        folder: of a log.
        segment_bytes: from which on a segment ends.
        fsync: whether records are forced to the disk before they may be read.

    Raises:
        InputError: another process writes it, or what may be read already is damaged.
    """

    def __init__(self, folder: Path, segment_bytes: float, *, fsync: bool) -> None:
        self._folder, self._segment_bytes, self._fsync = folder, segment_bytes, fsync
        self.meta = read_log_meta(folder)
        # Who only asks whether it is written holds the lock for a moment.
        self._lock = FileLock(folder / _LOCK_FILE, timeout=_PATIENCE_S)
        try:
            self._lock.acquire()
        except Timeout:
            raise InputError(
                f"{folder} is written by another process: one writes a log, so leave it that, or "
                "name another data.stream.log."
            ) from None
        self.positions: Positions = {}
        """How far each source has been read, as the log has it."""
        self.num_tokens = 0
        self._head = Head(folder)
        self._segment: BinaryIO | None = None
        self._index: BinaryIO | None = None
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Append a record whole, and let it be read.

        Args:
            record: begins with token `num_tokens`.
        """
        assert record.first_token == self.num_tokens
        if self._segment is None or self._segment.tell() >= self._segment_bytes:
            self._begin_segment()
        self._write(record)
        self._publish()

    def close(self) -> None:
        """Let another process write."""
        for file in (self._segment, self._index):
            if file is not None:
                file.close()
        self._segment = self._index = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        assert self._segment is not None
        assert self._index is not None
        place = self._segment.tell()
        self._segment.write(encode(record))
        if len(record.tokens):
            entry = np.array([(record.first_token, place, record.arrived)], INDEX_ENTRY)
            self._index.write(entry.tobytes())
        self.positions |= record.positions
        self.num_tokens += len(record.tokens)

    def _publish(self) -> None:
        for file in (self._segment, self._index):
            assert file is not None
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        self._head.write(self.num_tokens)

    def _begin_segment(self) -> None:
        for file in (self._segment, self._index):
            if file is not None:
                file.close()
        segment = Segment(self._folder / f"{self.num_tokens:020d}{_SEGMENT}")
        # Nothing may be read of one that has this name already: it is torn at its beginning.
        self._segment, self._index = segment.path.open("wb"), segment.index.open("wb")
        none = np.empty(0, self.meta.dtype)
        before = Record(self.num_tokens, 0.0, none, np.empty(0, np.int64), dict(self.positions))
        self._segment.write(encode(before))
        if self._fsync:
            files.to_disk(self._folder)

    def _recover(self) -> None:
        """Cut off what is torn at the end, and go on behind it."""
        found, whole = segments(self._folder), None
        while found and (whole := whole_part(found[-1], self.meta.dtype)) is None:
            torn = found.pop()
            if torn.first_token < self._head.read():
                break
            torn.path.unlink()
            torn.index.unlink(missing_ok=True)
        if whole is not None:
            self.positions, self.num_tokens = whole.positions, whole.num_tokens
        self._refuse_lost()
        if whole is not None:
            self._reopen(found[-1], whole)
        for segment in found[:-1]:
            if not segment.index.is_file():
                before = whole_part(segment, self.meta.dtype)
                _write_index(segment.index, b"" if before is None else before.entries)

    def _refuse_lost(self) -> None:
        published = self._head.read()
        if self.num_tokens < published:
            raise InputError(
                f"{self._folder} has {self.num_tokens} whole tokens of the {published} that may "
                f"have been trained on, a segment is damaged or missing: {WAY_OUT}."
            )

    def _reopen(self, segment: Segment, whole: "WholePart") -> None:
        """Go on at the end of a segment, where this leaves all that may be read as it is."""
        if segment.path.stat().st_size > whole.num_bytes:
            os.truncate(segment.path, whole.num_bytes)
        if not segment.index.is_file() or segment.index.read_bytes() != whole.entries:
            _write_index(segment.index, whole.entries)
        self._segment, self._index = segment.path.open("ab"), segment.index.open("ab")
        self._publish()


class WholePart(NamedTuple):
    """Of a segment, from its beginning to what is torn or damaged, or to its end."""

    positions: Positions
    """After it."""
    num_tokens: int
    """Of the log, up to its end."""
    num_bytes: int
    entries: bytes
    """Of its index."""


def whole_part(segment: Segment, dtype: np.dtype) -> WholePart | None:
    """Read a segment; None: not even its first record is whole."""
    positions: Positions = {}
    entries, num_tokens, num_bytes = [], segment.first_token, 0
    with files.opened(segment.path, WAY_OUT) as file:
        while (record := read_record(file, dtype)) and record.first_token == num_tokens:
            if len(record.tokens):
                entries.append((num_tokens, num_bytes, record.arrived))
            positions |= record.positions
            num_tokens += len(record.tokens)
            num_bytes = file.tell()
    index = np.array(entries, INDEX_ENTRY).tobytes()
    return WholePart(positions, num_tokens, num_bytes, index) if num_bytes else None


def _write_index(path: Path, entries: bytes) -> None:
    aside = path.with_suffix(".new")
    aside.write_bytes(entries)
    aside.replace(path)
