"""Read tokenised data: what a folder holds (`Meta`) and windows of its tokens (`TokenDataset`).

How it works: a folder holds one stream of tokens, cut into shards of `meta.shards` tokens
(tokens-00000.bin, ...: plain little-endian uint16 or uint32), beside the int64 positions at which
documents start (tokens-documents.bin), tokenizer.json and meta.json. What is read of a shard is
verified (checksums.py); one that is damaged is made anew where that can be. The first
`train_tokens` are the split "train", the rest "eval"; "all" is both. Files are mapped, not read:
the page cache is the only cache, and the ranks of a machine share it. Sample i of a split is its
tokens i * seq_len .. (i + 1) * seq_len, the last of which is a target only; a rest at the end of
the split that is shorter than a sample is never read.

It is not where data is made: that is build.py.
"""

import mmap
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from paceline.config.errors import InputError
from paceline.config.frozen import CountOrNone, FrozenConfig
from paceline.train.data.checksums import BLOCK_BYTES, CheckedBytes, num_blocks, read_checksums
from paceline.train.data.mapped import map_files
from paceline.train.data.order import Ids, sample_ids

SplitName = Literal["train", "eval", "all"]
FORMAT_VERSION: Literal[2] = 2
META_FILE = "meta.json"
TOKENIZER_FILE = "tokenizer.json"
STREAM = "tokens"
ANSWERS = "answers"
_TRIED_EVERY = 64
# Only Linux counts by thread.
_COUNTED = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class Meta(FrozenConfig):
    """What a folder of tokenised data holds, and where it came from."""

    format_version: Literal[2]
    key: str
    """Hash of the contents of the source and of every setting that the tokens depend on."""
    tokenizer: str
    """As given in `Data.tokenizer`."""
    vocab_size: int
    end_of_document: int
    """Token that follows each document."""
    dtype: Literal["uint16", "uint32"]
    shards: tuple[CountOrNone, ...] = Field(strict=False)
    """Tokens of each, in reading order."""
    train_tokens: int
    eval_tokens: int
    num_documents: int
    num_empty_documents: int
    """Documents without text, which were dropped."""
    num_filtered_out: int = 0
    """Documents that `data.filter` left out."""
    num_duplicates: int = 0
    """Of those that are left, what `data.dedup` left out."""
    text_bytes: int
    """UTF-8 bytes of all documents."""
    tokens_sha256: str
    """Hash of all tokens as they were read: equal hashes, equal data."""
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

    @model_validator(mode="after")
    def _has_all_tokens(self) -> Self:
        if sum(self.shards) != self.train_tokens + self.eval_tokens:
            raise ValueError("shards are not all tokens")
        return self

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


class Stream(Protocol):
    """Tokens one after another: `TokenStream`, or `StoredTokens`."""

    def rows(self, starts: Ids, width: int) -> NDArray[np.unsignedinteger]:
        """So many tokens from each of some positions on: (starts, width)."""

    def read(self, start: int, out: NDArray[np.integer]) -> None:
        """Fill `out` with the tokens from a position on."""

    def document_starts(self, num_documents: int) -> NDArray[np.int64]:
        """The positions at which all documents start."""

    def is_advice_due(self) -> bool:
        """Whether `will_need` is of use for what is read next."""

    def will_need(self, pieces: Iterable[tuple[int, int]]) -> None:
        """So many tokens from each of some positions on are read soon."""


