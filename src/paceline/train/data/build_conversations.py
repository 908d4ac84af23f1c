"""Tokenise conversations into the folder that packed.py reads (all of it but meta.json).

As build.py does for documents, with a second stream beside the tokens: a byte for each token, 1
where it is a part of an answer. Conversations without one have nothing to learn from, and are left
out. The held-out split is whole conversations, chosen by the hash of their text, or else the last
one. The two of a preference stay together in all this.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data.build import Progress, unigram_entropy, unigram_loss
from paceline.train.data.conversations import ChatForm, ChatRow, texts_for_training
from paceline.train.data.dataset import (
    ANSWERS,
    FORMAT_VERSION,
    STREAM,
    TOKENIZER_FILE,
    Meta,
    token_dtype,
)
from paceline.train.data.files import SourceFile
from paceline.train.data.parts import is_held_out
from paceline.train.data.stream_writer import StreamWriter
from paceline.train.data.tokenizer import make_encoder

_BATCH_CHARS = 2 * 2**20
_BATCH_ROWS = 4096
_BYTE = np.dtype("u1")


def build_conversations(
    data: Data, files: list[SourceFile], folder: Path, key: str, progress: Progress
) -> Meta:
    """Write tokenizer, tokens, answers and positions into an empty folder; see `build.build`.

    Raises:
        InputError: one sentence, where a file, a row or the tokenizer can't be used, or there are
            not two conversations with an answer.
    """
    form = ChatForm.of(data)
    encoder = make_encoder(data.tokenizer, texts_for_training(form, files))
    encoder.save(folder / TOKENIZER_FILE)
    encoder.tokenizer.encode_special_tokens = False  # a template's are meant as such
    per_row: Literal[1, 2] = 2 if form.has_pairs else 1
    train, held_out = (
        _Split.of(folder, name, encoder.vocab_size, per_row) for name in ("", "-moved")
    )
    output = _Output(encoder.tokenizer, data.eval_fraction, train, held_out)
    for rows, read_bytes in _batches(form, files):
        output.write(rows)
        progress(*read_bytes)
    counts = (train.counts, held_out.counts)
    train_tokens = train.tokens.num_tokens
    train.absorb(held_out)
    if output.num_documents < 2:
        raise InputError(
            f"data.source = {data.source!r} holds {output.num_documents} "
            f"{'pairs of answers' if form.has_pairs else 'conversations with an answer'}, of which "
            "one is held out: bring more."
        )
    if train_tokens in (0, train.tokens.num_tokens):
        train_tokens, counts = train.without_last()
    train.tokens.finish()
    train.answers.finish()
    return Meta(
        format_version=FORMAT_VERSION,
        key=key,
        tokenizer=data.tokenizer,
        vocab_size=encoder.vocab_size,
        end_of_document=encoder.end_of_document,
        dtype="uint16" if train.tokens.dtype.itemsize == 2 else "uint32",
        shards=train.tokens.shards,
        train_tokens=train_tokens,
        eval_tokens=train.tokens.num_tokens - train_tokens,
        num_documents=output.num_documents,
        num_empty_documents=output.num_unanswered,
        text_bytes=output.text_bytes,
        tokens_sha256=output.hasher.hexdigest(),
        unigram_entropy=unigram_entropy(counts[0]),
        unigram_loss=unigram_loss(*counts),
        answer_tokens=int(sum(each.sum() for each in counts)),
        texts_per_row=per_row,
    )


@dataclass
class _Split:
    """The conversations of a split, while they are written."""

    tokens: StreamWriter
    answers: StreamWriter
    counts: NDArray[np.int64]
    """How often each token is in answers."""
    texts_per_row: int
    last_start: int = 0
    """Of the last row."""

    @classmethod
    def of(cls, folder: Path, name: str, vocab_size: int, texts_per_row: int) -> "_Split":
        tokens = StreamWriter(folder, STREAM + name, token_dtype(vocab_size))
        answers = StreamWriter(folder, ANSWERS + name, _BYTE)
        return cls(tokens, answers, np.zeros(vocab_size, np.int64), texts_per_row)

    def extend(self, texts: "Sequence[_Tokens]") -> None:
        """Append whole conversations."""
        if not texts:
            return
        ends = self.tokens.num_tokens + np.cumsum([len(text.ids) for text in texts])
        starts = np.array([self.tokens.num_tokens, *ends[:-1]])
        ids = np.concatenate([text.ids for text in texts])
        is_answer = np.concatenate([text.is_answer for text in texts])
        self.tokens.append(ids, starts)
        self.answers.append(is_answer, starts[:0])
        self.counts += np.bincount(ids[is_answer], minlength=len(self.counts))
        self.last_start = int(starts[-self.texts_per_row])

    def absorb(self, other: "_Split") -> None:
        """Append all of another split and delete its files."""
        if other.tokens.num_tokens:
            self.last_start = self.tokens.num_tokens + other.last_start
            self.tokens.absorb(other.tokens)
            self.answers.absorb(other.answers)

    def without_last(self) -> tuple[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Where the last row starts, and the counts of answers before and in it."""
        counts = [np.zeros_like(self.counts) for _ in range(2)]
        done = 0
        for tokens, answers in zip(self.tokens.chunks(), self.answers.chunks(), strict=True):
            cut = max(0, min(len(tokens), self.last_start - done))
            for part, total in zip((slice(0, cut), slice(cut, None)), counts, strict=True):
                chosen = tokens[part][answers[part] > 0]
                total += np.bincount(chosen, minlength=len(total))
            done += len(tokens)
        return self.last_start, (counts[0], counts[1])


