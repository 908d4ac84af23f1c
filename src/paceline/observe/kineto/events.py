"""The events of a trace as columns.

One structured array holds all complete events that matter, names and threads as indices of tables.
The loops over events in here are those of `map` and numpy's `fromiter`: none runs Python code for
each event, but for the dictionary that numbers a name not seen before.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.observe import terms as words
from paceline.observe.kineto.blocks import Args, Event, Source

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


class _Numbers(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def read_events(path: str | Path) -> Trace:
    """Read the complete events of a trace.

    Raises:
        InputError: the file is missing, damaged, or no trace.
    """
    source = Source(Path(path))
    reader = _Columns()
    try:
        parts = [reader.columns(block) for block in source.blocks()]
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{path} has an event that a profiler's trace can't have ({error}); record it again."
        ) from None
    events = np.concatenate([np.empty(0, EVENT), *parts])
    if len(events):
        source.warn(len(events))
    base_ns = int(source.about.get("base_ns", 0)) + reader.origin_us * 1000
    events["start"] += base_ns
    events["end"] += base_ns
    calls = np.array(reader.calls, CALL)
    return Trace(
        events, calls, tuple(reader.names), tuple(reader.threads), source.about, source.is_cut
    )


class _Columns:
    """Makes columns of decoded events, block after block."""

    def __init__(self) -> None:
        self.names = _Numbers()
        self.threads = _Numbers()
        self.calls: list[tuple[int, ...]] = []
        # Microseconds since the epoch fill a double; relative to the first event they keep
        # their nanoseconds.
        self.origin_us = 0
        self._is_first = True
        self._is_comm: list[bool] = []

    def columns(self, block: list[Event]) -> _Array:
        chosen = [event for event in block if event.cat in _KIND_OF and event.ph == "X"]
        table = np.empty(len(chosen), EVENT)
        if not chosen:
            return table
        if self._is_first:
            self.origin_us, self._is_first = math.floor(chosen[0].ts), False
        self._fill(table, chosen)
        return table

    def _fill(self, table: _Array, events: list[Event]) -> None:
        size = len(events)

        def column(of: Iterable[Any], kind: str = "i8") -> _Array:
            return np.fromiter(of, kind, size)

        table["name"] = column(map(self.names.__getitem__, map(attrgetter("name"), events)))
        table["kind"] = column(map(_KIND_OF.__getitem__, map(attrgetter("cat"), events)))
        where = map(attrgetter("pid", "tid"), events)
        table["thread"] = column(map(self.threads.__getitem__, where))
        times_us = column(map(attrgetter("ts"), events), "f8") - self.origin_us
        lengths_us = column(map(attrgetter("dur"), events), "f8")
        if not (np.isfinite(times_us) & (lengths_us >= 0)).all():
            wrong = int(np.argmin(np.isfinite(times_us) & (lengths_us >= 0)))
            raise ValueError(
                f"{events[wrong].name} at {events[wrong].ts} us lasts {events[wrong].dur} us"
            )
        table["start"] = np.rint(times_us * 1e3)
        table["end"] = table["start"] + np.rint(lengths_us * 1e3).astype("i8")
        args = [event.args or _NONE for event in events]
        for field in ("correlation", "external_id", "sequence", "forward_thread", "stream"):
            table[field] = column(map(attrgetter(field), args))
        table["call"] = -1
        for index in np.flatnonzero(self._may_communicate()[table["name"]]).tolist():
            table["call"][index] = len(self.calls)
            on_host = table["kind"][index] != KERNEL
            self.calls.append(self._call(args[index], events[index].name if on_host else ""))

    def _may_communicate(self) -> _Array:
        """Say of each name whether it is a collective's."""
        for name in islice(self.names, len(self._is_comm), None):
            self._is_comm.append(words.is_collective(name))
        return np.array(self._is_comm, bool)

    def _call(self, args: Args, otherwise: str) -> tuple[int, ...]:
        ranks = args.ranks if isinstance(args.ranks, str) else str(args.ranks)
        name = words.collective_name(args.collective or otherwise)
        texts = (name, args.group, args.group_name, ranks)
        size = max(args.num_in, args.num_out) * _ITEM_BYTES.get(args.dtype, 0)
        numbers = (self.names[text] if text else -1 for text in texts)
        return (*numbers, args.group_size or -1, size or _bytes_of_inputs(args) or -1)


_NONE = Args()


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
