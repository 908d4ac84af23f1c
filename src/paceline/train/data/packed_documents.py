"""Samples of whole documents: packed by best fit, each with attention and positions of its own.

How it works: a sample is a row of `seq_len` tokens. A document that fits is put into one whole,
where it leaves the least room (packed.py), and the rest of the row is padding. Of a longer one full
rows are cut off first, each of which ends with the token that the next one begins with as its last
target, and what is left is packed like any other. So the loss counts each token of a document but
its first, given what stands before it in its document and its row. Which documents share a row
follows from their lengths alone; the order of rows is order.py's.

Source: https://arxiv.org/abs/2404.10830 (best-fit packing).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.train.data.dataset import Meta, SplitName, Stream
from paceline.train.data.packed import Ints, PackedRows, Place, best_fit


class Rows(NamedTuple):
    """Which pieces of documents a sample holds."""

    starts: Ints
    """(num_pieces,) in the stream; those of the first sample first."""
    counts: Ints
    """(num_pieces,) their tokens; seq_len + 1 where the last one is a target only."""
    ends: Ints
    """(num_samples,) where in these the pieces of each sample end."""
    num_cut: int
    """Documents that are longer than a sample."""
    num_padding: int
    """Tokens of all samples."""


class PackedDocuments(PackedRows):
    """One split of documents, read as `TokenDataset` is."""

    def __init__(self, stream: Stream, name: SplitName, meta: Meta) -> None:
        """Open a split."""
        super().__init__(stream)
        self.name = name
        self._end_of_document = meta.end_of_document
        total = meta.train_tokens + meta.eval_tokens
        first = meta.train_tokens if name == "eval" else 0
        last = meta.train_tokens if name == "train" else total
        starts = stream.document_starts(meta.num_documents)
        inner = starts[np.searchsorted(starts, first, "right") : np.searchsorted(starts, last)]
        self._starts = np.concatenate([[first], inner])  # a split may begin within a document
        self._lengths = np.diff(self._starts, append=last)
        self.rows = lru_cache(maxsize=2)(self._pack)
        """Maps a number of tokens to the Rows of samples that long."""

    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` tokens.

        Raises:
            InputError: no document has two tokens.
        """
        if not len(self.rows(seq_len).ends):
            raise InputError(
                f'no document of the "{self.name}" split has a token that another one stands '
                "before: bring more data."
            )
        return len(self.rows(seq_len).ends)

    def gather(self, sample_ids: Ints, seq_len: int) -> Ints:
        """Read samples: (num_samples, seq_len + 1)."""
        tokens = np.full((len(sample_ids), seq_len + 1), self._end_of_document, np.int64)
        for row, at, start, count in self._places(sample_ids, seq_len):
            self._tokens.read(start, tokens[row, at : at + count])
        return tokens

    def counted(self, sample_ids: Ints, seq_len: int) -> NDArray[np.bool_]:
        """Which targets the loss counts: (num_samples, seq_len)."""
        counted = np.zeros((len(sample_ids), seq_len), bool)
        for row, at, _, count in self._places(sample_ids, seq_len):
            counted[row, at : at + count - 1] = True
        return counted

    def _places(self, sample_ids: Ints, seq_len: int) -> list[Place]:
        rows, places = self.rows(seq_len), []
        for row, sample in enumerate(sample_ids.tolist()):
            own = slice(rows.ends[sample - 1] if sample else 0, rows.ends[sample])
            at = 0
            pieces = zip(rows.starts[own].tolist(), rows.counts[own].tolist(), strict=True)
            for start, count in pieces:
                places.append(Place(row, at, start, count))
                at += count
        return places

    def _pack(self, seq_len: int) -> Rows:
        num_full = np.maximum(self._lengths - 1, 0) // seq_len
        rests = self._lengths - num_full * seq_len
        has_rest = rests > 1  # one token more is the last target of a full row
        counts = rests[has_rest]
        things, ends = best_fit(counts, seq_len)
        starts = (self._starts + num_full * seq_len)[has_rest][things]
        # Of a document's full rows the first begins where it does.
        before = np.repeat(np.cumsum(num_full) - num_full, num_full)
        full = np.repeat(self._starts, num_full) + (np.arange(len(before)) - before) * seq_len
        packed = ends[-1] if len(ends) else 0
        return Rows(
            np.concatenate([starts, full]),
            np.concatenate([counts[things], np.full(len(full), seq_len + 1)]),
            np.concatenate([ends, packed + 1 + np.arange(len(full))]),
            int((self._lengths > seq_len + 1).sum()),
            len(ends) * seq_len - int(counts.sum()),
        )
