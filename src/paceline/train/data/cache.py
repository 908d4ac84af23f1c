"""Tokenise a source once, into a folder named after everything its tokens depend on.

How it works: the key of a folder hashes the contents of all files, how they are read, the tokenizer
and the held-out fraction. Whether the files changed since they were last hashed is told by their
paths, sizes and times alone, so that a second start reads nothing. Of files in a store, its own
word for their contents (an ETag, a checksum) stands for these. A folder is built under another
name, with meta.json written last, and then renamed: it is complete or absent. A lock lets one of
several jobs build while the others wait.

It is not what reads or writes tokens: build.py makes the contents of a folder, dataset.py reads
them.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.observe.run import cache_home
from paceline.train.data.build import CHANGED, Progress, build, unigram_entropy, unigram_loss
from paceline.train.data.build_conversations import build_conversations
from paceline.train.data.checksums import is_as_written
from paceline.train.data.conversations import ChatForm
from paceline.train.data.dataset import (
    FORMAT_VERSION,
    META_FILE,
    STREAM,
    TOKENIZER_FILE,
    Meta,
    SplitName,
    Stream,
    TokenDataset,
    TokenStream,
    forget_shard,
    read_meta,
    shard_path,
)
from paceline.train.data.files import SourceFile, find_files
from paceline.train.data.limit import GB, cached_tokens, hold, keep_within, locked_alone
from paceline.train.data.packed import PackedConversations, PackedRows
from paceline.train.data.packed_documents import PackedDocuments
from paceline.train.data.prompts import Prompts, build_prompts
from paceline.train.data.published import Published, read_published
from paceline.train.data.stored_tokens import BLOCKS_FILE, StoredTokens, make_places
from paceline.train.data.stores import StoredFile
from paceline.train.data.tokenizer import tokenizer_identity

Listing = list[tuple[str, int, int | str, int]]

_BUILDERS = {
    "text": build,
    "chat": build_conversations,
    "preferences": build_conversations,
    "prompts": build_prompts,
}
# File systems stamp times in steps: a file changed again within this time may keep its stamp.
_SETTLED_NS = 2 * 10**9


@dataclass(frozen=True)
class PreparedData:
    """A complete folder of tokenised data."""

    folder: Path
    meta: Meta
    data: Data | None = None
    """What it was made of, by which a damaged part is made anew."""
    published: Published | None = field(default=None, compare=False)
    """Where its tokens are, if it holds only some of them."""

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer.json that decodes the tokens."""
        return self.folder / TOKENIZER_FILE

    @property
    def is_packed(self) -> bool:
        """Whether samples are made of whole conversations."""
        return self.meta.answer_tokens is not None

    def prompts(self, split: SplitName) -> Prompts:
        """Open one split of prompts."""
        return Prompts(self.folder, split, self.meta)

    def dataset(self, split: SplitName) -> TokenDataset | PackedRows:
        """Open one split."""
        if self.is_packed:
            return self.conversations(split)
        if self.data is not None and self.data.packing == "best_fit":
            return self.documents(split)
        return self.tokens(split)

    def tokens(self, split: SplitName) -> TokenDataset:
        """Open one split of tokens."""
        return TokenDataset(self._stream(), split, self.meta)

    def documents(self, split: SplitName) -> PackedDocuments:
        """Open one split of documents that are packed whole."""
        return _documents(self, split)

    def _stream(self) -> Stream:
        if self.published is not None:
            return _stored_tokens(self.published, self.folder)
        dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        mend = self.mend if self.data else None
        return TokenStream(self.folder, STREAM, dtype, self.meta.shards, mend)

    def mend(self, shard: int) -> None:
        """Have a shard made anew, by one of the processes that found it damaged."""
        assert self.data is not None
        if _place(self.data, find_files(self.data))[0] != self.folder:
            raise InputError(
                f"{self.folder} is damaged, and data.source is no longer what it was made of: "
                "bring that back, or start another run."
            )
        with _locked(self.folder):
            size_bytes = self.meta.shards[shard] * np.dtype(self.meta.dtype).itemsize
            if not is_as_written(shard_path(self.folder, STREAM, shard), size_bytes):
                forget_shard(self.folder, shard, len(self.meta.shards))
        prepare(self.data)

    def conversations(self, split: SplitName) -> PackedConversations:
        """Open one split of conversations."""
        return _conversations(self.folder, split, self.meta)

    def num_samples(self, seq_len: int) -> int:
        """Those of the train split."""
        if self.meta.column_bytes is not None:
            return self.prompts("train").num_samples(seq_len)
        return self.dataset("train").num_samples(seq_len)

    def for_samples(self, seq_len: int) -> "PreparedData":
        """The same tokens, cut so that a sample fits into either split where there are few.

        Args:
            seq_len: tokens of a sample, which takes one more for its last target.

        Raises:
            InputError: there are too few tokens for two samples.
        """
        meta, least = self.meta, seq_len + 1
        if meta.column_bytes is not None:
            self.prompts("train").num_samples(seq_len)
            self.prompts("eval").num_samples(seq_len)
            return self
        if self.is_packed:  # either has some, if an answer is left in a sample
            self.conversations("train").num_samples(seq_len)
            self.conversations("eval").num_samples(seq_len)
            return self
        total = meta.train_tokens + meta.eval_tokens
        if meta.eval_tokens >= least:  # and so is what is trained on, the larger part
            return self
        if total < 2 * least:
            most = total // 2 - 1
            remedy = f"use at most {most}, or more data" if most > 0 else "bring more data"
            raise InputError(
                f"train.seq_len = {seq_len} is too long for {total} tokens, of which one sample is "
                f"trained on and one held out: {remedy}."
            )
        tokens = np.empty(total, np.int64)
        self._stream().read(0, tokens)
        train, held_out = (
            np.bincount(part, minlength=meta.vocab_size)
            for part in np.split(tokens, [total - least])
        )
        changed = meta.replace(
            train_tokens=total - least,
            eval_tokens=least,
            unigram_entropy=unigram_entropy(train),
            unigram_loss=unigram_loss(train, held_out),
        )
        return replace(self, meta=changed)


