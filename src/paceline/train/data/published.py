"""Tokens that are published: a folder or a URL that Jobs train from without tokenising.

    manifest.json           written last: without it there is nothing
    tokenizer.json
    tokens-00000.bin, ...   shards of the stream, as in dataset.py
    tokens.crc              CRC-32 of each 64 KiB of each shard, as in checksums.py
    tokens-documents.bin    where documents start

The manifest holds the description of the tokens, the sizes and CRC-32 of the files beside the
shards, and its own CRC-32.

Not here: writing them (publish.py), and reading the shards (stored_tokens.py).
"""

import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer

from paceline.config.errors import InputError
from paceline.config.frozen import CountOrNone, FrozenConfig
from paceline.config.job_sections import Data
from paceline.config.urls import is_url
from paceline.train.data.checksums import num_blocks
from paceline.train.data.dataset import (
    META_FILE,
    STREAM,
    TOKENIZER_FILE,
    Meta,
    documents_path,
    token_dtype,
)
from paceline.train.data.ranges import Ranges
from paceline.train.data.tokenizer import bpe_size, make_encoder, read_tokenizer

MANIFEST_FILE = "manifest.json"
CHECKSUMS_FILE = f"{STREAM}.crc"
DOCUMENTS_FILE = documents_path(Path(), STREAM).name
GIVEN = "tokenizer.json"
"""The tokenizer of a manifest, where a Job names a file."""
VERSION: Literal[1] = 1
_MOST_MANIFEST_BYTES = 64 * 2**20


class FileFacts(FrozenConfig):
    """A file that is read as a whole."""

    size_bytes: CountOrNone
    crc: CountOrNone
    """CRC-32."""

    @classmethod
    def of(cls, content: Iterable[bytes]) -> "FileFacts":
        """Those of a content, piece by piece."""
        size_bytes = crc = 0
        for piece in content:
            size_bytes, crc = size_bytes + len(piece), zlib.crc32(piece, crc)
        return cls(size_bytes=size_bytes, crc=crc)


class Manifest(FrozenConfig):
    """What is published."""

    version: Literal[1]
    tokenizer: str
    """As in a Job: "bytes", "bpe:N", or "tokenizer.json" where it names a file."""
    eval_fraction: float
    """By which the held-out split was cut off."""
    meta: Meta
    files: dict[str, FileFacts]
    """Those beside the shards."""
    crc: CountOrNone = 0
    """CRC-32 of the manifest without it."""

    def sealed(self) -> "Manifest":
        """The same with its CRC-32."""
        open_one = self.replace(crc=0)
        return self.replace(crc=zlib.crc32(open_one.model_dump_json().encode()))

    @property
    def shard_bytes(self) -> list[int]:
        """Size of each shard."""
        return [count * token_dtype(self.meta.vocab_size).itemsize for count in self.meta.shards]

    @property
    def num_blocks(self) -> int:
        """Of all shards."""
        return sum(map(num_blocks, self.shard_bytes))

    @property
    def is_sound(self) -> bool:
        """Whether its parts agree."""
        meta, sizes = self.meta, {name: facts.size_bytes for name, facts in self.files.items()}
        return (
            self == self.sealed()
            and meta.answer_tokens is None
            and meta.column_bytes is None
            and token_dtype(meta.vocab_size).itemsize == int(meta.dtype.removeprefix("uint")) // 8
            and min(meta.train_tokens, meta.eval_tokens, meta.num_documents) > 0
            and set(sizes) == {TOKENIZER_FILE, CHECKSUMS_FILE, DOCUMENTS_FILE}
            and sizes[CHECKSUMS_FILE] == 4 * self.num_blocks
            and sizes[DOCUMENTS_FILE] == 8 * meta.num_documents
        )


class _Version(BaseModel):
    version: int