@dataclass
class _Output:
    """Tokenises conversations into the splits, and what it adds up of them."""

    tokenizer: Tokenizer
    eval_fraction: float
    train: _Split
    held_out: _Split
    num_documents: int = 0
    num_unanswered: int = 0
    text_bytes: int = 0
    hasher: Any = field(default_factory=hashlib.sha256)

    def write(self, rows: list[list[ChatRow]]) -> None:
        """Tokenise and append the conversations of rows."""
        chosen: dict[bool, list[_Tokens]] = {True: [], False: []}
        found = self._tokens([text for row in rows for text in row])
        for row in rows:
            tokens = [next(found) for _ in row]
            # Nothing predicts the first token.
            if not all(each.is_answer[1:].any() for each in tokens):
                self.num_unanswered += 1
                continue
            encoded = "".join(text.conversation.text for text in row).encode()
            self.num_documents += 1
            self.text_bytes += len(encoded)
            for each in tokens:
                self.hasher.update(each.ids.astype("<i8").tobytes() + each.is_answer.tobytes())
            chosen[is_held_out(encoded, self.eval_fraction)] += tokens
        self.train.extend(chosen[False])
        self.held_out.extend(chosen[True])

    def _tokens(self, rows: list[ChatRow]) -> Iterator["_Tokens"]:
        found: dict[bool, Iterator[Encoding]] = {}
        for is_plain in (False, True):
            texts = [row.conversation.text for row in rows if row.is_plain is is_plain]
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=is_plain)
            found[is_plain] = iter(encodings)
        for row in rows:
            encoding = next(found[row.is_plain])
            is_answer = tokens_within(encoding, row.conversation.answers)
            yield _Tokens(np.array(encoding.ids, np.int64), is_answer)


class _Tokens(NamedTuple):
    """A conversation: (num_tokens,) both."""

    ids: NDArray[np.int64]
    is_answer: NDArray[np.bool_]


def tokens_within(encoding: Encoding, spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have a character in one of the spans: (num_tokens,)."""
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    within = np.zeros(len(offsets), bool)
    for begin, end in spans:
        within |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    return within


def _batches(
    form: ChatForm, files: list[SourceFile]
) -> Iterator[tuple[list[list[ChatRow]], tuple[int, int]]]:
    """Rows by as many as are tokenised at once, with the bytes read so far and those of all."""
    total = sum(file.size_bytes for file in files)
    batch: list[list[ChatRow]] = []
    before = num_chars = 0
    for file in files:
        for row, read_bytes in form.read([file]):
            batch.append(row)
            num_chars += sum(len(text.conversation.text) for text in row)
            if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_ROWS:
                yield batch, (before + read_bytes, total)
                batch, num_chars = [], 0
        before += file.size_bytes
    if batch:
        yield batch, (total, total)
