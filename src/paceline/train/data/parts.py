"""Parts of a source: each is tokenised by itself, by one of several processes, complete or absent.

How it works: a part is some files, or a stretch of a large file of JSON lines, about as much text
as a core tokenises in half a minute; which it is follows from the files' sizes alone. A part has
two shards, the documents that stay and those that move to the end (build.py), and its description,
which is written last: what a killed build finished is not made again. Each worker is a process of
its own, which gets the numbers of parts, one after another, and ends when its parent does.
"""

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from paceline.config.errors import InputError
from paceline.config.frozen import FrozenConfig
from paceline.observe.run import write_atomic
from paceline.train.data.checksums import write_checksums
from paceline.train.data.dataset import (
    STREAM,
    TOKENIZER_FILE,
    part_path,
    shard_path,
    token_dtype,
)
from paceline.train.data.documents import read_pieces
from paceline.train.data.duplicates import duplicates_of
from paceline.train.data.files import SourceFile
from paceline.train.data.megatron import read_documents
from paceline.train.data.tokenizer import Encoder, read_tokenizer

PART_BYTES = 64 * 2**20
_MOST_PARTS = 1024
"""Of one source, but for files that are larger: whoever reads it maps two shards of each."""
_BATCH_CHARS = 2 * 2**20
_BATCH_PIECES = 4096


class PartMeta(FrozenConfig):
    """What a part holds."""

    files: str
    """What it was made of."""
    tokens: tuple[int, int] = Field(strict=False)
    """Of the documents that stay, and of those that move."""
    sha256: tuple[str, str] = Field(strict=False)
    """Of these tokens as they are written."""
    num_documents: int
    num_empty_documents: int
    num_filtered_out: int
    num_duplicates: int
    text_bytes: int


@dataclass(frozen=True)
class Build:
    """All that the tokens of a source depend on, as workers are told it."""

    folder: Path
    parts: tuple[tuple[SourceFile, ...], ...]
    text_field: str
    filter: str | None
    eval_fraction: float
    end_of_document: int
    is_bytes: bool

    @property
    def encoder(self) -> Encoder:
        """By the tokenizer in the folder."""
        tokenizer = read_tokenizer(self.folder / TOKENIZER_FILE)
        tokenizer.encode_special_tokens = True
        return Encoder(tokenizer, self.end_of_document, self.is_bytes)

    def shards(self, part: int) -> tuple[Path, Path]:
        """Of the documents of a part that stay, and of those that move behind all that stay."""
        kept, moved = part, len(self.parts) + part
        return shard_path(self.folder, STREAM, kept), shard_path(self.folder, STREAM, moved)

    def size_bytes(self, part: int) -> int:
        """Bytes of a part's files."""
        return sum(file.size_bytes for file in self.parts[part])

    def made(self, part: int) -> PartMeta | None:
        """The description of a part that is complete, and made of the same."""
        try:
            meta = PartMeta.model_validate_json(part_path(self.folder, part).read_bytes())
        except (OSError, ValidationError):
            return None
        return meta if meta.files == self._files_text(part) else None

    def counts(self, part: int) -> NDArray[np.int64]:
        """How often each token is in a part: (vocab_size,)."""
        return np.fromfile(counts_path(self.folder, part), "<i8").astype(np.int64)

    def make(self, part: int, encoder: Encoder, progress: Callable[[int], None]) -> None:
        """Tokenise a part.

        Args:
            progress: called with the bytes of it read so far.

        Raises:
            InputError: a file can't be used.
        """
        with closing(_PartWriter(self, part, encoder)) as writer:
            for batch in _batches(self._pieces(part, writer)):
                writer.write(batch)
                progress(batch[-1].read_bytes)
            writer.finish(self._files_text(part))

    def _pieces(self, part: int, writer: "_PartWriter") -> Iterator["_Piece"]:
        before_bytes, starts, moves, is_duplicate = 0, True, False, False
        duplicates = duplicates_of(self.folder, part)
        for file in self.parts[part]:
            if file.format == "megatron":
                if self.filter is not None:
                    raise InputError(
                        f"{file.path} holds tokens, which have no fields for data.filter: leave it "
                        "out."
                    )
                yield from self._documents(file, before_bytes, writer)
                before_bytes += file.size_bytes
                continue
            for piece in read_pieces(file, self.text_field, self.filter):
                if not piece.is_kept:
                    writer.num_filtered_out += 1
                    continue
                if not piece.text:
                    writer.num_empty_documents += 1
                    continue
                if starts:
                    is_duplicate = next(duplicates)
                    writer.num_duplicates += is_duplicate
                if is_duplicate:
                    starts = piece.ends_document
                    continue
                encoded = piece.text.encode()
                writer.text_bytes += len(encoded)
                if starts:
                    writer.num_documents += 1
                    moves = is_held_out(encoded, self.eval_fraction)
                read_bytes = before_bytes + piece.read_bytes
                yield _Piece(piece.text, moves, starts, piece.ends_document, read_bytes)
                starts = piece.ends_document
            before_bytes += file.size_bytes

    def _documents(
        self, file: SourceFile, read_bytes: int, writer: "_PartWriter"
    ) -> Iterator["_Piece"]:
        """Those of a file of tokens."""
        if not isinstance(file.path, Path):
            raise InputError(f"{file.path} is read from a disk only: copy it and its .bin there.")
        for number, tokens in enumerate(read_documents(file.path)):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < writer.vocab_size:
                raise InputError(
                    f"{file.path} document {number} has tokens that data.tokenizer hasn't, which "
                    f"knows those below {writer.vocab_size}: set it to the tokenizer.json that "
                    "they were made with."
                )
            own = tokens[:-1] if tokens[-1:] == self.end_of_document else tokens
            if not len(own):
                writer.num_empty_documents += 1
                continue
            writer.num_documents += 1
            moves = is_held_out(own.tobytes(), self.eval_fraction)
            yield _Piece("", moves, True, True, read_bytes, own)

    def _files_text(self, part: int) -> str:
        return json.dumps([(file.size_bytes, file.format, file.span) for file in self.parts[part]])


