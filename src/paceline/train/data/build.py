"""Tokenise files into the folder that dataset.py reads (all of it but meta.json).

How it works: the source is cut into parts, which processes tokenise side by side (parts.py), in
batches of about 2 MiB. So memory does not grow with the source, but a single document of a file of
rows must fit. The tokens are the same for any number of processes, and what a killed build finished
is kept.

The held-out split is the last `eval_fraction` of all tokens. So that it is whole documents from
everywhere, those whose first piece hashes below that fraction are moved to the end first: copies of
a document move together, and no document but the one at the cut is in both splits. Where documents
are few or very large and the hash picks too little, the tail of the others makes up for it: even a
single document has a held-out part.

It is not the cache: cache.py decides whether and where this happens.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.machine.discovery import num_cores
from paceline.train.data.dataset import (
    FORMAT_VERSION,
    STREAM,
    TOKENIZER_FILE,
    Meta,
    TokenStream,
    documents_path,
    token_dtype,
)
from paceline.train.data.documents import read_pieces
from paceline.train.data.duplicates import find_duplicates
from paceline.train.data.files import SourceFile
from paceline.train.data.parts import Build, PartMeta, make_parts, parts_of, starts_path
from paceline.train.data.tokenizer import TRAINING_CHARS, Encoder, bpe_size, make_encoder

Progress = Callable[[int, int], None]
Counts = NDArray[np.int64]
CHANGED = "data.source changed while it was tokenised: start again."
_READ_AT_ONCE = 2**20


def build(data: Data, files: list[SourceFile], folder: Path, key: str, progress: Progress) -> Meta:
    """Write what is missing of tokenizer, shards and document positions into a folder.

    Args:
        data: tokenizer, text field and held-out fraction.
        files: what to read, in order.
        folder: an empty one, or what is left of an interrupted build of the same.
        key: goes into the description as it is.
        progress: called with the bytes read so far and those of all files, on disk; both twice
            where duplicates are looked for first.

    Returns:
        the description of the folder, not written yet.

    Raises:
        InputError: one sentence, where a file or the tokenizer can't be used.
    """
    total_bytes = sum(file.size_bytes for file in files)
    has_pass = data.dedup.method != "none"  # in which duplicates are looked for
    before, after = (total_bytes, 2 * total_bytes) if has_pass else (0, total_bytes)
    progress(0, after)
    encoder = _encoder(data, files, folder)
    plan = Build(
        folder,
        parts_of(files),
        data.text_field,
        data.filter,
        data.eval_fraction,
        encoder.end_of_document,
        encoder.is_bytes,
    )
    if has_pass:
        found = partial(find_duplicates, data.dedup, plan.parts, data.text_field, data.filter)
        found(folder, lambda read: progress(read, after))
    make_parts(plan, num_cores(), lambda read: progress(before + read, after))
    progress(after, after)
    parts = [made for part in range(len(plan.parts)) if (made := plan.made(part)) is not None]
    if len(parts) < len(plan.parts):
        raise InputError(CHANGED)
    for left in folder.glob("*.partial"):  # of processes that were killed
        left.unlink()
    if not sum(part.num_documents for part in parts):
        cure = "name other files" if data.filter is None else "name other files or another filter"
        raise InputError(f"data.source = {data.source!r} holds no text at all: {cure}.")
    return _describe(data, key, encoder, plan, parts)


def _encoder(data: Data, files: list[SourceFile], folder: Path) -> Encoder:
    """The tokenizer of the folder, made first where there is none."""
    path = folder / TOKENIZER_FILE
    if path.is_file() and bpe_size(data.tokenizer):
        return make_encoder(str(path), [])
    encoder = make_encoder(data.tokenizer, training_texts(files, data))
    aside = path.with_suffix(".partial")
    encoder.save(aside)
    aside.replace(path)
    return encoder


def training_texts(
    files: list[SourceFile], data: Data, num_chars: int = TRAINING_CHARS
) -> Iterator[str]:
    """The sample that a BPE is trained on: each file's beginning, in proportion to its size."""
    sizes = [file.size_bytes for file in files]
    for file, size_bytes in zip(files, sizes, strict=True):
        if file.format == "megatron":
            raise InputError(
                f"{file.path} holds tokens, on which no BPE is trained: set data.tokenizer to the "
                "tokenizer.json that they were made with."
            )
        left = num_chars * size_bytes // max(1, sum(sizes))
        for piece in read_pieces(file, data.text_field, data.filter):
            yield piece.text[:left]
            left -= len(piece.text)
            if left <= 0:
                break


def _describe(data: Data, key: str, encoder: Encoder, plan: Build, parts: list[PartMeta]) -> Meta:
    """Write where documents start, and describe the folder."""
    shards = tuple(part.tokens[moves] for moves in (0, 1) for part in parts)
    begins = np.cumsum((0, *shards)).tolist()
    paths = [plan.shards(part)[moves] for moves in (0, 1) for part in range(len(parts))]
    with documents_path(plan.folder, STREAM).open("wb") as file:
        for path, begin in zip(paths, begins[:-1], strict=True):
            (np.fromfile(starts_path(path), "<i8") + begin).astype("<i8").tofile(file)
    eval_tokens = max(1, int(begins[-1] * data.eval_fraction))
    train_tokens = begins[-1] - eval_tokens
    dtype = token_dtype(encoder.vocab_size)
    counts = np.sum([plan.counts(part) for part in range(len(parts))], axis=0)
    stream = TokenStream(plan.folder, STREAM, dtype, shards)
    eval_counts = np.zeros_like(counts)
    for start in range(train_tokens, begins[-1], _READ_AT_ONCE):
        tokens = np.empty(min(_READ_AT_ONCE, begins[-1] - start), np.int64)
        stream.read(start, tokens)
        eval_counts += np.bincount(tokens, minlength=len(eval_counts))
    written = json.dumps([(part.tokens, part.sha256) for part in parts])
    return Meta(
        format_version=FORMAT_VERSION,
        key=key,
        tokenizer=data.tokenizer,
        vocab_size=len(counts),
        end_of_document=encoder.end_of_document,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        shards=shards,
        train_tokens=train_tokens,
        eval_tokens=eval_tokens,
        num_documents=sum(part.num_documents for part in parts),
        num_empty_documents=sum(part.num_empty_documents for part in parts),
        num_filtered_out=sum(part.num_filtered_out for part in parts),
        num_duplicates=sum(part.num_duplicates for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        tokens_sha256=hashlib.sha256(written.encode()).hexdigest(),
        unigram_entropy=unigram_entropy(counts - eval_counts),
        unigram_loss=unigram_loss(counts - eval_counts, eval_counts),
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
