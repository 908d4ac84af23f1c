"""Timeline: the spans of training steps, each with a term of the vocabulary.

The simulator and the profiler both produce it, so "explain" is a subtraction. Spans are one
structured numpy array (a name is an index into a table), because a trace of one step of a large
model has millions. Times are whole nanoseconds since the epoch: integers sum exactly, and traces of
ranks on one host share a clock.

Each span stands in a layer. Where spans overlap, the instant belongs to the lowest layer, and
within a layer to the earlier term of `TERMS`. The processor's own work hides communication, and
communication hides copies. A range on the host (waiting for data) explains only what is otherwise
idle.

Not here: how a profiler's record becomes spans (`observe.kineto`) and how spans become the account
of a step (`observe.accounting`).
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.observe.terms import EXPOSED_COMM, TERM_ID, TERMS

PROCESSOR, COMM, COPY, HOST, IDLE = range(5)  # layers, the lowest wins

SPAN = np.dtype(
    [
        ("name", "i4"),
        ("term", "i1"),
        ("layer", "i1"),
        ("rank", "i4"),
        ("stream", "i4"),
        ("start_ns", "i8"),
        ("duration_ns", "i8"),
    ]
)
STEP = np.dtype([("rank", "i4"), ("step", "i8"), ("start_ns", "i8"), ("end_ns", "i8")])

# Reserved names of chrome://tracing's palette; Perfetto colours by name and ignores them.
_COLOURS = {
    "matmul": "thread_state_running",
    "attention": "rail_response",
    "recompute": "rail_animation",
    "optimizer": "rail_idle",
    "other_kernels": "thread_state_runnable",
    "host_gap": "grey",
    "data_wait": "terrible",
    "checkpoint_stall": "bad",
}
_STEPS_THREAD = "steps"

_Array = npt.NDArray[Any]


class Span(NamedTuple):
    """One stretch of time on one stream of one rank; times in microseconds since the epoch."""

    name: str
    term: str
    rank: int
    stream: str
    start_us: float
    duration_us: float
    layer: int | None = None
    """Where None, the term decides: communication, waiting of the host, or the processor's work."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans and steps of one or more ranks, as columns.

    Attributes:
        spans: array of dtype SPAN; `name` and `stream` index the tables below, `term` TERMS.
        steps: array of dtype STEP, the windows that are accounted for.
        names: the table of span names.
        streams: the table of stream labels ("device 7", "main", ...).
    """

    spans: _Array
    steps: _Array
    names: tuple[str, ...]
    streams: tuple[str, ...]

    @classmethod
    def of(
        cls, spans: Iterable[Span], steps: Iterable[tuple[int, int, float, float]]
    ) -> "Timeline":
        """Build a timeline from single spans, as the simulator has them.

        Args:
            spans: the spans, in any order.
            steps: (rank, step, start_us, end_us) of each step.

        Raises:
            InputError: a span's term is not in the vocabulary, or it ends before it starts.
        """
        build = TimelineBuilder()
        for name, term, rank, stream, start_us, duration_us, layer in spans:
            start, end = _ns(start_us), _ns(start_us + duration_us)
            build.add(name, term, rank, stream, start, end, layer)
        return build.timeline(
            [(rank, step, _ns(start), _ns(end)) for rank, step, start, end in steps]
        )

    @classmethod
    def merge(cls, timelines: Sequence["Timeline"]) -> "Timeline":
        """Put the timelines of several ranks into one."""
        names: dict[str, int] = {}
        streams: dict[str, int] = {}
        parts = []
        for timeline in timelines:
            part = timeline.spans.copy()
            part["name"] = _renumber(timeline.names, names)[part["name"]]
            part["stream"] = _renumber(timeline.streams, streams)[part["stream"]]
            parts.append(part)
        steps = [timeline.steps for timeline in timelines]
        return cls(
            np.concatenate([np.empty(0, SPAN), *parts]),
            np.concatenate([np.empty(0, STEP), *steps]),
            tuple(names),
            tuple(streams),
        )

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Span]:
        for row in self.spans:
            yield Span(
                self.names[row["name"]],
                TERMS[row["term"]],
                int(row["rank"]),
                self.streams[row["stream"]],
                float(row["start_ns"]) / 1e3,
                float(row["duration_ns"]) / 1e3,
                int(row["layer"]),
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans or steps, in order."""
        seen = np.union1d(self.spans["rank"], self.steps["rank"])
        return tuple(int(rank) for rank in seen)

    def write(self, path: str | Path) -> None:
        """Write Chrome trace JSON (gzipped where the name ends in .gz); Perfetto opens it.

        A process is a rank, a thread is a stream, the category is the term.
        """
        text = json.dumps(_chrome(self), separators=(",", ":")).encode()
        data = gzip.compress(text, 5, mtime=0) if str(path).endswith(".gz") else text
        Path(path).write_bytes(data)

    @classmethod
    def read(cls, path: str | Path) -> "Timeline":
        """Read back what `write` wrote, exactly.

        Raises:
            InputError: the file is missing, cut, or no timeline of ours.
        """
        trace = load_trace(path)
        try:
            return _from_chrome(cls, trace)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"{path} is no timeline that Paceline wrote ({error!r}); "
                "read a profiler's trace with read_kineto."
            ) from None


