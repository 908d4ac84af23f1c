"""Samples of whole conversations: packed by best fit, each with attention and positions of its own.

How it works: a sample is a row of `seq_len` tokens. Conversations are put into samples from the
longest to the shortest, each where it leaves the least room (best fit, decreasing); the last tokens
of a row are padding, a document of its own. So no conversation crosses the end of a sample, and the
loss of each is what it is alone. One that is longer than a sample is cut. The two of a preference
stand one after the other in the same sample, and are left out where that is too short. Which
conversations share a sample follows from their lengths alone; the order of samples is order.py's.

Source: https://arxiv.org/abs/2404.10830 (best-fit packing).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.train.data.dataset import (
    ANSWERS,
    STREAM,
    Meta,
    SplitName,
    Stream,
    TokenStream,
    document_starts,
)
from paceline.train.data.order import Ids, sample_ids

Ints = NDArray[np.int64]


class Packing(NamedTuple):
    """Which conversations a sample holds."""

    conversations: Ints
    """(num_packed,) those of the first sample first."""
    ends: Ints
    """(num_samples,) where in `conversations` those of each sample end."""
    num_cut: int
    """Conversations that are longer than a sample."""
    num_left_out: int
    """Of these, those without an answer in what is left of them; rows of preferences that are too
    long."""
    num_padding: int
    """Tokens of all samples."""

    def padding_share(self, seq_len: int) -> float:
        """Of the tokens of all samples."""
        return self.num_padding / (len(self.ends) * seq_len)

    def of(self, sample: int) -> Ints:
        """The conversations of a sample."""
        return self.conversations[self.ends[sample - 1] if sample else 0 : self.ends[sample]]


class Place(NamedTuple):
    """Where a piece of the stream stands."""

    row: int
    at: int
    """In the row."""
    start: int
    """In the stream."""
    num_tokens: int


class PackedRows(ABC):
    """Samples into which pieces of a stream are put, each a document of its own."""

    def __init__(self, tokens: Stream) -> None:
        self._tokens = tokens

    @abstractmethod
    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` tokens."""

    @abstractmethod
    def _places(self, sample_ids: Ints, seq_len: int) -> list[Place]:
        """The pieces of samples, row by row."""

    def order(self, seed: int, seq_len: int) -> Callable[[int, int], Ids]:
        """As `TokenDataset.order`."""
        return partial(sample_ids, seed, num_samples=self.num_samples(seq_len))

    @abstractmethod
    def gather(self, sample_ids: Ints, seq_len: int) -> Ints:
        """As `TokenDataset.gather`."""

    @abstractmethod
    def counted(self, sample_ids: Ints, seq_len: int) -> NDArray[np.bool_]:
        """Which targets the loss counts: (num_samples, seq_len)."""

    def sources_of(self, sample_ids: Ints, seq_len: int) -> None:  # noqa: B027
        """There is one."""

    def document_ids(self, sample_ids: Ints, seq_len: int) -> Ints:
        """Tell the pieces of a sample, and its padding, apart: (num_samples, seq_len)."""
        documents = np.zeros((len(sample_ids), seq_len + 1), np.int64)
        for row, at, _, count in self._places(sample_ids, seq_len):
            # A full row may have one more, which is a target only.
            documents[row, min(at + count, seq_len)] = 1
        return np.cumsum(documents, axis=1)[:, :-1]

    def will_need(self, sample_ids: Ints, seq_len: int) -> None:
        """Say that samples are gathered soon, see `TokenDataset`."""
        places = self._places(sample_ids, seq_len)
        self._tokens.will_need((start, count) for _, _, start, count in places)


