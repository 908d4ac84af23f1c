"""Append tokens, or bytes, to the shards of a stream (dataset.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.train.data.checksums import checksums_path, write_checksums
from paceline.train.data.dataset import TokenStream, documents_path, shard_path

_SHARD_TOKENS = 128 * 2**20
_READ_AT_ONCE = 2**20


def shards_of(num_tokens: int) -> tuple[int, ...]:
    """Tokens of each shard of a stream that is appended to."""
    starts = range(0, num_tokens, _SHARD_TOKENS)
    return tuple(min(_SHARD_TOKENS, num_tokens - start) for start in starts)


@dataclass
class StreamWriter:
    """Appends tokens to the shards of one stream."""

    folder: Path
    name: str
    dtype: np.dtype
    num_tokens: int = 0

    def append(self, tokens: NDArray, document_starts: NDArray[np.int64]) -> None:
        """Append tokens, in which documents start at these positions of the stream."""
        with documents_path(self.folder, self.name).open("ab") as file:
            document_starts.astype("<i8").tofile(file)
        while len(tokens):
            shard, filled = divmod(self.num_tokens, _SHARD_TOKENS)
            part, tokens = np.split(tokens, [_SHARD_TOKENS - filled])
            with shard_path(self.folder, self.name, shard).open("ab") as file:
                part.astype(self.dtype).tofile(file)
            self.num_tokens += len(part)

    @property
    def shards(self) -> tuple[int, ...]:
        """Tokens of each."""
        return shards_of(self.num_tokens)

    def finish(self) -> None:
        """Write the checksums of what is there."""
        for index in range(len(self.shards)):
            write_checksums(shard_path(self.folder, self.name, index))

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """Read the tokens back, in chunks."""
        self.finish()
        reader = TokenStream(self.folder, self.name, self.dtype, self.shards)
        for start in range(0, self.num_tokens, _READ_AT_ONCE):
            tokens = np.empty(min(_READ_AT_ONCE, self.num_tokens - start), np.int64)
            reader.read(start, tokens)
            yield tokens

    def absorb(self, other: "StreamWriter") -> None:
        """Append all of another stream and delete its files."""
        documents = documents_path(self.folder, other.name)
        starts = np.fromfile(documents, "<i8") + self.num_tokens
        for tokens in other.chunks():
            self.append(tokens, starts)
            starts = starts[:0]
        for path in self.folder.glob(f"{other.name}-*.bin"):
            path.unlink()
            checksums_path(path).unlink(missing_ok=True)