@lru_cache(maxsize=4)  # packing a million of them takes a third of a second
def _conversations(folder: Path, split: SplitName, meta: Meta) -> PackedConversations:
    return PackedConversations(folder, split, meta)


@lru_cache(maxsize=64)
def _documents(prepared: PreparedData, split: SplitName) -> PackedDocuments:
    return PackedDocuments(prepared._stream(), split, prepared.meta)


@lru_cache(maxsize=64)  # of one, splits share what was fetched ahead, and threads
def _stored_tokens(published: Published, folder: Path) -> StoredTokens:
    return StoredTokens(published, folder)


def prepare(data: Data, progress: Progress | None = None, num_published: int = 1) -> PreparedData:
    """Return the tokenised form of a source; tokenise it first where that was not done before.

    Args:
        data: the source, the tokenizer and the held-out fraction.
        progress: called with the bytes read so far and those of the whole source, on disk.
        num_published: sources of the Job that are published tokens, which share `data.cache_gb`.

    Raises:
        InputError: one sentence, where the source or the tokenizer can't be used.
    """
    if data.format == "tokens":
        return _prepare_published(data, num_published)
    files = find_files(data)
    folder, listing = _place(data, files)
    while not hold(folder):
        with _locked(folder):
            if not (folder / META_FILE).is_file():
                _build_aside(data, files, listing, folder, progress or (lambda done, total: None))
    if data.cache_gb is not None:
        keep_within(folder.parent, data.cache_gb)
    return PreparedData(folder, read_meta(folder), data)


def _prepare_published(data: Data, num_published: int) -> PreparedData:
    """Make the folder in which blocks of published tokens are kept."""
    published = read_published(data)
    cache = cache_folder(data)
    folder, aside = cache / published.key, cache / f"{published.key}.partial"
    is_held = False
    while not is_held:
        with _locked(folder):
            if not (folder / META_FILE).is_file():
                for leftover in (aside, folder):
                    shutil.rmtree(leftover, ignore_errors=True)
                aside.mkdir()
                published.copy_facts(aside)
                aside.rename(folder)
            with locked_alone(folder) as is_unused:
                # What is free on a disk is another figure each time: what was made of it stays.
                is_limited = is_unused and data.cache_gb is not None
                if is_limited or not (folder / BLOCKS_FILE).is_file():
                    most_bytes = _room(data, folder, num_published)
                    make_places(folder, published.manifest, most_bytes)
        is_held = hold(folder)
    published.check_tokenizer(folder / TOKENIZER_FILE, data)
    if data.cache_gb is not None:
        keep_within(cache, data.cache_gb)
    return PreparedData(folder, published.manifest.meta, data, published)


