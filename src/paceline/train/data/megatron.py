"""Megatron's indexed data sets: tokens in a .bin, and in an .idx where sequences and documents are.

An .idx holds, little-endian: the mark, version 1 (u64), the type of the tokens (u8), the numbers of
sequences and of documents plus one (u64 both), each sequence's tokens (i32) and its first byte in
the .bin (i64), and the sequence at which each document starts (i64), the number of sequences behind
them. What may follow (modes of sequences) is not read.

Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError

_MARK = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Those of whole numbers."""
_FIRST_OF_I4 = 65_500
"""Megatron takes 32 bits for vocabularies from here on."""


class _Index(NamedTuple):
    """Mapped from an .idx."""

    dtype: np.dtype
    lengths: NDArray[np.int32]
    places: NDArray[np.int64]
    documents: NDArray[np.int64]


def read_documents(path: Path) -> Iterator[NDArray[np.int64]]:
    """The documents of a data set as tokens.

    Args:
        path: of its .idx, beside which the .bin is.

    Raises:
        InputError: a file is missing or damaged.
    """
    index = _read_index(path)
    tokens = _mapped(path.with_suffix(".bin"), index.dtype)
    for document in range(len(index.documents) - 1):
        first, last = index.documents[document : document + 2].tolist()
        if not 0 <= first <= last <= len(index.lengths):
            raise _damaged(path, f"document {document} can't be sequences {first} to {last}")
        parts = [np.empty(0, np.int64)]
        for sequence in range(first, last):
            begin, rest = divmod(int(index.places[sequence]), index.dtype.itemsize)
            end = begin + int(index.lengths[sequence])
            if rest or not 0 <= begin <= end <= len(tokens):
                raise _damaged(path, f"sequence {sequence} is not within the .bin")
            parts.append(tokens[begin:end].astype(np.int64))
        yield np.concatenate(parts)


def _read_index(path: Path) -> _Index:
    content = _mapped(path, np.dtype("u1"))
    if len(content) < _HEADER.size:
        raise _damaged(path, "it is shorter than a header")
    mark, version, code, num_sequences, num_documents = _HEADER.unpack(
        content[: _HEADER.size].tobytes()
    )
    if mark != _MARK or version != 1:
        raise _damaged(path, "it doesn't begin with MMIDIDX and version 1")
    if code not in _TYPES:
        raise _damaged(path, f"its tokens are of type {code}, which is no whole number's")
    sizes = (_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_documents)
    at = list(accumulate(sizes))
    if at[-1] > len(content):
        raise _damaged(path, f"it is too short for {num_sequences} sequences")
    lengths, places, documents = (
        content[begin:end].view(dtype)
        for (begin, end), dtype in zip(pairwise(at), ("<i4", "<i8", "<i8"), strict=True)
    )
    if not num_documents or documents[0] != 0 or documents[-1] != num_sequences:
        raise _damaged(path, "its documents don't hold all of its sequences")
    return _Index(np.dtype(_TYPES[code]), lengths, places, documents)


def _mapped(path: Path, dtype: np.dtype) -> NDArray:
    try:
        count = path.stat().st_size // dtype.itemsize
        return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
    except OSError as error:
        raise InputError(
            f"{path} can't be read ({error.strerror}): an .idx needs the .bin beside it."
        ) from None


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is no index of Megatron's, or damaged ({reason}): replace it.")


def write_documents(
    prefix: Path, documents: Iterator[NDArray[np.int64]], vocab_size: int
) -> tuple[int, int]:
    """Write a data set, each document as one sequence; complete or not at all.

    Args:
        prefix: of both files.

    Returns:
        documents and tokens.

    Raises:
        InputError: it can't be written, or a document has 2^31 tokens or more.
    """
    code = 8 if vocab_size < _FIRST_OF_I4 else 4
    dtype, lengths = np.dtype(_TYPES[code]), []
    aside = [prefix.with_name(f"{prefix.name}{end}.partial") for end in (".bin", ".idx")]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with aside[0].open("wb") as file:
            for tokens in documents:
                if len(tokens) >= 2**31:
                    raise InputError("a document has 2^31 tokens or more: Megatron can't have it.")
                tokens.astype(dtype).tofile(file)
                lengths.append(len(tokens))
        aside[1].write_bytes(_index(code, lengths))
        for path in aside:  # the index last: without it there is no data set
            path.replace(path.with_suffix(""))
    except OSError as error:
        raise InputError(
            f"{prefix}.bin can't be written ({error.strerror}): name another place."
        ) from None
    finally:
        for path in aside:
            path.unlink(missing_ok=True)
    return len(lengths), sum(lengths)


def _index(code: int, lengths: Sequence[int]) -> bytes:
    ends = np.cumsum([0, *lengths], dtype="<i8")
    return b"".join(
        (
            _HEADER.pack(_MARK, 1, code, len(lengths), len(lengths) + 1),
            np.array(lengths, "<i4").tobytes(),
            (ends[:-1] * np.dtype(_TYPES[code]).itemsize).tobytes(),
            np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
        )
    )