def counts_path(folder: Path, part: int) -> Path:
    """How often each token is in a part."""
    return folder / f"part-{part:05d}-counts.bin"


def starts_path(shard: Path) -> Path:
    """Where the documents of a shard start, in it."""
    return shard.with_suffix(".starts")


def is_held_out(first_piece: bytes, fraction: float) -> bool:
    """Whether a document that begins like this is in the held-out split."""
    digest = hashlib.blake2b(first_piece, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def parts_of(files: Sequence[SourceFile]) -> tuple[tuple[SourceFile, ...], ...]:
    """Share files out over parts, in their order."""
    most = max(PART_BYTES, sum(file.size_bytes for file in files) // _MOST_PARTS)
    parts: list[list[SourceFile]] = []
    filled = 0
    for file in files:
        for stretch in _stretches(file, most):
            if not parts or filled + stretch.size_bytes > most:
                parts.append([])
                filled = 0
            parts[-1].append(stretch)
            filled += stretch.size_bytes
    return tuple(tuple(part) for part in parts)


def _stretches(file: SourceFile, most: int) -> list[SourceFile]:
    size = file.size_bytes
    if file.format != "jsonl" or file.compression or not file.can_be_sought or size <= most:
        return [file]
    return [replace(file, span=(at, min(at + most, size))) for at in range(0, size, most)]


def make_parts(build: Build, num_workers: int, progress: Callable[[int], None]) -> None:
    """Tokenise what is missing.

    Args:
        num_workers: processes; one: this one.
        progress: called with the bytes of all files read so far.

    Raises:
        InputError: a file can't be used.
    """
    missing = [part for part in range(len(build.parts)) if build.made(part) is None]
    done = sum(build.size_bytes(part) for part in range(len(build.parts)) if part not in missing)
    if num_workers == 1 or len(missing) <= 1:
        encoder = build.encoder
        for part in missing:
            build.make(part, encoder, partial(_go_on, progress, done))
            done += build.size_bytes(part)
        return
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for part in missing:
        waiting.put(part)
    made: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    workers = [_Worker(build, waiting, made) for _ in range(min(num_workers, len(missing)))]
    try:
        for _ in missing:
            found = made.get()
            if isinstance(found, Exception):
                raise found
            done += build.size_bytes(found)
            progress(done)
    finally:
        for worker in workers:
            worker.end()


def _go_on(progress: Callable[[int], None], before_bytes: int, read_bytes: int) -> None:
    progress(before_bytes + read_bytes)


class _Worker:
    """A process that makes parts, and the thread that tells it which."""

    def __init__(
        self,
        build: Build,
        waiting: "queue.SimpleQueue[int]",
        made: "queue.SimpleQueue[int | Exception]",
    ) -> None:
        """Start both.

        Args:
            waiting: numbers of parts.
            made: gets them, or why one can't be made.
        """
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
        one_thread = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        one_thread["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=one_thread, text=True, encoding="utf-8"
        )
        arguments = (_BUILD.dump_json(build).decode(), waiting, made)
        self._thread = Thread(target=self._work, args=arguments, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it, whatever it does."""
        with self._process:
            self._process.kill()
            self._thread.join()

    def _work(
        self,
        told: str,
        waiting: "queue.SimpleQueue[int]",
        made: "queue.SimpleQueue[int | Exception]",
    ) -> None:
        with suppress(queue.Empty):
            while True:
                part = waiting.get_nowait()
                try:
                    answer = json.loads(self._answer(f"{told}\n{part}\n"))
                except (OSError, ValueError):  # its own message stands on standard error
                    made.put(RuntimeError(f"the process that tokenised part {part} ended early"))
                    return
                told = ""
                if isinstance(answer, list):
                    made.put(OSError(*answer))
                else:
                    made.put(InputError(answer) if answer else part)

    def _answer(self, told: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(told.lstrip())
        self._process.stdin.flush()
        return self._process.stdout.readline()


def serve() -> None:
    """Make the parts that standard input names, until it ends; answer with sentences, or none.

    Where one can't be written, the answer is what its OSError was made of.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    parent = os.getppid()

    def go_on(_: int) -> None:
        if os.getppid() != parent:
            os._exit(1)

    build = _BUILD.validate_json(sys.stdin.readline())
    encoder = build.encoder
    for line in sys.stdin:
        try:
            build.make(int(line), encoder, go_on)
            answer: str | list[Any] = ""
        except InputError as error:
            answer = str(error)
        except OSError as error:
            answer = list(error.args)
        print(json.dumps(answer), flush=True)


@dataclass(frozen=True)
class _Piece:
    """A piece of a document, and whether its document moves to the end."""

    text: str
    is_held_out: bool
    starts: bool
    ends: bool
    read_bytes: int
    tokens: NDArray[np.int64] | None = None
    """In place of the text."""

    @property
    def size(self) -> int:
        """Characters or tokens."""
        return len(self.text if self.tokens is None else self.tokens)


class _PartWriter:
    """Writes the shards of a part beside their names, and gives them these when all is there."""

    def __init__(self, build: Build, part: int, encoder: Encoder) -> None:
        self._encoder, self._folder, self._part = encoder, build.folder, part
        dtype = token_dtype(encoder.vocab_size)
        self._shards = [_ShardWriter(path, dtype) for path in build.shards(part)]
        self._counts = np.zeros(encoder.vocab_size, np.int64)
        self.num_documents = self.num_empty_documents = self.text_bytes = 0
        self.num_filtered_out = self.num_duplicates = 0

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return len(self._counts)

    def write(self, pieces: list[_Piece]) -> None:
        """Tokenise and append pieces of documents."""
        end = self._encoder.end_of_document
        encoded = iter(self._encoder.encode([p.text for p in pieces if p.tokens is None]))
        found = [next(encoded) if p.tokens is None else p.tokens for p in pieces]
        tokens = [np.append(t, end) if p.ends else t for t, p in zip(found, pieces, strict=True)]
        self._counts += np.bincount(np.concatenate(tokens), minlength=self.vocab_size)
        for shard, moves in zip(self._shards, (False, True), strict=True):
            pairs = zip(tokens, pieces, strict=True)
            shard.append([(t, p.starts) for t, p in pairs if p.is_held_out is moves])

    def close(self) -> None:
        """Write no more."""
        for shard in self._shards:
            shard.file.close()

    def finish(self, files: str) -> None:
        """Make it complete."""
        for shard in self._shards:
            shard.finish()
        self._counts.astype("<i8").tofile(counts_path(self._folder, self._part))
        meta = PartMeta(
            files=files,
            tokens=tuple(shard.num_tokens for shard in self._shards),
            sha256=tuple(shard.hasher.hexdigest() for shard in self._shards),
            num_documents=self.num_documents,
            num_empty_documents=self.num_empty_documents,
            num_filtered_out=self.num_filtered_out,
            num_duplicates=self.num_duplicates,
            text_bytes=self.text_bytes,
        )
        write_atomic(part_path(self._folder, self._part), meta.model_dump_json())


class _ShardWriter:
    """Writes the tokens of a shard, and where documents start in it."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._dtype = path, dtype
        # A process whose parent was killed may go on for a moment: each has a file of its own.
        self._aside = path.with_suffix(f".{os.getpid()}.partial")
        self.file = self._aside.open("wb")
        self._starts: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        self.num_tokens = 0
        self.hasher = hashlib.sha256()

    def append(self, pieces: list[tuple[NDArray[np.int64], bool]]) -> None:
        """Append tokens, each piece with whether a document starts with it."""
        if not pieces:
            return
        ends = self.num_tokens + np.cumsum([len(tokens) for tokens, _ in pieces])
        begins = np.array([self.num_tokens, *ends[:-1]])
        self._starts.append(begins[np.array([starts for _, starts in pieces])])
        written = np.concatenate([tokens for tokens, _ in pieces]).astype(self._dtype).tobytes()
        self.hasher.update(written)
        self.file.write(written)
        self.num_tokens = int(ends[-1])

    def finish(self) -> None:
        """Give it its name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        np.concatenate(self._starts).astype("<i8").tofile(starts_path(self._path))
        self._aside.replace(self._path)
        write_checksums(self._path)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_BUILD = TypeAdapter(Build)
