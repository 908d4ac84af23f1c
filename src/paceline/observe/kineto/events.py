"""The events of a trace as columns.

One structured array holds all complete events that matter, names and threads as indices of tables.
The loops over events in here are those of `map` and numpy's `fromiter`: none runs Python code for
each event, but for the dictionary that numbers a name not seen before.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe import terms as words
from paceline.observe.kineto.blocks import Args, Event, TraceFile

OP, RANGE, LAUNCH, KERNEL, COPY, PYTHON = range(6)  # kinds of events

# Categories, with the names that PyTorch before 1.12 gave them, and those of other vendors.
_KINDS = {
    "cpu_op": OP,
    "operator": OP,
    "user_annotation": RANGE,
    "cuda_runtime": LAUNCH,
    "cuda_driver": LAUNCH,
    "hip_runtime": LAUNCH,
    "xpu_runtime": LAUNCH,
    "privateuse1_runtime": LAUNCH,
    "privateuse1_driver": LAUNCH,
    "runtime": LAUNCH,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": COPY,
    "memset": COPY,
    "python_function": PYTHON,
}
_KIND_OF = {**_KINDS, **{word.title(): kind for word, kind in _KINDS.items()}}

EVENT = np.dtype(
    [
        ("name", "i4"),  # index into names
        ("kind", "i1"),
        ("thread", "i4"),  # index into threads
        ("start", "i8"),  # ns since the epoch
        ("end", "i8"),
        ("correlation", "i8"),  # of launches and what they launched; -1: none
        ("external_id", "i8"),  # of the operator, also noted with what it launched; -1: none
        ("sequence", "i8"),  # of the autograd graph; -1: none
        ("forward_thread", "i8"),  # of a node: the thread that made it; 0: no node
        ("stream", "i8"),
        ("call", "i4"),  # index into calls; -1: not a collective, or nothing is known of it
    ]
)
# What a collective's arguments say; -1: not said. Texts are indices into names.
CALL = np.dtype(
    [
        ("name", "i4"),  # "all_reduce"; of kernels only where their arguments say it
        ("group", "i4"),  # description of the process group
        ("group_name", "i4"),
        ("ranks", "i4"),
        ("group_size", "i4"),
        ("bytes", "i8"),  # of the larger buffer
    ]
)

# Bytes of an element, as PyTorch's profiler spells types (c10::ScalarType and TypeMeta).
_ITEM_BYTES = {
    **dict.fromkeys(("Double", "double", "Long", "long", "long int", "c10::complex<float>"), 8),
    **dict.fromkeys(("Float", "float", "Int", "int", "unsigned int"), 4),
    **dict.fromkeys(("Half", "c10::Half", "BFloat16", "c10::BFloat16", "Short", "short"), 2),
    **dict.fromkeys(("Byte", "unsigned char", "Char", "signed char", "Bool", "bool"), 1),
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
}

_MOST_LEFT_OUT = 0.1  # of the events that matter: with fewer, terms mean something
_MOST_US = 1e12  # of time between a trace's events, 11 days; and of what one of them takes
_MOST_NS = 1 << 62

_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Trace:
    """The complete events of one file, in the file's order."""

    events: _Array
    calls: _Array
    names: tuple[str, ...]
    threads: tuple[tuple[Any, Any], ...]
    """(process, thread) as the trace names them."""
    about: dict[str, Any]
    """The fields of `blocks.Header` that the file has."""
    is_cut: bool = False
    """Whether the file ends in the middle of an event."""
    num_left_out: int = 0
    """Events that a profiler can't have written."""
    why_left_out: str = ""
    """Of the first."""


