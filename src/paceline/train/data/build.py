"""Tokenise files into the folder that dataset.py reads (all of it but meta.json).

How it works: text is read in pieces, tokenised in batches of about 2 MiB on all threads of the
`tokenizers` library, and appended to shards. So memory does not grow with the source, but a single
document of JSON lines, Parquet or Arrow must fit.

The held-out split is the last `eval_fraction` of all tokens. So that it is whole documents from
everywhere, those whose first piece hashes below that fraction are moved to the end first: copies of
a document move together, and no document but the one at the cut is in both splits. Where documents
are few or very large and the hash picks too little, the tail of the others makes up for it: even a
single document has a held-out part.

It is not the cache: cache.py decides whether and where this happens.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data.dataset import (
    FORMAT_VERSION,
    SHARD_TOKENS,
    STREAM,
    TOKENIZER_FILE,
    Meta,
    TokenStream,
    documents_path,
    shard_path,
    token_dtype,
)
from paceline.train.data.documents import read_pieces
from paceline.train.data.files import SourceFile
from paceline.train.data.tokenizer import TRAINING_CHARS, Encoder, make_encoder

Progress = Callable[[int, int], None]
Counts = NDArray[np.int64]
_BATCH_CHARS = 2 * 2**20
_BATCH_PARTS = 4096
_READ_AT_ONCE = 2**20


@dataclass(frozen=True)
class _Part:
    """A piece of a document, and whether its document moves to the end."""

    text: str
    is_held_out: bool
    starts: bool
    ends: bool
    read_bytes: int


@dataclass
class _Totals:
    """What is counted while documents are read."""

    num_documents: int = 0
    num_empty_documents: int = 0
    text_bytes: int = 0


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
            shard, filled = divmod(self.num_tokens, SHARD_TOKENS)
            part, tokens = np.split(tokens, [SHARD_TOKENS - filled])
            with shard_path(self.folder, self.name, shard).open("ab") as file:
                part.astype(self.dtype).tofile(file)
            self.num_tokens += len(part)

    def chunks(self, first: int = 0) -> Iterator[NDArray[np.int64]]:
        """Read the tokens back from a position on, in chunks."""
        reader = TokenStream(self.folder, self.name, self.dtype, SHARD_TOKENS, self.num_tokens)
        for start in range(first, self.num_tokens, _READ_AT_ONCE):
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


@dataclass(frozen=True)
class _Output:
    """Where a build puts tokens, and what it adds up of them."""

    encoder: Encoder
    kept: StreamWriter
    moved: StreamWriter
    counts: Counts
    hasher: Any = field(default_factory=hashlib.sha256)

    def write(self, parts: list[_Part]) -> None:
        """Tokenise and append parts of documents."""
        tokens = self.encoder.encode([part.text for part in parts])
        end = self.encoder.end_of_document
        tokens = [np.append(t, end) if p.ends else t for t, p in zip(tokens, parts, strict=True)]
        joined = np.concatenate(tokens)
        self.counts[:] += np.bincount(joined, minlength=len(self.counts))
        self.hasher.update(joined.astype("<i8").tobytes())
        for stream, held_out in ((self.kept, False), (self.moved, True)):
            pairs = zip(tokens, parts, strict=True)
            _append(stream, [(t, p.starts) for t, p in pairs if p.is_held_out is held_out])


def _append(stream: StreamWriter, parts: list[tuple[NDArray[np.int64], bool]]) -> None:
    if parts:
        ends = stream.num_tokens + np.cumsum([len(tokens) for tokens, _ in parts])
        begins = np.array([stream.num_tokens, *ends[:-1]])
        starts = np.array([starts for _, starts in parts])
        stream.append(np.concatenate([tokens for tokens, _ in parts]), begins[starts])


def build(data: Data, files: list[SourceFile], folder: Path, key: str, progress: Progress) -> Meta:
    """Write tokenizer, shards and document positions into an empty folder.

    Args:
        data: tokenizer, text field and held-out fraction.
        files: what to read, in order.
        folder: an empty one.
        key: goes into the description as it is.
        progress: called with the bytes read so far and those of all files, on disk.

    Returns:
        the description of the folder, not written yet.

    Raises:
        InputError: one sentence, where a file or the tokenizer can't be used.
    """
    total_bytes = sum(file.size_bytes for file in files)
    progress(0, total_bytes)
    encoder = make_encoder(data.tokenizer, training_texts(files, data.text_field))
    encoder.tokenizer.save(str(folder / TOKENIZER_FILE))
    output, totals = _open_output(encoder, folder), _Totals()
    for batch in _batches(_parts(files, data, totals)):
        output.write(batch)
        progress(batch[-1].read_bytes, total_bytes)
    progress(total_bytes, total_bytes)
    if not totals.num_documents:
        raise InputError(f"data.source = {data.source!r} holds no text at all: name other files.")
    if output.moved.num_tokens:
        output.kept.absorb(output.moved)
    return _describe(data, key, output, totals)


def training_texts(
    files: list[SourceFile], text_field: str, num_chars: int = TRAINING_CHARS
) -> Iterator[str]:
    """The sample that a BPE is trained on: each file's beginning, in proportion to its size."""
    sizes = [file.size_bytes for file in files]
    for file, size_bytes in zip(files, sizes, strict=True):
        left = num_chars * size_bytes // max(1, sum(sizes))
        for piece in read_pieces(file, text_field):
            yield piece.text[:left]
            left -= len(piece.text)
            if left <= 0:
                break


