"""Prompts: rows that a network is to complete, with what a reward function is told of them.

How it works: a row has `prompt`, a text or a list of messages, which a chat template makes into the
text that an answer follows. Beside the stream of tokens there is one of bytes: of each row the
columns of `data.columns`, as JSON. A sample is one prompt; the held-out split is whole rows, by the
hash of the prompt.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data.build import Progress, unigram_entropy
from paceline.train.data.conversations import ChatForm
from paceline.train.data.dataset import (
    FORMAT_VERSION,
    STREAM,
    TOKENIZER_FILE,
    Meta,
    SplitName,
    TokenStream,
    document_starts,
    token_dtype,
)
from paceline.train.data.files import SourceFile
from paceline.train.data.order import Ids, sample_ids
from paceline.train.data.parts import is_held_out
from paceline.train.data.stream_writer import StreamWriter, shards_of
from paceline.train.data.tokenizer import make_encoder

_COLUMNS = "columns"
_BYTE = np.dtype("u1")


class Prompt(NamedTuple):
    """One to complete."""

    tokens: list[int]
    columns: dict[str, Any]
    """What the reward function is told of it."""


class Prompts:
    """One split of them.

    Args:
        folder: that `build_prompts` filled.
    """

    def __init__(self, folder: Path, name: SplitName, meta: Meta) -> None:
        assert meta.column_bytes is not None
        self.name = name
        total = meta.train_tokens + meta.eval_tokens
        dtype = np.dtype(meta.dtype).newbyteorder("<")
        self._tokens = TokenStream(folder, STREAM, dtype, meta.shards)
        self._columns = TokenStream(folder, _COLUMNS, _BYTE, shards_of(meta.column_bytes))
        starts = document_starts(folder, meta.num_documents)
        first = int(np.searchsorted(starts, meta.train_tokens))
        self._rows = range(first) if name == "train" else range(first, len(starts))
        self._spans = _spans(starts, total)
        columns_at = document_starts(folder, meta.num_documents, _COLUMNS)
        self._column_spans = _spans(columns_at, meta.column_bytes)

    def num_samples(self, seq_len: int) -> int:
        """Prompts that leave room for an answer in so many tokens.

        Raises:
            InputError: not a single one.
        """
        if not len(self._kept(seq_len)):
            raise InputError(
                f'train.seq_len = {seq_len} leaves no room for an answer to any prompt of the "'
                f'{self.name}" split: raise it.'
            )
        return len(self._kept(seq_len))

    def order(self, seed: int, seq_len: int) -> Callable[[int, int], Ids]:
        """Maps a running number in a run and a count to prompts: epoch after epoch, shuffled."""
        return partial(sample_ids, seed, num_samples=self.num_samples(seq_len))

    def read(self, ids: Ids, seq_len: int) -> list[Prompt]:
        """Those of these numbers, from 0 to `num_samples`."""
        return [self._prompt(row) for row in self._kept(seq_len)[ids].tolist()]

    def _kept(self, seq_len: int) -> Ids:
        rows = np.arange(self._rows.start, self._rows.stop)
        return rows[np.diff(self._spans)[rows] <= seq_len]

    def _prompt(self, row: int) -> Prompt:
        tokens, columns = (
            np.empty(spans[row + 1] - spans[row], np.int64)
            for spans in (self._spans, self._column_spans)
        )
        self._tokens.read(int(self._spans[row]), tokens)
        self._columns.read(int(self._column_spans[row]), columns)
        return Prompt(tokens.tolist(), json.loads(columns.astype(_BYTE).tobytes()))


def build_prompts(
    data: Data, files: list[SourceFile], folder: Path, key: str, progress: Progress
) -> Meta:
    """Write tokenizer, tokens and columns into an empty folder; see `build.build`.

    Raises:
        InputError: one sentence, where a file, a row or the tokenizer can't be used, or there are
            not two prompts.
    """
    form = ChatForm.of(data)
    texts = (text for text, *_ in _rows(form, data, files))
    encoder = make_encoder(data.tokenizer, texts)
    encoder.save(folder / TOKENIZER_FILE)
    encoder.tokenizer.encode_special_tokens = False  # a template's are meant as such
    dtype = token_dtype(encoder.vocab_size)
    splits = [
        (StreamWriter(folder, STREAM + part, dtype), StreamWriter(folder, _COLUMNS + part, _BYTE))
        for part in ("", "-moved")
    ]
    total_bytes, counts = sum(file.size_bytes for file in files), [0, 0]
    occurrences, hasher = np.zeros(encoder.vocab_size, np.int64), hashlib.sha256()
    for text, is_plain, columns, read_bytes in _rows(form, data, files):
        tokens = np.array(encoder.tokenizer.encode(text, add_special_tokens=is_plain).ids, np.int64)
        told = np.frombuffer(columns, _BYTE)
        # Of two rows at least one is trained on, and one held out.
        moves = is_held_out(text.encode(), data.eval_fraction) and counts[0] > 0
        moves = moves or sum(counts) == 1
        parts: tuple[NDArray[Any], ...] = (tokens, told)
        for writer, values in zip(splits[moves], parts, strict=True):
            writer.append(values, np.array([writer.num_tokens]))
        counts[moves] += 1
        occurrences += np.bincount(tokens, minlength=len(occurrences))
        hasher.update(tokens.astype("<i8").tobytes() + told.tobytes())
        progress(read_bytes, total_bytes)
    if sum(counts) < 2:
        raise InputError(
            f"data.source = {data.source!r} holds {sum(counts)} prompts, of which one is held out: "
            "bring more."
        )
    (tokens_of, columns_of), moved = splits
    train_tokens = tokens_of.num_tokens
    for writer, other in zip((tokens_of, columns_of), moved, strict=True):
        writer.absorb(other)
        writer.finish()
    return Meta(
        format_version=FORMAT_VERSION,
        key=key,
        tokenizer=data.tokenizer,
        vocab_size=encoder.vocab_size,
        end_of_document=encoder.end_of_document,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        shards=tokens_of.shards,
        train_tokens=train_tokens,
        eval_tokens=tokens_of.num_tokens - train_tokens,
        num_documents=sum(counts),
        num_empty_documents=0,
        text_bytes=total_bytes,
        tokens_sha256=hasher.hexdigest(),
        unigram_entropy=unigram_entropy(occurrences),
        unigram_loss=0.0,
        column_bytes=columns_of.num_tokens,
    )


def _rows(
    form: ChatForm, data: Data, files: list[SourceFile]
) -> Iterator[tuple[str, bool, bytes, int]]:
    """Of each row the text, whether no template made it, its columns as JSON, and bytes read so
    far."""
    before = 0
    for file in files:
        for row, text, is_plain in form.read_prompts(file, data.columns):
            missing = [name for name in data.columns if name not in row.values]
            if missing:
                raise InputError(
                    f"{row.where} has no {missing[0]!r}, which data.columns names: correct it."
                )
            try:
                columns = json.dumps({name: row.values[name] for name in data.columns})
            except TypeError as error:  # columnar files have types of their own
                raise InputError(
                    f"{row.where} can't be kept for the reward function ({error}): convert its "
                    "column to text or numbers, or leave it out of data.columns."
                ) from None
            yield text, is_plain, columns.encode(), before + row.read_bytes
        before += file.size_bytes


def _spans(starts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    return np.append(starts, total)
