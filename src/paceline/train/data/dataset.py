"""Read tokenised data: what a folder holds (`Meta`) and windows of its tokens (`TokenDataset`).

How it works: a folder holds one stream of tokens, cut into shards of `meta.shard_tokens`
(tokens-00000.bin, ...: plain little-endian uint16 or uint32), beside the int64 positions at which
documents start (tokens-documents.bin), tokenizer.json and meta.json. The first `train_tokens` are
the split "train", the rest "eval"; "all" is both. Files are mapped, not read: the page cache is the
only cache, and the ranks of a machine share it. Sample i of a split is its tokens i * seq_len ..
(i + 1) * seq_len, the last of which is a target only; a rest at the end of the split that is
shorter than a sample is never read.

It is not where data is made: that is build.py.
"""

import mmap
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from paceline.config.errors import InputError
from paceline.config.frozen import FrozenConfig
from paceline.train.data.order import Ids, sample_ids

SplitName = Literal["train", "eval", "all"]
FORMAT_VERSION: Literal[1] = 1
META_FILE = "meta.json"
TOKENIZER_FILE = "tokenizer.json"
STREAM = "tokens"
ANSWERS = "answers"
SHARD_TOKENS = 128 * 2**20
_TRIED_EVERY = 64
# Only Linux counts by thread.
_COUNTED = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class Meta(FrozenConfig):
    """What a folder of tokenised data holds, and where it came from."""

    format_version: Literal[1]
    key: str
    """Hash of the contents of the source and of every setting that the tokens depend on."""
    tokenizer: str
    """As given in `Data.tokenizer`."""
    vocab_size: int
    end_of_document: int
    """Token that follows each document."""
    dtype: Literal["uint16", "uint32"]
    shard_tokens: int
    train_tokens: int
    eval_tokens: int
    num_documents: int
    num_empty_documents: int
    """Documents without text, which were dropped."""
    text_bytes: int
    """UTF-8 bytes of all documents."""
    tokens_sha256: str
    """Hash of all tokens in reading order: equal hashes, equal data."""
    unigram_entropy: float
    """Entropy of the train split's token frequencies, nats per token."""
    unigram_loss: float
    """Cross-entropy of those frequencies on the held-out split, nats: no model that ignores the
    context gets a lower loss there by what it can learn from the train split."""
    answer_tokens: int | None = None
    """Of conversations: tokens of answers, which alone the figures above count; None: documents."""
    texts_per_row: Literal[1, 2] = 1
    """2: each row is the better answer to a prompt, and then the worse one."""
    column_bytes: int | None = None
    """Of prompts to complete: what is kept of their other columns; None: they are none."""

    @property
    def fingerprint(self) -> str:
        """Names exactly these tokens in this order and split, whoever made them."""
        return f"{self.key}-{self.tokens_sha256}"