def _room(data: Data, folder: Path, num_published: int) -> float:
    """What one of some published sources may take of a cache, bytes."""
    if data.cache_gb is None:
        return shutil.disk_usage(folder).free / 2 / num_published
    others = [each for each in cached_tokens(folder.parent) if each.folder != folder]
    left = data.cache_gb * GB - sum(each.num_bytes for each in others if each.is_in_use)
    return min(left, data.cache_gb * GB / num_published)


def _locked(folder: Path) -> FileLock:
    return FileLock(folder.with_suffix(".lock"))


def _place(data: Data, files: list[SourceFile]) -> tuple[Path, Listing]:
    """The folder of a source as it is now, and what tells whether that changes."""
    cache, listing = cache_folder(data), listing_of(files)
    return cache / _key(data, files, contents_hash(listing, cache)), listing


def open_prepared(folder: Path) -> PreparedData:
    """Open what `prepare` built.

    Raises:
        InputError: the folder is not a complete one.
    """
    return PreparedData(folder, read_meta(folder))


def cache_folder(data: Data) -> Path:
    """Create and return the folder that tokenised data is kept in."""
    base = cache_home() if data.cache_dir == "auto" else Path(data.cache_dir).expanduser()
    try:
        (base / "data").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{base} can't be written ({error.strerror}): set data.cache_dir to a folder that can."
        ) from None
    return base / "data"


def _key(data: Data, files: list[SourceFile], contents: str) -> str:
    formats = [file.format for file in files]
    text_field = data.text_field if set(formats) != {"text"} else None
    parts = [FORMAT_VERSION, contents, formats, text_field, tokenizer_identity(data.tokenizer)]
    if data.filter is not None:
        parts += ["filter", data.filter]
    if data.dedup.method != "none":
        parts += ["dedup", data.dedup.model_dump()]
    if data.has_answers:
        form = ChatForm.of(data)
        parts += [data.records, form.source, form.settings, *data.columns]
    return _sha256(json.dumps([*parts, data.eval_fraction]))[:32]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def contents_hash(listing: Listing, cache: Path) -> str:
    """Hash the contents of all files in order, or recall the hash if no file changed since.

    Raises:
        InputError: one can't be read.
    """
    memo = cache / f"{_sha256(json.dumps(listing))[:32]}.source"
    if memo.is_file():
        return memo.read_text()
    with FileLock(memo.with_suffix(".lock")):  # of several jobs one reads the files
        if memo.is_file():
            return memo.read_text()
        contents = _sha256(json.dumps([_contents(*entry) for entry in listing]))
        settled = time.time_ns() - _SETTLED_NS
        if all(
            isinstance(made, str) or max(made, changed) < settled for _, _, made, changed in listing
        ):
            aside = memo.with_suffix(".partial")
            aside.write_text(contents)
            aside.replace(memo)
        return contents


def listing_of(files: list[SourceFile]) -> Listing:
    """Path, size and times of files: while these are the same, so are the contents.

    Of a file in a store: its URL, size and stamp.

    Raises:
        InputError: one can't be read.
    """
    with _readable():
        return [_entry(path) for file in files for path in file.paths]


def _entry(path: Path | StoredFile) -> tuple[str, int, int | str, int]:
    if isinstance(path, StoredFile):
        return path.url, path.size_bytes, path.stamp or "", 0
    stat = path.stat()
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _contents(place: str, size_bytes: int, made: int | str, _: int) -> str:
    """What stands for the contents of a file."""
    if isinstance(made, int):
        return _file_hash(Path(place))
    if not made:
        raise InputError(
            f"{place}: its server says nothing that changes with its contents (an ETag or a time): "
            "copy the file to a disk or a store."
        )
    return f"{place} {size_bytes} {made}"


def _file_hash(path: Path) -> str:
    with _readable(), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename} can't be read ({error.strerror}): restore it, or name other files."
        ) from None


def _build_aside(
    data: Data, files: list[SourceFile], listing: Listing, folder: Path, progress: Progress
) -> None:
    aside = folder.with_suffix(".partial")  # the lock is held: a leftover is a dead job's
    if folder.is_dir():  # without what a damaged part held
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    if data.records != "text":  # which alone has parts
        shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(exist_ok=True)
    try:
        write = _BUILDERS[data.records]
        meta = write(data, files, aside, folder.name, progress)
        if set(listing) - set(listing_of(find_files(data))):
            raise InputError(CHANGED)
        (aside / META_FILE).write_text(meta.model_dump_json(indent=2) + "\n")
        aside.rename(folder)
    except InputError:  # what is finished is of use to nobody
        shutil.rmtree(aside, ignore_errors=True)
        raise
