"""Snapshot: memory by category over time, from what torch's CUDA allocator recorded. No torch.

`MemoryOverTime.read` takes a snapshot that torch wrote (`torch.cuda.memory._dump_snapshot`, ours or
anybody's) and, where it is beside it, the list of the long-lived blocks' owners that
`observe.memory` wrote. A block's category is its owner's where one is known. Else it is judged by
who asked for it and who gave it back. What `zero_grad` frees is a gradient; what FSDP2's
collectives ask for is a gather buffer. What a `forward` or the autograd engine (whose threads have
no Python frames) asks for is an activation. What no rule knows is unattributed, never guessed.

The history is walked back from the blocks that were live when the snapshot was taken, so what was
there before the history begins is in every sample.

A pickle may run code when it is read. Snapshots consist of lists, dictionaries, strings and
numbers alone, so nothing else is let in.

Source: torch.cuda.memory._snapshot's docstring (the format).
"""

import pickle
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from paceline.config import files
from paceline.config.errors import InputError
from paceline.observe.records import OWNERS

# The vocabulary of memory per device, in the order it is shown.
CATEGORIES = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "logits",
    "gather_buffers",
    "comm_buffers",
    "allocator_slack",
    "unattributed",
)
_ID = {name: at for at, name in enumerate(CATEGORIES)}

# Of the frames of who allocated, "file:function": the first rule that any of them meets.
_BY_FRAME = (
    (re.compile(r"/fsdp/_fully_shard/|/parallel/fsdp\.py"), "gather_buffers"),
    (re.compile(r"/distributed_c10d\.py:|/nn/parallel/distributed\.py:"), "comm_buffers"),
    (re.compile(r"/paceline/comm/"), "comm_buffers"),
    (re.compile(r"/torch/optim/|/paceline/train/(optim|optimizers|update_rules)\.py"), "optimizer"),
    (re.compile(r"/kernels/(adamw|muon)/"), "optimizer"),
    (re.compile(r"/kernels/loss/|:cross_entropy$|/parallel/vocabulary\.py"), "logits"),
    (re.compile(r":forward$|:backward$"), "activations"),
)
_FREES_GRADS = re.compile(r":zero_grad$")

Block = tuple[int, int]  # address, bytes