def token_dtype(vocab_size: int) -> np.dtype:
    """In which tokens are written."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def document_starts(folder: Path, num_documents: int, stream: str = STREAM) -> NDArray[np.int64]:
    """The positions at which documents of a stream start, mapped.

    Raises:
        InputError: the file is missing or damaged.
    """
    return np.frombuffer(_map(documents_path(folder, stream), num_documents * 8), "<i8")


def shard_path(folder: Path, stream: str, index: int) -> Path:
    """File of one shard of a token stream."""
    return folder / f"{stream}-{index:05d}.bin"


def documents_path(folder: Path, stream: str) -> Path:
    """File of the positions at which the documents of a stream start."""
    return folder / f"{stream}-documents.bin"


def read_meta(folder: Path) -> Meta:
    """Read and check the description of a folder of tokenised data.

    Raises:
        InputError: it is missing or of another version.
    """
    try:
        return Meta.model_validate_json((folder / META_FILE).read_bytes())
    except OSError:
        raise InputError(
            f"{folder} holds no tokenised data ({META_FILE} is missing): prepare the data first."
        ) from None
    except ValidationError:
        raise InputError(
            f"{folder / META_FILE} was not written by this version of Paceline: delete the folder "
            "and prepare the data anew."
        ) from None


class _Shard(NamedTuple):
    tokens: NDArray[np.unsignedinteger]
    file: mmap.mmap


class _Advice:
    """Whether storage is told which pages come next: a call for each sample, spared while all are
    in memory. That is found by leaving it out now and then, and looking whether pages were waited
    for."""

    def __init__(self) -> None:
        self._is_waited_for, self._is_tried, self._asked = True, False, 0

    def is_due(self) -> bool:
        """For what is read next."""
        self._is_tried = not self._is_waited_for or self._asked % _TRIED_EVERY == 0
        self._asked += 1
        return not self._is_tried

    def saw(self, num_waits: int) -> None:
        """So many pages came from storage while it was read."""
        if num_waits or self._is_tried:
            self._is_waited_for = num_waits > 0


def _num_waits() -> int:
    """For pages from storage so far."""
    return resource.getrusage(_COUNTED).ru_majflt


class TokenStream:
    """The tokens of one stream, mapped from its shards."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int, num_tokens: int
    ) -> None:
        self._shard_tokens = shard_tokens
        self._shards = []
        self.advice = _Advice()
        for index, first in enumerate(range(0, num_tokens, shard_tokens)):
            path = shard_path(folder, name, index)
            file = _map(path, min(shard_tokens, num_tokens - first) * dtype.itemsize)
            self._shards.append(_Shard(np.frombuffer(file, dtype), file))

    def rows(self, starts: Ids, width: int) -> NDArray[np.int64]:
        """So many tokens from each of some positions on: (starts, width)."""
        waits = _num_waits()
        out = np.empty((len(starts), width), np.int64)
        shards, offsets = np.divmod(starts, self._shard_tokens)
        is_within = offsets + width <= self._shard_tokens
        for shard in np.unique(shards[is_within]):
            places = np.flatnonzero(is_within & (shards == shard))
            out[places] = self._windows(int(shard), width)[offsets[places]]
        for place in np.flatnonzero(~is_within):
            self.read(int(starts[place]), out[place])
        self.advice.saw(_num_waits() - waits)
        return out

    def _windows(self, shard: int, width: int) -> NDArray[np.unsignedinteger]:
        """All windows of a shard, which share its memory."""
        tokens, file = self._shards[shard]
        shape, step = (len(tokens) - width + 1, width), tokens.itemsize
        return np.ndarray(shape, tokens.dtype, file, strides=(step, step))

    def read(self, start: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from a position on, across shards."""
        done = 0
        while done < len(out):
            shard, offset = divmod(start + done, self._shard_tokens)
            part = self._shards[shard].tokens[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def will_need(self, start: int, count: int) -> None:
        """Let the kernel fetch tokens from storage in the background (those of one shard)."""
        shard, offset = divmod(start, self._shard_tokens)
        tokens, file = self._shards[shard]
        # Advice is given by whole pages.
        first_byte = offset * tokens.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        end_byte = min((offset + count) * tokens.itemsize, len(file))
        file.madvise(mmap.MADV_WILLNEED, first_byte, end_byte - first_byte)


class TokenDataset:
    """One split of tokenised data, read by samples of any length."""

    def __init__(self, folder: Path, name: SplitName, meta: Meta | None = None) -> None:
        """Open a split of a folder; as another description than the folder's cuts it, if given."""
        meta = meta or read_meta(folder)
        total = meta.train_tokens + meta.eval_tokens
        dtype = np.dtype(meta.dtype).newbyteorder("<")
        self.name = name
        self._first = meta.train_tokens if name == "eval" else 0
        self.num_tokens = (meta.train_tokens if name == "train" else total) - self._first
        self._stream = TokenStream(folder, STREAM, dtype, meta.shard_tokens, total)
        self._document_starts = document_starts(folder, meta.num_documents)

    def num_samples(self, seq_len: int) -> int:
        """Samples of seq_len tokens (and one more, the last target) that the split holds.

        Raises:
            InputError: not a single one.
        """
        if seq_len >= self.num_tokens:
            raise InputError(
                f'train.seq_len = {seq_len} is too long for the "{self.name}" split of '
                f"{self.num_tokens} tokens: use at most {self.num_tokens - 1}, or more data"
                + (" (data.eval_fraction)." if self.name == "eval" else ".")
            )
        return (self.num_tokens - 1) // seq_len

    def order(self, seed: int, seq_len: int) -> Callable[[int, int], Ids]:
        """Maps a running number in a run and a count to samples: epoch after epoch, shuffled.

        Raises:
            InputError: the split is shorter than one sample.
        """
        return partial(sample_ids, seed, num_samples=self.num_samples(seq_len))

    def gather(self, sample_ids: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """Read samples.

        Returns:
            tokens, int64, shape (num_samples, seq_len + 1): inputs [:, :-1] and targets [:, 1:].

        Raises:
            IndexError: a sample id is out of range.
        """
        return self._stream.rows(self._starts(sample_ids, seq_len), seq_len + 1)

    def counted(self, sample_ids: NDArray[np.int64], seq_len: int) -> None:
        """Which targets the loss counts: all."""

    def sources_of(self, sample_ids: NDArray[np.int64], seq_len: int) -> None:
        """There is one."""

    def will_need(self, sample_ids: NDArray[np.int64], seq_len: int) -> None:
        """Say that samples are gathered soon, so that storage is read while the device computes."""
        if self._stream.advice.is_due():
            for start in self._starts(sample_ids, seq_len).tolist():
                self._stream.will_need(start, seq_len + 1)

    def document_ids(self, sample_ids: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """Tell to which document each input token belongs; its end-of-document token included.

        Returns:
            running numbers of documents, not decreasing along a row, shape (num_samples, seq_len).

        Raises:
            IndexError: a sample id is out of range.
        """
        documents = np.zeros((len(sample_ids), seq_len), np.int64)
        for start, row in zip(self._starts(sample_ids, seq_len).tolist(), documents, strict=True):
            begin, end = np.searchsorted(self._document_starts, (start + 1, start + seq_len))
            row[self._document_starts[begin:end] - start] = 1
            row[0] = begin - 1
        return np.cumsum(documents, axis=1)

    def _starts(self, sample_ids: NDArray[np.int64], seq_len: int) -> Ids:
        num_samples = self.num_samples(seq_len)
        if len(sample_ids) and not 0 <= sample_ids.min() <= sample_ids.max() < num_samples:
            raise IndexError(
                f"sample ids {sample_ids.min()} to {sample_ids.max()} of {num_samples} samples"
            )
        return self._first + sample_ids * seq_len


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file for reading and check that it is as long as meta.json implies."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        raise _damaged(path) from None
    if len(mapped) != size_bytes:
        raise _damaged(path)
    return mapped


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is missing or damaged: delete its folder and prepare the data anew.")