class _Numbers(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Streams(dict[Any, int]):
    """Numbers of streams, which some profilers write as text: "7", "0x0", "null stream"."""

    def __missing__(self, stream: Any) -> int:
        self[stream] = number = self._number(stream)
        return number

    def _number(self, stream: Any) -> int:
        try:
            number = int(stream) if isinstance(stream, int) else int(stream or "-1", 0)
        except ValueError:
            number = _MOST_NS
        # What is no number gets one that no stream has.
        return number if -_MOST_NS < number < _MOST_NS else (1 << 40) + len(self)


def read_events(path: str | Path) -> Trace:
    """Read the complete events of a trace.

    Raises:
        InputError: the file is missing, damaged, or no trace.
    """
    source = TraceFile(Path(path))
    reader = _Columns(source)
    parts = [reader.columns(block) for block in source.blocks()]
    events = np.concatenate([np.empty(0, EVENT), *parts])
    if source.num_left_out > _MOST_LEFT_OUT * (len(events) + source.num_left_out):
        raise InputError(
            f"{path} has {source.num_left_out:,} events that a profiler's trace can't have beside "
            f"{len(events):,} others (the first: {source.why_left_out}); record it again."
        )
    base_ns = source.about.get("base_ns", 0) + reader.origin_us * 1000
    if not -_MOST_NS < base_ns < _MOST_NS:
        raise InputError(f"{path} has times that no clock has ({base_ns} ns); record it again.")
    events["start"] += base_ns
    events["end"] += base_ns
    return Trace(
        events,
        np.array(reader.calls, CALL),
        tuple(reader.names),
        tuple(reader.threads),
        source.about,
        source.is_cut,
        source.num_left_out,
        source.why_left_out,
    )


class _Columns:
    """Makes columns of decoded events, block after block."""

    def __init__(self, source: TraceFile) -> None:
        self.names = _Numbers()
        self.threads = _Numbers()
        self.calls: list[tuple[int, ...]] = []
        # Microseconds since the epoch fill a double; relative to the first event they keep
        # their nanoseconds.
        self.origin_us = 0
        self._source = source
        self._is_first = True
        self._streams = _Streams()
        self._is_comm: list[bool] = []
        self._is_range: list[bool] = []

    def columns(self, block: list[Event]) -> _Array:
        chosen = [event for event in block if event.cat in _KIND_OF and event.ph == "X"]
        times_us, lengths_us = (
            np.fromiter(map(attrgetter(field), chosen), "f8", len(chosen))
            for field in ("ts", "dur")
        )
        if self._is_first and np.isfinite(times_us).any():
            self.origin_us = math.floor(np.median(times_us[np.isfinite(times_us)]))
            self._is_first = False
        times_us -= self.origin_us
        sound = (np.abs(times_us) < _MOST_US) & (lengths_us >= 0) & (lengths_us < _MOST_US)
        if not sound.all():
            wrong = chosen[int(np.argmin(sound))]
            why = f"{wrong.name} at {wrong.ts} us lasts {wrong.dur} us"
            self._source.leave_out(int(np.count_nonzero(~sound)), why)
            chosen = [*compress(chosen, sound.tolist())]
        table = np.empty(len(chosen), EVENT)
        table["start"] = np.rint(times_us[sound] * 1e3)
        table["end"] = table["start"] + np.rint(lengths_us[sound] * 1e3).astype("i8")
        self._fill(table, chosen)
        return table

    def _fill(self, table: _Array, events: list[Event]) -> None:
        """Fill in all but the times."""
        size = len(events)

        def column(of: Iterable[Any]) -> _Array:
            return np.fromiter(of, "i8", size)

        table["name"] = column(map(self.names.__getitem__, map(attrgetter("name"), events)))
        table["kind"] = column(map(_KIND_OF.__getitem__, map(attrgetter("cat"), events)))
        ranges = self._flags(self._is_range, words.is_range)
        table["kind"][(table["kind"] == OP) & ranges[table["name"]]] = RANGE
        where = map(attrgetter("pid", "tid"), events)
        table["thread"] = column(map(self.threads.__getitem__, where))
        args = [event.args or _NONE for event in events]
        for field in ("correlation", "external_id", "sequence", "forward_thread"):
            try:
                table[field] = column(map(attrgetter(field), args))
            except OverflowError:  # as unsigned numbers are, or damaged ones
                table[field] = column(map(_within_64_bits, map(attrgetter(field), args)))
        table["stream"] = column(map(self._streams.__getitem__, map(attrgetter("stream"), args)))
        table["call"] = -1
        may_communicate = self._flags(self._is_comm, words.is_collective)
        for index in np.flatnonzero(may_communicate[table["name"]]).tolist():
            table["call"][index] = len(self.calls)
            on_host = table["kind"][index] != KERNEL
            self.calls.append(self._call(args[index], events[index].name if on_host else ""))

    def _flags(self, known: list[bool], say: Callable[[str], bool]) -> _Array:
        """Say something of each name, asking about those that are not known yet."""
        known += map(say, islice(self.names, len(known), None))
        return np.array(known, bool)

    def _call(self, args: Args, otherwise: str) -> tuple[int, ...]:
        ranks = args.ranks if isinstance(args.ranks, str) else str(args.ranks)
        name = words.collective_name(args.collective or otherwise)
        texts = (name, args.group, args.group_name, ranks)
        size = max(args.num_in, args.num_out) * _ITEM_BYTES.get(args.dtype, 0)
        numbers = (self.names[text] if text else -1 for text in texts)
        group_size = args.group_size if 0 < args.group_size < 1 << 31 else -1
        return (*numbers, group_size, _within_64_bits(size or _bytes_of_inputs(args) or -1))


_NONE = Args()


def _within_64_bits(number: int) -> int:
    """Return a number that a column can hold, or -1."""
    return number if -_MOST_NS < number < _MOST_NS else -1


def _bytes_of_inputs(args: Args) -> int:
    """Return the bytes of an operator's inputs, where shapes were recorded; else 0."""
    if not bytes(args.input_dims) or not bytes(args.input_types):
        return 0
    dims, types = msgspec.json.decode(args.input_dims), msgspec.json.decode(args.input_types)
    if not isinstance(dims, list) or not isinstance(types, list):
        return 0
    sizes = (
        math.prod(shape) * _ITEM_BYTES.get(kind, 0)
        for shape, kind in zip(dims, types, strict=False)
        if isinstance(shape, list) and all(isinstance(n, int) for n in shape)  # []: one number
    )
    return sum(sizes)