class PackedConversations(PackedRows):
    """One split of conversations, read as `TokenDataset` is."""

    def __init__(self, folder: Path, name: SplitName, meta: Meta) -> None:
        self.name = name
        self._end_of_document = meta.end_of_document
        total = meta.train_tokens + meta.eval_tokens
        dtype = np.dtype(meta.dtype).newbyteorder("<")
        super().__init__(TokenStream(folder, STREAM, dtype, meta.shards))
        self._answers = TokenStream(folder, ANSWERS, np.dtype("u1"), meta.shards)
        first, last = (0, meta.train_tokens) if name == "train" else (meta.train_tokens, total)
        self._per_row = meta.texts_per_row
        starts = document_starts(folder, meta.num_documents * self._per_row)
        self._starts = starts[np.searchsorted(starts, first) : np.searchsorted(starts, last)]
        self._lengths = np.diff(self._starts, append=last)
        self.packing = lru_cache(maxsize=2)(self._pack)
        """Maps a number of tokens to the Packing of samples that long."""

    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` tokens.

        Raises:
            InputError: no answer is left in any.
        """
        if not len(self.packing(seq_len).ends):
            raise InputError(
                f'train.seq_len = {seq_len} leaves no answer in the "{self.name}" split of '
                f"{len(self._lengths)} conversations: raise it."
            )
        return len(self.packing(seq_len).ends)

    def gather(self, sample_ids: Ints, seq_len: int) -> Ints:
        """Read samples: (num_samples, seq_len + 1), of which the last token is padding."""
        tokens = np.full((len(sample_ids), seq_len + 1), self._end_of_document, np.int64)
        for row, at, start, count in self._places(sample_ids, seq_len):
            self._tokens.read(start, tokens[row, at : at + count])
        return tokens

    def counted(self, sample_ids: Ints, seq_len: int) -> NDArray[np.bool_]:
        """Which targets the loss counts: (num_samples, seq_len)."""
        answers = np.zeros((len(sample_ids), seq_len + 1), np.int64)
        for row, at, start, count in self._places(sample_ids, seq_len):
            # The first token of a conversation is predicted by nothing.
            self._answers.read(start + 1, answers[row, at + 1 : at + count])
        return answers[:, 1:] > 0

    def _places(self, sample_ids: Ints, seq_len: int) -> list[Place]:
        packing, places = self.packing(seq_len), []
        for row, sample in enumerate(sample_ids.tolist()):
            at = 0
            for conversation in packing.of(sample).tolist():
                count = min(int(self._lengths[conversation]), seq_len)
                places.append(Place(row, at, int(self._starts[conversation]), count))
                at += count
        return places

    def _pack(self, seq_len: int) -> Packing:
        if self._per_row > 1:
            return self._pack_rows(seq_len)
        is_long = self._lengths > seq_len
        left_out = [
            each for each in np.flatnonzero(is_long).tolist() if not self._has_answer(each, seq_len)
        ]
        kept = np.delete(np.arange(len(self._lengths)), left_out)
        lengths = np.minimum(self._lengths[kept], seq_len)
        order, ends = best_fit(lengths, seq_len)
        return Packing(
            kept[order],
            ends,
            int(is_long.sum()),
            len(left_out),
            len(ends) * seq_len - int(lengths.sum()),
        )

    def _pack_rows(self, seq_len: int) -> Packing:
        """Rows of several texts, whole."""
        of_rows = self._lengths.reshape(-1, self._per_row).sum(1)
        kept = np.flatnonzero(of_rows <= seq_len)
        order, ends = best_fit(of_rows[kept], seq_len)
        rows = kept[order]
        return Packing(
            (rows[:, None] * self._per_row + np.arange(self._per_row)).ravel(),
            ends * self._per_row,
            0,
            len(of_rows) - len(kept),
            len(ends) * seq_len - int(of_rows[kept].sum()),
        )

    def _has_answer(self, conversation: int, seq_len: int) -> bool:
        answers = np.empty(seq_len - 1, np.int64)
        self._answers.read(self._starts[conversation] + 1, answers)
        return bool(answers.any())


def best_fit(lengths: Ints, room: int) -> tuple[Ints, Ints]:
    """Put things into as few boxes as best fit needs, the longest first.

    Things of one length are put in together: a box that takes one has the least room that is
    enough, so it takes the next ones as well, until it has too little.

    Args:
        lengths: each from 1 to `room`.
        room: of a box.

    Returns:
        the numbers of things, those of the first box first; and where in these the things of each
        box end. Both depend on the arguments alone.
    """
    order = np.argsort(-lengths, kind="stable")
    boxes = np.empty(len(lengths), np.int64)
    values, counts = np.unique(lengths, return_counts=True)
    at, rooms = 0, _Rooms(room)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = at + count
        while at < end:
            taken, left = rooms.take(length, end - at)
            each = left // length  # things that a box takes, but the last one
            put = min(len(taken) * each, end - at)
            boxes[order[at : at + put]] = np.repeat(taken, each)[:put]
            rooms.give(taken[:-1], left - each * length)
            rooms.give(taken[-1:], left - (put - each * (len(taken) - 1)) * length)
            at += put
    return np.lexsort((-lengths, boxes)), np.cumsum(np.bincount(boxes))


class _Rooms:
    """Boxes by what room they have left."""

    def __init__(self, most: int) -> None:
        self._most, self._num_boxes = most, 0
        self._boxes: list[list[Ints]] = [[] for _ in range(most + 1)]
        # Bit r is set where a box has room r: the next larger one is found by arithmetic.
        self._some = 0

    def take(self, length: int, count: int) -> tuple[Ints, int]:
        """Boxes for things of a length, and the room of each: those with the least that is enough,
        as many as there are and are needed."""
        larger = self._some >> length
        if not larger:
            first, needed = self._num_boxes, -(-count // (self._most // length))
            self._num_boxes += needed
            return np.arange(first, first + needed), self._most
        room = length + (larger & -larger).bit_length() - 1
        needed, boxes = -(-count // (room // length)), self._boxes[room].pop()
        if len(boxes) > needed:
            self._boxes[room].append(boxes[:-needed])
        if not self._boxes[room]:
            self._some &= ~(1 << room)
        return boxes[-needed:][::-1], room

    def give(self, boxes: Ints, room: int) -> None:
        """Have boxes with this room."""
        if room and len(boxes):
            self._boxes[room].append(boxes)
            self._some |= 1 << room
