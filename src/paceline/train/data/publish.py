"""Publish a Job's tokens: into a folder or a store, from which Jobs train without tokenising.

How it works: what is written first is publishing.json, which names the tokens; then files, several
at a time; the manifest last. A publication that was killed is gone on with: files of their full
size stay. See published.py for what is written.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from paceline.config.errors import InputError
from paceline.config.urls import is_url
from paceline.observe.run import write_atomic
from paceline.observe.stored import trouble_text
from paceline.train.data.build import Progress
from paceline.train.data.cache import PreparedData
from paceline.train.data.checksums import is_as_written, read_checksums
from paceline.train.data.corpus import HELD_OUT, Corpus
from paceline.train.data.dataset import STREAM, TOKENIZER_FILE, documents_path, shard_path
from paceline.train.data.published import (
    CHECKSUMS_FILE,
    DOCUMENTS_FILE,
    GIVEN,
    MANIFEST_FILE,
    VERSION,
    FileFacts,
    Manifest,
)
from paceline.train.data.stores import store_of
from paceline.train.data.tokenizer import bpe_size

_BEGUN_FILE = "publishing.json"
_AT_ONCE = 8
_READ_AT_ONCE = 2**20


def publish(corpus: Corpus, url: str, progress: Progress) -> dict[str, Manifest]:
    """Publish each source and evaluation set of a corpus.

    Args:
        corpus: of texts.
        url: a folder or a URL; where there are several, each gets a folder of its name below it.
        progress: called with the bytes written so far, or found there, and those of all.

    Returns:
        by place what is there now.

    Raises:
        InputError: the place can't be written, or holds something else.
    """
    parts = {**corpus.sources, **corpus.eval_sets}
    if len(parts) > 1:
        places = {f"{url.rstrip('/')}/{name}": part for name, part in parts.items()}
    else:
        places = {url.rstrip("/"): parts.get(HELD_OUT, corpus.first)}
    publications = [
        _Publication(part, place, corpus.data.tokenizer) for place, part in places.items()
    ]
    total, before, found = sum(each.num_bytes for each in publications), 0, {}
    for each in publications:
        found[each.place] = each.write(partial(_go_on, progress, before, total))
        before += each.num_bytes
        progress(before, total)
    return found


def _go_on(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


class _Publication:
    """One stream of tokens and where it goes."""

    def __init__(self, part: PreparedData, place: str, tokenizer: str) -> None:
        self._part, self.place = part, place
        self._store, self._root = store_of(place)
        itemsize = np.dtype(part.meta.dtype).itemsize
        sizes = [count * itemsize for count in part.meta.shards]
        paths = [shard_path(part.folder, STREAM, number) for number in range(len(sizes))]
        self._shards = {path: size for path, size in zip(paths, sizes, strict=True) if size}
        self._documents = documents_path(part.folder, STREAM)
        is_file = tokenizer != "bytes" and not bpe_size(tokenizer)
        self._tokenizer = GIVEN if is_file else tokenizer
        self._meta = part.meta.replace(tokenizer=self._tokenizer)
        self.num_bytes = sum(sizes)

    def write(self, progress: Callable[[int], None]) -> Manifest:
        """Write what is missing; what is there then."""
        try:
            if (manifest := self._published()) is not None:
                return manifest
            found, done = self._sizes(), 0
            self._write_small(_BEGUN_FILE, self._begun)
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                for size in threads.map(partial(self._put_shard, found), self._shards):
                    done += size
                    progress(done)
            manifest = self._write_rest()
            self._write_small(MANIFEST_FILE, manifest.model_dump_json(indent=2) + "\n")
            self._store.rm_file(self._path(_BEGUN_FILE))
        except InputError:
            raise
        except Exception as error:  # stores' clients raise anything
            raise InputError(
                f"{self.place} can't be written ({trouble_text(error)}): see to it, and publish "
                "again, which goes on from there."
            ) from None
        return manifest

    def _put_shard(self, found: dict[str, int], shard: Path) -> int:
        size = self._shards[shard]
        if not is_as_written(shard, size):  # nor are its checksums what is to be published
            self._part.mend(int(shard.stem.removeprefix(f"{STREAM}-")))
        if found.get(shard.name) != size:
            self._store.put_file(str(shard), self._path(shard.name))
        return size

    def _write_rest(self) -> Manifest:
        """The files beside the shards, and what they are."""
        checksums = [read_checksums(path, size) for path, size in self._shards.items()]
        contents = {
            TOKENIZER_FILE: self._part.tokenizer_path.read_bytes(),
            CHECKSUMS_FILE: b"".join(each.tobytes() for each in checksums),
        }
        for name, content in contents.items():
            self._store.pipe_file(self._path(name), content)
        self._store.put_file(str(self._documents), self._path(DOCUMENTS_FILE))
        files = {name: FileFacts.of([content]) for name, content in contents.items()}
        with self._documents.open("rb") as file:
            files[DOCUMENTS_FILE] = FileFacts.of(iter(partial(file.read, _READ_AT_ONCE), b""))
        assert self._part.data is not None
        return Manifest(
            version=VERSION,
            tokenizer=self._tokenizer,
            eval_fraction=self._part.data.eval_fraction,
            meta=self._meta,
            files=files,
        ).sealed()

    def _published(self) -> Manifest | None:
        """The same, if it is published to the end.

        Raises:
            InputError: something else is there.
        """
        content = self._read(MANIFEST_FILE)
        if content is not None:
            with suppress(ValueError):
                manifest = Manifest.model_validate_json(content)
                if manifest.is_sound and manifest.meta == self._meta:
                    return manifest
            raise self._taken("other published tokens")
        begun = self._read(_BEGUN_FILE)
        if begun is None and self._sizes():
            raise self._taken("files that no publication left there")
        if begun is not None and begun.decode(errors="replace") != self._begun:
            raise self._taken("an unfinished publication of other tokens")
        return None

    def _taken(self, what: str) -> InputError:
        return InputError(f"{self.place} holds {what}: name another place, or remove them.")

    @property
    def _begun(self) -> str:
        return json.dumps({"tokens": self._meta.fingerprint})

    def _sizes(self) -> dict[str, int]:
        """The files that are there."""
        try:
            found = self._store.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: each["size"]
            for each in found
            if each["type"] == "file"
        }

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._store.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def _write_small(self, name: str, text: str) -> None:
        """Complete or not at all, which an object in a store always is."""
        if is_url(self.place):
            self._store.pipe_file(self._path(name), text.encode())
        else:
            write_atomic(Path(self._path(name)), text)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def published_lines(found: dict[str, Manifest]) -> Iterator[str]:
    """A line for each place."""
    for place, manifest in found.items():
        meta = manifest.meta
        yield (
            f"{place}: {meta.train_tokens:,} tokens to train on and {meta.eval_tokens:,} held out, "
            f"of {meta.num_documents:,} documents"
        )