class TimelineBuilder:
    """Collects spans one by one, and makes the Timeline of them."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []
        self._names: dict[str, int] = {}
        self._streams: dict[str, int] = {}

    def add(
        self,
        name: str,
        term: str,
        rank: int,
        stream: str,
        start_ns: int,
        end_ns: int,
        layer: int | None = None,
    ) -> None:
        """Add a span; without a layer, its term decides which.

        Raises:
            InputError: the term is not in the vocabulary, or the span ends before it starts.
        """
        if term not in TERM_ID:
            raise InputError(f"span {name!r} has the unknown term {term!r}{nearest(term, TERMS)}")
        if end_ns < start_ns:
            raise InputError(f"span {name!r} ends before it starts; give a duration of 0 or more.")
        self._rows.append(
            (
                self._names.setdefault(name, len(self._names)),
                TERM_ID[term],
                _default_layer(term) if layer is None else layer,
                rank,
                self._streams.setdefault(stream, len(self._streams)),
                start_ns,
                end_ns - start_ns,
            )
        )

    def timeline(self, steps: Sequence[tuple[int, int, int, int]]) -> Timeline:
        """Make the Timeline, with (rank, step, start_ns, end_ns) of each step."""
        return Timeline(
            np.array(self._rows, SPAN),
            np.array(steps, STEP),
            tuple(self._names),
            tuple(self._streams),
        )


def span_columns(
    name: _Array | int,
    term: _Array | int,
    layer: _Array | int,
    rank: int,
    stream: _Array | int,
    start_ns: _Array,
    end_ns: _Array,
) -> _Array:
    """Return an array of dtype SPAN of columns, or of values that hold for all rows."""
    spans = np.empty(len(start_ns), SPAN)
    columns = (name, term, layer, rank, stream, start_ns, end_ns - start_ns)
    for field, column in zip(SPAN.names or (), columns, strict=True):
        spans[field] = column
    return spans


def load_trace(path: str | Path) -> dict[str, Any]:
    """Read Chrome trace JSON, gzipped or not, as a dict with the list "traceEvents".

    Raises:
        InputError: the file is missing, cut, not JSON or not a trace.
    """
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        trace = json.loads(data)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a trace file.") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(
            f"{path} can't be read as a trace ({error}); it seems cut or damaged: record it again."
        ) from None
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise InputError(
            f"{path} is JSON but has no list traceEvents; give a trace by torch.profiler."
        )
    return trace


def _ns(time_us: float) -> int:
    return round(time_us * 1e3)


def _default_layer(term: str) -> int:
    if term.startswith(EXPOSED_COMM):
        return COMM
    if term in ("data_wait", "checkpoint_stall", "straggler_wait", "bubble"):
        return HOST
    return IDLE if term in ("host_gap", "idle", "unattributed") else PROCESSOR


def _renumber(table: tuple[str, ...], into: dict[str, int]) -> _Array:
    """Map indices of one table to indices of a shared one, adding what is new."""
    return np.array([into.setdefault(word, len(into)) for word in table], "i4")


def _chrome(timeline: Timeline) -> dict[str, Any]:
    starts = np.concatenate([timeline.spans["start_ns"], timeline.steps["start_ns"]])
    origin = int(starts.min()) if len(starts) else 0
    events = _labels(timeline)
    for rank, step, start, end in timeline.steps.tolist():
        events.append(_event(f"step {step}", "step", rank, 0, start - origin, end - start))
    for name, term, layer, rank, stream, start, duration in timeline.spans.tolist():
        word = TERMS[term]
        event = _event(timeline.names[name], word, rank, stream + 1, start - origin, duration)
        event["args"] = {"layer": layer}
        if word in _COLOURS:
            event["cname"] = _COLOURS[word]
        events.append(event)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": origin, "traceEvents": events}


def _event(
    name: str, term: str, rank: int, thread: int, start_ns: int, duration_ns: int
) -> dict[str, Any]:
    # Three decimals of a microsecond are whole nanoseconds, exact in a double for 100 days.
    times = {"ts": start_ns / 1e3, "dur": duration_ns / 1e3}
    return {"ph": "X", "name": name, "cat": term, "pid": rank, "tid": thread, **times}


def _labels(timeline: Timeline) -> list[dict[str, Any]]:
    labels = []
    for rank in timeline.ranks:
        used = np.unique(timeline.spans["stream"][timeline.spans["rank"] == rank])
        threads = [(0, _STEPS_THREAD), *((int(s) + 1, timeline.streams[s]) for s in used)]
        labels.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0})
        labels[-1]["args"] = {"name": f"rank {rank}"}
        for thread, label in threads:
            entry = {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread}
            labels.append({**entry, "args": {"name": label}})
    return labels


def _from_chrome(cls: type[Timeline], trace: dict[str, Any]) -> Timeline:
    origin = int(trace["baseTimeNanoseconds"])
    names: dict[str, int] = {}
    streams: dict[int, str] = {}
    spans, steps = [], []
    for event in trace["traceEvents"]:
        rank, thread = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name" and thread > 0:
                streams[thread - 1] = event["args"]["name"]
            continue
        start, duration = origin + _ns(event["ts"]), _ns(event["dur"])
        if thread == 0:
            number = int(event["name"].removeprefix("step "))
            steps.append((rank, number, start, start + duration))
            continue
        name = names.setdefault(event["name"], len(names))
        term, layer = TERM_ID[event["cat"]], event["args"]["layer"]
        spans.append((name, term, layer, rank, thread - 1, start, duration))
    table = tuple(streams.get(index, "") for index in range(max(streams, default=-1) + 1))
    return cls(np.array(spans, SPAN), np.array(steps, STEP), tuple(names), table)