@dataclass(frozen=True, eq=False)
class MemoryOverTime:
    """Bytes by category after each event of the allocator."""

    times_us: npt.NDArray[np.int64]
    """Of each event since the first one, in microseconds; its number where none were kept."""
    bytes: npt.NDArray[np.int64]
    """(num_events + 1, len(CATEGORIES)): before the first event, and after each. The sum of a row
    is what was reserved."""
    has_times: bool

    @classmethod
    def read(cls, file: Path, device: int = 0) -> "MemoryOverTime":
        """Read a snapshot.

        Args:
            file: as torch wrote it; "x.json" beside "x.pickle" names owners.
            device: index of the device whose memory it is.

        Raises:
            InputError: the file isn't there, or is no snapshot.
        """
        raw = _unpickled(file)
        try:
            return _over_time(raw, device, _owners(file.with_suffix(".json")))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InputError(
                f"{file} is a pickle but not a snapshot of CUDA memory ({error!r}): give a file "
                "that torch.cuda.memory._dump_snapshot wrote."
            ) from None

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category when most was allocated; categories that had none are left out."""
        allocated = self.bytes.sum(axis=1) - self.bytes[:, _ID["allocator_slack"]]
        row = self.bytes[int(np.argmax(allocated))]
        return {name: int(row[at]) for name, at in _ID.items() if row[at]}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no snapshot does")


def _unpickled(file: Path) -> Any:
    try:
        with file.open("rb") as opened:
            return _PlainUnpickler(opened).load()
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; give the path of a memory snapshot.") from None
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{file} is no snapshot of CUDA memory ({error}): give a file that "
            "torch.cuda.memory._dump_snapshot wrote."
        ) from None


def _owners(file: Path) -> dict[str, list[Block]]:
    """Category -> blocks, of the file beside the snapshot; nothing where there is none."""
    if not file.exists():
        return {}
    held = files.read_json(file, OWNERS, "remove it").get("held", {})
    return {name: [(int(at), int(size)) for at, size in blocks] for name, blocks in held.items()}


def _over_time(
    raw: Mapping[str, Any], device: int, owners: Mapping[str, Sequence[Block]]
) -> MemoryOverTime:
    segments = [each for each in raw["segments"] if each.get("device", device) == device]
    traces = raw["device_traces"]
    events = traces[device] if len(traces) > device else []
    live = dict(_live(segments, owners))
    now = np.zeros(len(CATEGORIES), dtype=np.int64)
    for category, size in live.values():
        now[_ID[category]] += size
    now[_ID["allocator_slack"]] = sum(int(each["total_size"]) for each in segments) - now.sum()
    changes = _changes(events, live)
    later = np.cumsum(changes[::-1], axis=0)[::-1]
    totals = now - np.concatenate([later, np.zeros_like(now)[None]])
    times_us = [event.get("time_us") for event in events]
    has_times = bool(times_us) and None not in times_us
    known = np.array(times_us if has_times else range(len(events)), dtype=np.int64)
    return MemoryOverTime(known - known[:1].sum(), totals, has_times)


def _live(
    segments: Iterable[Mapping[str, Any]], owners: Mapping[str, Sequence[Block]]
) -> Iterator[tuple[int, tuple[str, int]]]:
    """Address -> category and bytes of each block that was live when the snapshot was taken."""
    held = sorted((at, name) for name, blocks in owners.items() for at, _ in blocks)
    starts = [at for at, _ in held]
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            begin, size = int(block.get("address", address)), int(block["size"])
            address = begin + size
            if block["state"] != "inactive":
                at = bisect_left(starts, begin)
                is_owned = at < len(held) and held[at][0] < address
                name = held[at][1] if is_owned else _judged(block.get("frames"))
                yield begin, (name, size)


def _changes(
    events: Sequence[Mapping[str, Any]], live: Mapping[int, tuple[str, int]]
) -> npt.NDArray[np.int64]:
    """What each event added to each category: (num_events, len(CATEGORIES)).

    From the last event to the first, because who gives a block back tells what it was.
    """
    changes = np.zeros((len(events), len(CATEGORIES)), dtype=np.int64)
    at_end = dict(live)
    freed: dict[int, _Freed] = {}
    for number in range(len(events) - 1, -1, -1):
        event = events[number]
        action, address = event["action"], int(event.get("addr", 0))
        if action in ("segment_alloc", "segment_map", "segment_free", "segment_unmap"):
            sign = 1 if action in ("segment_alloc", "segment_map") else -1
            changes[number, _ID["allocator_slack"]] += sign * int(event["size"])
        elif action == "free_completed":
            freed[address] = _Freed(number, int(event["size"]))
        elif action == "free_requested" and address in freed:
            freed[address].frames = event.get("frames")
        elif action == "alloc":
            _add_block(changes, number, event, freed.pop(address, None), at_end)
    for block in freed.values():  # there before the first event
        _add(changes[block.number], _judged(None, block.frames), -block.size)
    return changes


@dataclass
class _Freed:
    """A block that was given back, before it is known who took it."""

    number: int
    size: int
    frames: Sequence[Mapping[str, Any]] | None = None


def _add_block(
    changes: npt.NDArray[np.int64],
    number: int,
    event: Mapping[str, Any],
    freed: _Freed | None,
    at_end: dict[int, tuple[str, int]],
) -> None:
    """A block from its allocation to its end, which may be after the last event."""
    if freed is not None:
        category = _judged(event.get("frames"), freed.frames)
        _add(changes[number], category, freed.size)
        _add(changes[freed.number], category, -freed.size)
        return
    if int(event["addr"]) in at_end:
        _add(changes[number], *at_end.pop(int(event["addr"])))


def _add(row: npt.NDArray[np.int64], category: str, size: int) -> None:
    """Blocks are cut out of what the allocator has reserved."""
    row[_ID[category]] += size
    row[_ID["allocator_slack"]] -= size


def _judged(
    asked: Sequence[Mapping[str, Any]] | None, gave: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The category of a block nobody is known to own, by the frames of who asked for it and gave it
    back."""
    if any(_FREES_GRADS.search(place) for place in _places(gave)):
        return "grads"
    places = _places(asked)
    for pattern, category in _BY_FRAME:
        if any(pattern.search(place) for place in places):
            return category
    # Within the history, but by a thread without Python: the autograd engine's.
    is_engine = asked is not None and gave is not None and not places
    return "activations" if is_engine else "unattributed"


def _places(frames: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return [f"{frame['filename']}:{frame['name']}" for frame in frames or ()]