def _open_output(encoder: Encoder, folder: Path) -> _Output:
    dtype = token_dtype(encoder.vocab_size)
    kept, moved = (StreamWriter(folder, name, dtype) for name in (STREAM, "moved"))
    return _Output(encoder, kept, moved, np.zeros(encoder.vocab_size, np.int64))


def _parts(files: list[SourceFile], data: Data, totals: _Totals) -> Iterator[_Part]:
    """Choose the documents that move to the end, and count all."""
    before_bytes, starts, moves = 0, True, False
    for file in files:
        for piece in read_pieces(file, data.text_field):
            if not piece.text:
                totals.num_empty_documents += 1
                continue
            encoded = piece.text.encode()
            totals.text_bytes += len(encoded)
            if starts:
                totals.num_documents += 1
                moves = is_held_out(encoded, data.eval_fraction)
            read_bytes = before_bytes + piece.read_bytes
            yield _Part(piece.text, moves, starts, piece.ends_document, read_bytes)
            starts = piece.ends_document
        before_bytes += file.size_bytes


def is_held_out(first_piece: bytes, fraction: float) -> bool:
    """Whether a document that begins like this is in the held-out split."""
    digest = hashlib.blake2b(first_piece, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    num_chars = 0
    for part in parts:
        batch.append(part)
        num_chars += len(part.text)
        if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_PARTS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _describe(data: Data, key: str, output: _Output, totals: _Totals) -> Meta:
    stream = output.kept
    eval_tokens = max(1, int(stream.num_tokens * data.eval_fraction))
    train_tokens = stream.num_tokens - eval_tokens
    eval_counts = np.zeros_like(output.counts)
    for tokens in stream.chunks(first=train_tokens):
        eval_counts += np.bincount(tokens, minlength=len(eval_counts))
    train_counts = output.counts - eval_counts
    return Meta(
        format_version=FORMAT_VERSION,
        key=key,
        tokenizer=data.tokenizer,
        vocab_size=len(train_counts),
        end_of_document=output.encoder.end_of_document,
        dtype="uint16" if stream.dtype.itemsize == 2 else "uint32",
        shard_tokens=SHARD_TOKENS,
        train_tokens=train_tokens,
        eval_tokens=eval_tokens,
        tokens_sha256=output.hasher.hexdigest(),
        unigram_entropy=unigram_entropy(train_counts),
        unigram_loss=unigram_loss(train_counts, eval_counts),
        **vars(totals),
    )


def unigram_entropy(counts: Counts) -> float:
    """Entropy of token frequencies, nats per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_loss(train_counts: Counts, eval_counts: Counts) -> float:
    """Cross-entropy on held-out tokens of the train split's frequencies, with one added to each
    count so that no token is impossible; nats per token."""
    log_shares = np.log(train_counts + 1) - np.log(train_counts.sum() + len(train_counts))
    return float(-(eval_counts * log_shares).sum() / eval_counts.sum())
