"""Held state: what a rank has of a run's state in its memory at one step.

It is cut into pieces, each with its place in the whole tensor, under the names of a checkpoint. So
any number of ranks of any other layout can put a state together from what several of them hold.

Not here: when copies are made and where they go (`buddies`), and how ranks find the newest state
that is whole (`memory`).
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.train.checkpoint.files import DTYPES, dtype_name
from paceline.train.checkpoint.found import PER_RANK_SECTION
from paceline.train.checkpoint.plan import RankState, as_json
from paceline.train.checkpoint.regions import Region

Kind = Literal["live", "own", "buddy"]
"""The state that trains, this rank's copy of it, or its copy of another rank's."""
History = tuple[tuple[int, int], ...]
"""Generations that led to a state, each with the step it went on from."""
# Pieces begin at multiples of it in memory that they share: of any element's size.
_ALIGNMENT = 64


class Row(NamedTuple):
    """A piece, as others hear of it."""

    path: str
    dtype: str
    """In safetensors' names."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    region: Region

    @staticmethod
    def of_plain(record: Sequence[Any]) -> "Row":
        """What another rank sent."""
        path, dtype, whole, (offsets, sizes) = record
        return Row(path, dtype, tuple(whole), Region(tuple(offsets), tuple(sizes)))

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.region.numel * DTYPES[self.dtype].itemsize


class Piece(NamedTuple):
    """A part of a tensor with its contents."""

    row: Row
    tensor: Tensor
    """Of the shape `row.region.sizes`."""
    checksum: int | None = None
    """Of a copy's bytes, when it was made; None: of a state that trains."""

    @property
    def is_good(self) -> bool:
        """Whether it is what it was."""
        return self.checksum is None or checksum(self.tensor) == self.checksum


@dataclass(frozen=True)
class HeldState:
    """A rank's part of the state after `step` steps."""

    step: int
    facts: dict[str, Any]
    """JSON data, as a checkpoint keeps it; the same on every rank."""
    values: dict[str, Any]
    """Entries that are no tensors, by path."""
    pieces: list[Piece]
    kind: Kind = "live"
    history: History = ()
    names: frozenset[str] = field(default=frozenset())
    """Of the whole run's tensors, as far as this rank knows: with a pipeline others have more."""

    @classmethod
    def live(
        cls,
        step: int,
        state: dict[str, Any],
        facts: dict[str, Any],
        *,
        history: History = (),
        names: Iterable[str] = (),
    ) -> "HeldState":
        """What trains, where it lies: tensors are the live ones.

        Args:
            step: steps that it has done.
            state: nested dicts, as a checkpoint is made of.
            facts: any JSON data.
            history: of the run so far (`Recovered.history`).
            names: of the whole run's tensors (`Buddies.names`).

        Raises:
            InputError: an entry is neither a tensor of a known dtype nor JSON data.
        """
        flat = RankState.of(state)
        pieces = []
        for item, data, tensor in flat.pieces():
            path, dtype = item.index.fqn, dtype_name(tensor.dtype, item.index.fqn)
            region = Region(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            pieces.append(Piece(Row(path, dtype, tuple(data.size), region), tensor))
        known = frozenset(names) | {piece.row.path for piece in pieces}
        return cls(step, as_json("facts", facts), flat.values, pieces, "live", history, known)

    @classmethod
    def of(
        cls, step: int, state: dict[str, Any], facts: dict[str, Any], *, copy: bool, **more: Any
    ) -> "HeldState":
        """The same in host memory, so that a device is free for what comes.

        Args:
            step: as `live`, like what follows.
            state: as there.
            facts: as there.
            copy: also copy what is in host memory already.
            more: `history` and `names`.
        """
        held = cls.live(step, state, facts, **more)
        pieces = [p._replace(tensor=p.tensor.to("cpu", copy=copy)) for p in held.pieces]
        return replace(held, pieces=pieces)

    def seal(self) -> None:
        """Take the checksums of its pieces, which nobody changes any more."""
        for at, piece in enumerate(self.pieces):
            self.pieces[at] = piece._replace(checksum=checksum(piece.tensor))

    @property
    def rows(self) -> list[Row]:
        """Its pieces, as others hear of them."""
        return [piece.row for piece in self.pieces]

    @property
    def num_bytes(self) -> int:
        """Of its pieces."""
        return sum(row.num_bytes for row in self.rows)

    def follows(self, history: History) -> bool:
        """Whether a run of that history has been in this state."""
        at = len(self.history)
        return self.history == history[:at] and (at == len(history) or self.step <= history[at][1])


def is_per_rank(path: str) -> bool:
    """Whether it belongs to one rank, and others go on without it."""
    return path.startswith(f"{PER_RANK_SECTION}.")


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a host tensor's bytes in order of its elements."""
    return zlib.crc32(bytes_of(tensor.contiguous()).numpy().data)


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: (n,)."""
    return tensor.reshape(-1).view(torch.uint8)


def starts(rows: Iterable[Row]) -> tuple[list[int], int]:
    """Where each piece begins in memory that they share, and its length, in bytes."""
    found, at = [], 0
    for row in rows:
        found.append(at)
        at += -(-row.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return found, at


def views(memory: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """The pieces in memory that they share: (n,) uint8, placed by `starts`."""
    places, _ = starts(rows)
    return [
        memory[at : at + row.num_bytes].view(DTYPES[row.dtype]).view(row.region.sizes)
        for at, row in zip(places, rows, strict=True)
    ]
