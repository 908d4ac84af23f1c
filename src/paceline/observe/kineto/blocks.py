"""A trace file as blocks of decoded events: read in pieces, so that its size doesn't matter.

Chrome trace JSON is one object (or list) with one long list of events. It is cut between two events
every few megabytes, and each block is decoded by itself into the few fields that are used. msgspec
does this at several hundred MB/s and builds nothing for what it skips; a thread of its own reads
and decompresses ahead.

A file that ends in the middle (its process was killed while it wrote) gives its complete events,
and says so in a warning. Anything else that is no JSON is refused.
"""

import math
import re
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.config.errors import InputError

_BLOCK_BYTES = 8 << 20
_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")  # also within a string: then the block doesn't decode
_TAIL_BYTES = 1 << 17  # in which a cut is looked for; without one, the next block is awaited
_MAX_TRIES = 64
_TRUNCATED = "truncated"  # of msgspec's message for input that ends too early


class Args(msgspec.Struct, frozen=True, gc=False):
    """What is used of an event's arguments."""

    correlation: int = -1
    stream: int = -1
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
    ts: float = math.nan
    dur: float = math.nan
    args: Args | None = _NO_ARGS


class Header(msgspec.Struct, rename={"events": "traceEvents", "base_ns": "baseTimeNanoseconds"}):
    """What stands around the events."""

    events: list[Event]
    base_ns: int | None = None
    distributedInfo: dict[str, Any] | None = None  # noqa: N815 (as the file spells it)
    host_name: str | None = None
    paceline: dict[str, Any] | None = None
    deviceProperties: Any = None  # noqa: N815


_events = msgspec.json.Decoder(list[Event], strict=False)
_header = msgspec.json.Decoder(Header, strict=False)


@dataclass
class Source:
    """The blocks of one file; `about` and `is_cut` are complete when the last one was taken."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False

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
        except msgspec.ValidationError as error:
            raise InputError(
                f"{self.path} has an event that a profiler's trace can't have ({error}); "
                "record it again."
            ) from None
        except (OSError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{self.path} can't be read as a trace ({error}); it seems cut or damaged: "
                "record it again."
            ) from None

    def warn(self, num_events: int) -> None:
        """Warn of a cut file."""
        if self.is_cut:
            warnings.warn(
                f"{self.path} ends in the middle of an event, as if its process had been stopped: "
                f"the {num_events:,} events before that are read. What is missing can be of any "
                "step, and looks like idle time.",
                stacklevel=2,
            )

    def _blocks(self) -> Iterator[list[Event]]:
        pieces = _ahead(self._pieces())
        rest, is_list = self._open(pieces)
        for piece in pieces:
            rest += piece
            block, rest = _split(rest)
            if block:
                yield block
        yield self._close(rest, is_list)

    def _open(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """Return what follows the opening bracket of the events, and whether they are all."""
        start = b""
        for piece in pieces:
            start += piece
            if start.lstrip()[:1] == b"[":
                return start.lstrip()[1:], True
            if found := _OPENING.search(start):
                self._note(_header.decode(start[: found.end()] + b"]}"))
                return start[found.end() :], False
        msgspec.json.decode(start)
        raise InputError(
            f"{self.path} is JSON but has no list traceEvents; give a trace by torch.profiler."
        )

    def _close(self, rest: bytes, is_list: bool) -> list[Event]:
        """Decode the last events, with what follows the list."""
        try:
            if is_list:
                return _events.decode(b"[" + rest)
            header = _header.decode(b'{"traceEvents":[' + rest)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as error:
            if _TRUNCATED not in str(error):
                raise
            self.is_cut = True
            return _split(rest)[0]
        self._note(header)
        return header.events

    def _note(self, header: Header) -> None:
        for name in ("base_ns", "distributedInfo", "host_name", "paceline", "deviceProperties"):
            if (value := getattr(header, name)) is not None:
                self.about[name] = value

    def _pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            data = file.read(_BLOCK_BYTES)
            if data[:2] != b"\x1f\x8b":
                while data:
                    yield data
                    data = file.read(_BLOCK_BYTES)
                return
            unpack = zlib.decompressobj(wbits=31)
            while data:
                yield unpack.decompress(data, _BLOCK_BYTES)
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


def _split(text: bytes) -> tuple[list[Event], bytes]:
    """Decode all events but the last, and return the text that is left."""
    places = list(_BETWEEN.finditer(text, max(0, len(text) - _TAIL_BYTES)))
    for found in places[: -_MAX_TRIES - 1 : -1]:
        try:
            return _events.decode(b"[" + text[: found.start() + 1] + b"]"), text[found.end() :]
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            continue  # a cut within a string or a nested list: not between two events
    return [], text
