"""Duplicates in a source: which of its documents are left out because an earlier one is alike.

How it works: one process reads the whole source before it is tokenised, in the order of its
documents. So what is left out depends on the source alone, and not on how many processes tokenise
or train. Of each document it keeps a digest of its words ("exact"), or a MinHash of its stretches
of five words ("near"): a document is left out if one that was kept shares a band of the LSH with
it, and their estimated similarity reaches the threshold. What it found is one file beside the
tokens: a bit for each document, and where those of each part begin.

It takes memory for each document: measured figures stand in docs/data.md.

Papers: Broder 1997, "On the resemblance and containment of documents"; near duplicates in text for
training: https://arxiv.org/abs/2107.06499.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config.dedup import Dedup
from paceline.config.errors import InputError
from paceline.train.data.documents import read_pieces
from paceline.train.data.files import SourceFile

_FILE = "duplicates.npz"
_STRETCH = 5
_DIGEST_BYTES = 16
Flags = NDArray[np.bool_]


class _Finder(Protocol):
    """Is told documents, word by word, and says in the end which are duplicates."""

    def add(self, words: list[str]) -> None:
        """Words of the document that is read."""

    def end_document(self) -> None:
        """All of its words were told."""

    def found(self) -> Flags:
        """Which documents are duplicates: (num_documents,)."""


def find_duplicates(
    dedup: Dedup,
    parts: Sequence[Sequence[SourceFile]],
    text_field: str,
    filtered: str | None,
    folder: Path,
    progress: Callable[[int], None],
) -> None:
    """Write down which documents of a source are duplicates, where that was not done before.

    Args:
        dedup: what counts as one.
        parts: the files of each part, in order.
        text_field: as `data.text_field`.
        filtered: as `data.filter`.
        folder: in which it is written.
        progress: called with the bytes read so far.

    Raises:
        InputError: a file can't be used, or datasketch is missing.
    """
    path = folder / _FILE
    if path.is_file():
        return
    finder: _Finder = _Exact() if dedup.method == "exact" else _Near(dedup)
    begins, read_before = [0], 0
    for part in parts:
        begins.append(begins[-1])
        for file in part:
            for piece in read_pieces(file, text_field, filtered):
                if piece.text:
                    finder.add(words_of(piece.text))
                    if piece.ends_document:
                        finder.end_document()
                        begins[-1] += 1
                progress(read_before + piece.read_bytes)
            read_before += file.size_bytes
    aside = path.with_suffix(".partial")
    with aside.open("wb") as written:
        np.savez(written, bits=np.packbits(finder.found()), begins=np.array(begins, "<i8"))
    aside.replace(path)


def duplicates_of(folder: Path, part: int) -> Iterator[bool]:
    """For each document of a part that has text and that the filter keeps, whether it is left out.

    Without end where nothing was written: none is.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return iter(bool, True)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            begins = file["begins"]
            bits = np.unpackbits(file["bits"], count=int(begins[-1]))
            return iter((bits[begins[part] : begins[part + 1]] > 0).tolist())
    except Exception:  # of zip files, of arrays: numpy and zipfile raise anything
        raise InputError(
            f"{path} is damaged: delete its folder and prepare the data anew."
        ) from None


def words_of(text: str) -> list[str]:
    """The words by which documents are compared."""
    return unicodedata.normalize("NFKC", text).casefold().split()


class _Exact:
    """Sorts digests."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, words: list[str]) -> None:
        """See `_Finder`."""
        self._hash.update("".join(f"{word} " for word in words).encode())

    def end_document(self) -> None:
        """See `_Finder`."""
        self._digests += self._hash.digest()
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def found(self) -> Flags:
        """See `_Finder`."""
        digests = np.frombuffer(self._digests, "<u8").reshape(-1, 2)
        order = np.lexsort(digests.T)  # stable: of those that are the same, the first comes first
        same = (digests[order[1:]] == digests[order[:-1]]).all(1)
        flags = np.zeros(len(digests), bool)
        flags[order[1:]] = same
        return flags


class _Near:
    """Looks each document up among those that were kept."""

    def __init__(self, dedup: Dedup) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise InputError(
                'data.dedup.method = "near" needs datasketch: pip install "paceline[dedup]", or '
                'use "exact".'
            ) from None
        self._threshold = dedup.threshold
        self._index = MinHashLSH(dedup.threshold, dedup.permutations)
        self._empty: Any = MinHash(dedup.permutations, seed=1, scheme="affine32")
        self._current = self._empty.copy()
        self._last: list[str] = []
        self._has_stretch = False
        self._kept: dict[int, NDArray[np.uint32]] = {}
        self._flags: list[bool] = []

    def add(self, words: list[str]) -> None:
        """See `_Finder`."""
        words = self._last + words
        stretches = {" ".join(words[at : at + _STRETCH]) for at in range(len(words) - _STRETCH + 1)}
        self._has_stretch = self._has_stretch or bool(stretches)
        self._current.update_batch([stretch.encode() for stretch in stretches])
        self._last = words[1 - _STRETCH :]

    def end_document(self) -> None:
        """See `_Finder`."""
        if not self._has_stretch:
            self._current.update(" ".join(self._last).encode())
        numbers = self._current.hashvalues.copy()
        is_duplicate = any(
            (self._kept[other] == numbers).mean() >= self._threshold
            for other in self._index.query(self._current)
        )
        if not is_duplicate:
            self._index.insert(len(self._flags), self._current, check_duplication=False)
            self._kept[len(self._flags)] = numbers
        self._flags.append(is_duplicate)
        self._current, self._last, self._has_stretch = self._empty.copy(), [], False

    def found(self) -> Flags:
        """See `_Finder`."""
        return np.array(self._flags, bool)
