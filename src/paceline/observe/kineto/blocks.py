"""A trace file as blocks of decoded events: read in pieces, so that its size doesn't matter.

Chrome trace JSON is one object (or list) with one long list of events. It is cut between two events
every few megabytes, and each block is decoded by itself into the few fields that are used. msgspec
does this at several hundred MB/s and builds nothing for what it skips; a thread of its own reads
and decompresses ahead.

A file that ends in the middle (its process was killed while it wrote) gives its complete events,
and `is_cut` says so. Events that a profiler can't have written are left out and counted: a
block that has one is decoded again, event by event. Anything else that is no JSON is refused, and
so is what would fill the memory: a file that unpacks without end, or one event of many megabytes.
"""

import math
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.config.errors import InputError

_BLOCK_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")  # also within a string: then the block doesn't decode
_TAIL_BYTES = 1 << 17  # in which a cut is looked for; without one, the next block is awaited
_MAX_TRIES = 64
# Of msgspec's messages: input that ends too early, and input that goes on after its end.
_TRUNCATED, _TRAILING = "truncated", "trailing"
_MOST_BYTES_OF_ONE = 64 << 20  # of an event, or of what stands before the first
# Real traces are packed to a tenth or a thirtieth; what deflate can do is a thousandth.
_MOST_RATIO, _RATIO_COUNTS_FROM = 400, 1 << 30
_SPACES = bytes(byte if byte >= 32 else 32 for byte in range(256))
_NOT_NUMBERS = re.compile(rb"(?<=[:,\[])(\s*)(-?Infinity|NaN|-?nan|-?inf)(?=\s*[,}\]])")
_OTHER_FILES = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ": "packed with xz",
    b"\x04\x22\x4d\x18": "packed with lz4",
    b"SQLite": "a database, as Nsight Systems exports it",
}


class Args(msgspec.Struct, frozen=True, gc=False):
    """What is used of an event's arguments."""

    correlation: int = -1
    stream: int | str | None = -1  # ROCm 6.2 writes "0x0"
    external_id: int = msgspec.field(name="External id", default=-1)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    collective: str | None = msgspec.field(name="Collective name", default=None)
    num_in: int = msgspec.field(name="In msg nelems", default=0)
    num_out: int = msgspec.field(name="Out msg nelems", default=0)
    dtype: str = ""
    group_size: int = msgspec.field(name="Group size", default=0)
    group_name: str = msgspec.field(name="Process Group Name", default="")
    group: str = msgspec.field(name="Process Group Description", default="")
    ranks: str | list[int] = msgspec.field(name="Process Group Ranks", default="")
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event as it stands in the file; times in microseconds."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: float | None = math.nan
    dur: float | None = math.nan
    args: Args | None = _NO_ARGS


class TraceMetadata(msgspec.Struct, rename={"base_ns": "baseTimeNanoseconds"}):
    """What stands around the events."""

    base_ns: int | None = None
    distributedInfo: dict[str, Any] | None = None  # noqa: N815 (as the file spells it)
    host_name: str | None = None
    paceline: dict[str, Any] | None = None
    deviceProperties: Any = None  # noqa: N815


class _Whole(TraceMetadata, rename={"events": "traceEvents"}, kw_only=True):
    """A file's end, with its last events."""

    events: list[Event]


class _Raw(msgspec.Struct, rename={"events": "traceEvents"}):
    """The same, with events that are still to be decoded."""

    events: list[msgspec.Raw]