@dataclass(frozen=True, eq=False)  # each is read through connections of its own
class Published:
    """A publication, and where it is."""

    files: Ranges
    manifest: Manifest

    @property
    def key(self) -> str:
        """Names the place and what is there."""
        told = f"{self.files.url}\n{self.manifest.model_dump_json()}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def copy_facts(self, folder: Path) -> None:
        """Write all but shards and documents into an empty folder, the description last.

        Raises:
            InputError: a file is damaged.
        """
        for name in (TOKENIZER_FILE, CHECKSUMS_FILE):
            facts = self.manifest.files[name]
            content = self.files.all_of(name, facts.size_bytes)
            if FileFacts.of([content]) != facts:
                raise self.files.damaged(name)
            (folder / name).write_bytes(content)
        vocabulary = read_tokenizer(folder / TOKENIZER_FILE).get_vocab()
        if not vocabulary or max(vocabulary.values()) + 1 != self.manifest.meta.vocab_size:
            raise self.files.damaged(TOKENIZER_FILE)
        (folder / META_FILE).write_text(self.manifest.meta.model_dump_json(indent=2) + "\n")

    def check_settings(self, data: Data) -> None:
        """Check what a Job says of its data.

        Raises:
            InputError: the tokens were made with other settings.
        """
        given = GIVEN if _is_file(data.tokenizer) else data.tokenizer
        for name, own, theirs in (
            ("tokenizer", given, self.manifest.tokenizer),
            ("eval_fraction", data.eval_fraction, self.manifest.eval_fraction),
        ):
            # A file may be what a tokenizer was saved as, which is compared when it is there.
            if own not in (theirs, GIVEN):
                raise InputError(
                    f"{self.files.url} was published with data.{name} = {_as_toml(theirs)}, and "
                    f"the Job's is {_as_toml(getattr(data, name))}: set it to that."
                )

    def check_tokenizer(self, file: Path, data: Data) -> None:
        """Check that a copy of the published tokenizer is the file that a Job names, if it does.

        Raises:
            InputError: it is another.
        """
        if not _is_file(data.tokenizer) or Path(data.tokenizer) == file:
            return
        if _text(make_encoder(data.tokenizer, []).tokenizer) != _text(read_tokenizer(file)):
            raise InputError(
                f"{self.files.url} was published with another tokenizer than data.tokenizer = "
                f"{_as_toml(data.tokenizer)}: set it to the one that it was made with, which is "
                f"{self.files.url}/{TOKENIZER_FILE}."
            )


def _is_file(tokenizer: str) -> bool:
    return tokenizer != "bytes" and not bpe_size(tokenizer)


def _text(tokenizer: Tokenizer) -> str:
    """Without what isn't kept alike: how special tokens in texts are read."""
    tokenizer.encode_special_tokens = False
    return tokenizer.to_str()


def _as_toml(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def read_published(data: Data) -> Published:
    """Read the manifest of the one folder or URL that a source names.

    Raises:
        InputError: there is none, it is damaged or of another version, or made with other settings
            than the Job's.
    """
    names = (data.source,) if isinstance(data.source, str) else data.source
    if len(names) != 1:
        raise InputError(
            f'data.format = "tokens" is of one folder or URL, and data.source names {len(names)}: '
            "give each a place in data.sources."
        )
    place = names[0] if is_url(names[0]) else str(Path(names[0]).expanduser().absolute())
    files = Ranges(place, data.wait_s)
    content = files.read(MANIFEST_FILE, 0, _MOST_MANIFEST_BYTES)
    if content is None:
        raise InputError(
            f"{place} holds no published tokens ({MANIFEST_FILE} is missing): name what "
            "paceline tokens JOB --to URL wrote to the end."
        )
    published = Published(files, _manifest(files, content))
    published.check_settings(data)
    return published


def _manifest(files: Ranges, content: bytes) -> Manifest:
    try:
        version = _Version.model_validate_json(content).version
        if version != VERSION:
            raise InputError(
                f"{files.url} was published in version {version} of the format, and this Paceline "
                f"reads version {VERSION}: publish it again, or install the other one."
            )
        manifest = Manifest.model_validate_json(content)
    except ValidationError:
        raise files.damaged(MANIFEST_FILE) from None
    if not manifest.is_sound:
        raise files.damaged(MANIFEST_FILE)
    return manifest