class TokenStream:
    """The tokens of one stream, mapped from its shards."""

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        shards: Sequence[int],
        mend: Callable[[int], None] | None = None,
    ) -> None:
        """Open it.

        Args:
            shards: tokens of each.
            mend: makes one anew.

        Raises:
            InputError: a file is missing, or not as long as it has to be.
        """
        self._paths = [shard_path(folder, name, index) for index in range(len(shards))]
        self._folder, self._name, self._advice = folder, name, _Advice()
        self._dtype, self._mend = dtype, mend
        self._sizes = [count * dtype.itemsize for count in shards]
        # In memory each shard begins with a block.
        blocks = np.cumsum([0, *map(num_blocks, self._sizes)])
        self._begins = (blocks * BLOCK_BYTES).tolist()
        ends = np.cumsum([0, *shards])
        self._shifts = blocks[:-1] * (BLOCK_BYTES // dtype.itemsize) - ends[:-1]
        self._ends, self._listed_ends = ends[1:], ends[1:].tolist()
        self._open()

    def rows(self, starts: Ids, width: int) -> NDArray[np.unsignedinteger]:
        """So many tokens from each of some positions on: (starts, width).

        Raises:
            InputError: as `read`.
        """
        waits, size = _num_waits(), self._dtype.itemsize
        shards = np.searchsorted(self._ends, starts, "right")
        places = starts + self._shifts[shards]
        is_plain = starts + width <= self._ends[shards]
        is_plain &= self._checked.were_read(places * size, width * size)
        out = self._windows(width)[places]
        for row in np.flatnonzero(~is_plain):
            self.read(int(starts[row]), out[row])
        self._advice.saw(_num_waits() - waits)
        return out

    def is_advice_due(self) -> bool:
        """Whether `will_need` is of use for what is read next."""
        return self._advice.is_due()

    def document_starts(self, num_documents: int) -> NDArray[np.int64]:
        """See `document_starts`."""
        return document_starts(self._folder, num_documents, self._name)

    def _windows(self, width: int) -> NDArray[np.unsignedinteger]:
        """All windows of the memory, which share it."""
        shape, step = (len(self._tokens) - width + 1, width), self._dtype.itemsize
        return np.ndarray(shape, self._dtype, self._memory, strides=(step, step))

    def read(self, start: int, out: NDArray[np.integer]) -> None:
        """Fill `out` with the tokens from a position on, across shards.

        Raises:
            InputError: what was written is damaged, and can't be made anew here and now.
        """
        done, size = 0, self._dtype.itemsize
        while done < len(out):
            shard, place = self._place(start + done)
            count = min(len(out) - done, self._listed_ends[shard] - start - done)
            if self._checked.are_good(place * size, (place + count) * size):
                out[done : done + count] = self._tokens[place : place + count]
                done += count
            else:
                self._renew(shard)

    def will_need(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Let the kernel fetch tokens from storage in the background."""
        for start, count in pieces:
            _, place = self._place(start)
            # Advice is given by whole pages.
            first_byte = place * self._dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            end_byte = min((place + count) * self._dtype.itemsize, len(self._memory))
            self._memory.madvise(mmap.MADV_WILLNEED, first_byte, end_byte - first_byte)

    def _place(self, position: int) -> tuple[int, int]:
        """The shard of a token, and its place in memory."""
        shard = bisect_right(self._listed_ends, position)  # for one faster than searchsorted
        return shard, position + int(self._shifts[shard])

    def _renew(self, shard: int) -> None:
        """Have a damaged shard made anew."""
        path, begin = self._paths[shard], self._begins[shard]
        if self._mend is None:
            forget_shard(path.parent, shard, len(self._paths))
            raise InputError(f"{path} is damaged: start again, and it is made anew.")
        self._mend(shard)
        self._open()
        if not self._checked.are_good(begin, begin + self._sizes[shard]):
            raise _damaged(path)

    def _open(self) -> None:
        every = zip(self._paths, self._sizes, self._begins[:-1], strict=True)
        shards = [shard for shard in every if shard[1]]
        try:
            self._memory = map_files(shards, self._begins[-1])
            checksums = [read_checksums(path, size) for path, size, _ in shards]
        except OSError as error:
            raise _damaged(error.filename or self._paths[0].parent) from None
        self._tokens = np.frombuffer(self._memory, self._dtype)
        joined = np.concatenate([np.empty(0, "<u4"), *checksums])
        self._checked = CheckedBytes(memoryview(self._memory), joined)


def part_path(folder: Path, part: int) -> Path:
    """The description of a part (parts.py), without which it is made anew."""
    return folder / f"part-{part:05d}.json"


def forget_shard(folder: Path, shard: int, num_shards: int) -> None:
    """Let the next `prepare` make a shard anew, with the other one of its part."""
    part_path(folder, shard % max(1, num_shards // 2)).unlink(missing_ok=True)
    (folder / META_FILE).unlink(missing_ok=True)


class TokenDataset:
    """One split of tokenised data, read by samples of any length."""

    def __init__(self, stream: Stream, name: SplitName, meta: Meta) -> None:
        """Open a split as a description cuts it."""
        total = meta.train_tokens + meta.eval_tokens
        self.name = name
        self._first = meta.train_tokens if name == "eval" else 0
        self.num_tokens = (meta.train_tokens if name == "train" else total) - self._first
        self._stream, self._num_documents = stream, meta.num_documents

    @cached_property
    def _document_starts(self) -> NDArray[np.int64]:
        return self._stream.document_starts(self._num_documents)

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

    def gather(self, sample_ids: NDArray[np.int64], seq_len: int) -> NDArray[np.unsignedinteger]:
        """Read samples.

        Returns:
            as they are written, (num_samples, seq_len + 1): inputs [:, :-1] and targets [:, 1:].

        Raises:
            IndexError: a sample id is out of range.
        """
        return self._stream.rows(self._starts(sample_ids, seq_len), seq_len + 1)

    def documents(self) -> Iterator[NDArray[np.int64]]:
        """The split's documents, each with its end; the first may be the rest of one that the other
        split begins with."""
        begin, last = self._first, self._first + self.num_tokens
        first, stop = np.searchsorted(self._document_starts, (begin + 1, last))
        for end in [*self._document_starts[first:stop].tolist(), last]:
            tokens = np.empty(end - begin, np.int64)
            self._stream.read(begin, tokens)
            yield tokens
            begin = end

    def counted(self, sample_ids: NDArray[np.int64], seq_len: int) -> None:
        """Which targets the loss counts: all."""

    def sources_of(self, sample_ids: NDArray[np.int64], seq_len: int) -> None:
        """There is one."""

    def will_need(self, sample_ids: NDArray[np.int64], seq_len: int) -> None:
        """Say that samples are gathered soon, so that storage is read while the device computes."""
        if self._stream.is_advice_due():
            starts = self._starts(sample_ids, seq_len).tolist()
            self._stream.will_need((start, seq_len + 1) for start in starts)

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


def _damaged(path: object) -> InputError:
    return InputError(f"{path} is missing or damaged: delete its folder and prepare the data anew.")