class _Plain(msgspec.Struct, gc=False):
    """An event whose arguments can't be read, without them."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: float | None = math.nan
    dur: float | None = math.nan


_events = msgspec.json.Decoder(list[Event], strict=False)
_event = msgspec.json.Decoder(Event, strict=False)
_plain = msgspec.json.Decoder(_Plain, strict=False)
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_around = msgspec.json.Decoder(TraceMetadata, strict=False)
_whole = msgspec.json.Decoder(_Whole, strict=False)
_raw_whole = msgspec.json.Decoder(_Raw)


@dataclass
class TraceFile:
    """The blocks of one file; what is said of it is complete when the last one was taken."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False
    num_events: int = 0
    num_left_out: int = 0
    """Of those: a profiler can't have written them."""
    why_left_out: str = ""
    """Of the first."""

    def leave_out(self, count: int, why: str) -> None:
        """Count events that aren't read."""
        self.num_left_out += count
        self.why_left_out = self.why_left_out or why

    def blocks(self) -> Iterator[list[Event]]:
        """Yield the events, block by block.

        Raises:
            InputError: the file is missing, no JSON, or no trace.
        """
        try:
            yield from self._blocks()
        except FileNotFoundError:
            raise InputError(
                f"{self.path} does not exist; give the path of a trace file."
            ) from None
        except RecursionError:
            raise InputError(
                f"{self.path} is nested deeper than a profiler's trace can be; record it again."
            ) from None
        except msgspec.ValidationError as error:
            raise InputError(
                f"{self.path} has a header that a profiler's trace can't have ({error}); "
                "record it again."
            ) from None
        except (OSError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{self.path} can't be read as a trace ({error}); it seems cut or damaged: "
                "record it again."
            ) from None

    def _blocks(self) -> Iterator[list[Event]]:
        pieces = _ahead(self._pieces())
        rest, is_list = self._open(pieces)
        for piece in pieces:
            rest += piece
            block, rest = self._split(rest)
            if block:
                yield block
            self._bound(rest, "one event")
        yield self._close(rest, is_list)

    def _bound(self, text: bytes, what: str) -> None:
        if len(text) > max(_MOST_BYTES_OF_ONE, 2 * _BLOCK_BYTES):
            raise InputError(
                f"{self.path} has more than {_MOST_BYTES_OF_ONE >> 20} MiB for {what}; "
                "give a trace by torch.profiler."
            )

    def _open(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """Return what follows the opening bracket of the events, and whether they are all."""
        start = b""
        for piece in pieces:
            if not start:
                self._refuse_other_files(piece)
                piece = piece.removeprefix(_BOM).lstrip()
            start += piece
            if start.startswith(b"["):
                return start[1:], True
            if found := _OPENING.search(start):
                self._note(_around.decode(_repaired(start[: found.end()] + b"]}")))
                return start[found.end() :], False
            self._bound(start, "what stands before its events")
        msgspec.json.decode(start)
        raise InputError(
            f"{self.path} is JSON but has no list traceEvents; give a trace by torch.profiler."
        )

    def _refuse_other_files(self, start: bytes) -> None:
        for magic, what in _OTHER_FILES.items():
            if start.startswith(magic):
                raise InputError(
                    f"{self.path} is {what}; give the trace itself, as JSON or gzipped."
                )

    def _split(self, text: bytes) -> tuple[list[Event], bytes]:
        """Decode all events but the last, and return the text that is left.

        A cut within a string or a nested list leaves it open, so the text seems truncated; one
        behind the last event leaves something after the list.
        """
        places = list(_BETWEEN.finditer(text, max(0, len(text) - _TAIL_BYTES)))
        for found in places[: -_MAX_TRIES - 1 : -1]:
            try:
                return self._decode(b"[" + text[: found.start() + 1] + b"]"), text[found.end() :]
            except msgspec.DecodeError as error:
                if _TRUNCATED not in str(error) and _TRAILING not in str(error):
                    raise
        return [], text

    def _close(self, rest: bytes, is_list: bool) -> list[Event]:
        """Decode the last events, with what follows the list."""
        try:
            if is_list:
                return self._decode(b"[" + rest)
            return self._decode_end(rest)
        except msgspec.DecodeError as error:
            if _TRUNCATED not in str(error):
                raise
        self.is_cut = True
        return self._split(rest)[0]

    def _decode(self, text: bytes) -> list[Event]:
        """Decode events, what a profiler can't have written one by one."""
        try:
            events = _events.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _TRUNCATED in str(error) or _TRAILING in str(error):
                raise
            events = self._one_by_one(_raw_events.decode(_repaired(text)))
        self.num_events += len(events)
        return events

    def _decode_end(self, rest: bytes) -> list[Event]:
        """Decode the last events of an object, and note what stands after them."""
        whole = b'{"traceEvents":[' + rest
        try:
            around: TraceMetadata = (found := _whole.decode(whole))
            events = found.events
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _TRUNCATED in str(error) or _TRAILING in str(error):
                raise
            whole = _repaired(whole)
            around, events = (
                _around.decode(whole),
                self._one_by_one(_raw_whole.decode(whole).events),
            )
        self._note(around)
        self.num_events += len(events)
        return events

    def _one_by_one(self, raws: Iterable[msgspec.Raw]) -> list[Event]:
        """Decode events by themselves: without arguments that can't be read, or not at all."""
        events = []
        for raw in raws:
            try:
                events.append(_event.decode(raw))
            except msgspec.ValidationError as error:
                self.leave_out(1, str(error))
                with suppress(msgspec.ValidationError):
                    plain = _plain.decode(raw)
                    events.append(Event(**msgspec.structs.asdict(plain)))
        return events

    def _note(self, around: TraceMetadata) -> None:
        for name in TraceMetadata.__struct_fields__:
            if (value := getattr(around, name)) is not None:
                self.about[name] = value

    def _pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            data = file.read(_BLOCK_BYTES)
            if data[:2] != b"\x1f\x8b":
                while data:
                    yield data
                    data = file.read(_BLOCK_BYTES)
                return
            unpack, unpacked = zlib.decompressobj(wbits=31), 0
            while data:
                yield (piece := unpack.decompress(data, _BLOCK_BYTES))
                unpacked += len(piece)
                if unpacked > max(_RATIO_COUNTS_FROM, _MOST_RATIO * file.tell()):
                    raise InputError(
                        f"{self.path} unpacks to more than {_MOST_RATIO} times its size, which no "
                        "trace does; record it again."
                    )
                data = unpack.unconsumed_tail
                if unpack.eof and (data := unpack.unused_data.lstrip(b"\0")):
                    unpack = zlib.decompressobj(wbits=31)  # files may be strung together
                data = data or file.read(_BLOCK_BYTES >> 4)
            yield unpack.flush()


def _ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Take each piece while the one before it is being worked on."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = reader.submit(next, pieces, None)
            yield piece


def _repaired(text: bytes) -> bytes:
    """Return text as JSON has to be: numbers that are none as null, no control characters in
    strings, UTF-8."""
    text = text.decode("utf-8", "replace").encode().translate(_SPACES)
    return _NOT_NUMBERS.sub(rb"\1null", text)
