"""Checkpoints on an object store, or on whatever else fsspec reaches by a URL.

The files are those of the disk (`files`), under the same names, and the manifest comes last
(`observe.stored`). What is written is read back and compared with the manifest's sha256, because a
store's own checksum differs from store to store, and covers the way there and not what is kept.

Not here: when to copy (`copies`).
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.config.errors import InputError
from paceline.config.files import to_disk
from paceline.observe.stored import StoredCheckpoints, trouble_text
from paceline.train.checkpoint.files import (
    MANIFEST,
    DamagedError,
    FileEntry,
    Manifest,
    complete_steps,
    decode_manifest,
    link_to,
    make_empty,
    manifest_bytes,
    rename_over,
)

T = TypeVar("T")

WAITS_S = (1.0, 4.0, 15.0)
"""After each failure; the one after the last is final. Clients of stores try by themselves too."""
_PIECE_BYTES = 8 << 20
# S3 takes 10,000 parts of a file at most.
_PART_BYTES, _MOST_PARTS = 64 << 20, 9_000


class CheckpointStore(StoredCheckpoints):
    """The checkpoints of one run below a URL, and the way there and back."""

    def put(
        self, source: Path, step: int, go_on: Callable[[], None], *, is_new: bool = False
    ) -> int:
        """Copy a complete checkpoint, and read it back.

        Files that the store's manifest of this step names already, with the same sum, stay.

        Args:
            source: its directory on the disk.
            step: its step.
            go_on: called often; what it raises ends the copying.
            is_new: it was just saved. What the store has of this step was refused then, or is of
                an earlier life; it may be equal but for its damage, so it stays only if whole.

        Returns:
            the bytes that were sent.

        Raises:
            DamagedError: the disk's checkpoint is not what was written, or is gone.
        """
        raw = manifest_bytes(source)
        manifest, place = decode_manifest(raw, step), self._place(step)
        there = self.manifest(step)
        if there == raw and not is_new:
            return 0
        known: dict[str, FileEntry] = {}
        with suppress(DamagedError):
            known = decode_manifest(there or b"", step).files
        new = {
            name: e
            for name, e in manifest.files.items()
            if known.get(name) != e or (is_new and not self._is_whole(f"{place}/{name}", e, go_on))
        }
        if there == raw and not new:
            return 0
        if new and there is not None:
            self._files.rm_file(f"{place}/{MANIFEST}")  # its files are about to change
        for name, entry in new.items():
            self._send(source / name, f"{place}/{name}", entry, go_on)
        for name, entry in new.items():
            if self._hash(f"{place}/{name}", entry, go_on) != entry.sha256:
                raise OSError(f"{name} doesn't read back as it was sent")
        self._files.pipe_file(f"{place}/{MANIFEST}", raw)
        if self.manifest(step) != raw:
            raise OSError(f"{MANIFEST} doesn't read back as it was sent")
        return sum(entry.size_bytes for entry in new.values())

    def fetch(self, step: int, manifest: Manifest, raw: bytes, directory: Path) -> None:
        """Bring a checkpoint back to the disk, complete or not at all.

        Args:
            step: which.
            manifest: what `raw` says.
            raw: its manifest, as it stands in the store.
            directory: of the run's checkpoints.

        Raises:
            DamagedError: a file there is not what the manifest says.
        """
        partial = directory / f"step-{step}.tmp"
        directory.mkdir(parents=True, exist_ok=True)
        make_empty(partial)
        try:
            for name, entry in manifest.files.items():
                with (partial / name).open("wb") as file:
                    try:
                        found = self._hash(f"{self._place(step)}/{name}", entry, write=file.write)
                    except FileNotFoundError:
                        raise DamagedError(f"{name} is not there") from None
                if found != entry.sha256:
                    raise DamagedError(f"{name} doesn't match its checksum")
                to_disk(partial / name)
            (partial / MANIFEST).write_bytes(raw)
            to_disk(partial / MANIFEST)
            to_disk(partial)
            rename_over(partial, directory / f"step-{step}")
            link_to(directory, "latest", step)
            to_disk(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _send(self, source: Path, place: str, entry: FileEntry, go_on: Callable[[], None]) -> None:
        digest, part = hashlib.sha256(), max(_PART_BYTES, entry.size_bytes // _MOST_PARTS)
        try:
            with source.open("rb") as file, self._files.open(place, "wb", block_size=part) as out:
                for piece in _pieces(file):
                    go_on()
                    digest.update(piece)
                    out.write(piece)
        except FileNotFoundError:
            if source.exists():
                raise
            raise DamagedError(f"{source.name} is gone from the disk") from None
        if digest.hexdigest() != entry.sha256:
            raise DamagedError(f"{source.name} doesn't match its checksum on the disk")

    def _is_whole(self, place: str, entry: FileEntry, go_on: Callable[[], None]) -> bool:
        """Whether a file in the store is as it was sent."""
        try:
            return self._hash(place, entry, go_on) == entry.sha256
        except FileNotFoundError:
            return False

    def _hash(
        self,
        place: str,
        entry: FileEntry,
        go_on: Callable[[], None] = lambda: None,
        write: Callable[[bytes], object] = lambda _piece: None,
    ) -> str:
        """The sha256 of a file in the store; "" where it has another size."""
        digest, size_bytes = hashlib.sha256(), 0
        # Read once, from its beginning: nothing is gained by keeping it.
        with self._files.open(place, "rb", block_size=_PIECE_BYTES, cache_type="none") as file:
            for piece in _pieces(file):
                go_on()
                size_bytes += len(piece)
                if size_bytes > entry.size_bytes:
                    return ""
                digest.update(piece)
                write(piece)
        return digest.hexdigest() if size_bytes == entry.size_bytes else ""


def fetch_newer(
    store: CheckpointStore,
    directory: Path,
    check: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    waits_s: tuple[float, ...] = WAITS_S,
) -> None:
    """Bring the store's newest good checkpoint to the disk, where that has none, or older ones.

    A damaged one is refused by name, and the one before it tried.

    Args:
        store: where to look.
        directory: of the run's checkpoints on the disk; may be absent.
        check: raises where a checkpoint with these facts is of something else.
        say: takes a sentence for a person.
        waits_s: after failures of the store.

    Raises:
        InputError: the store can't be read and the disk has none, or none of the store's is good.
    """
    local = max(complete_steps(directory), default=-1)
    refused = []
    try:
        for step in reversed(tried(store.steps, waits_s)):
            if step <= local:
                break
            raw = tried(partial(store.manifest, step), waits_s)
            if raw is None:
                continue
            try:
                manifest = decode_manifest(raw, step)
                check(manifest.facts)
                tried(partial(store.fetch, step, manifest, raw, directory), waits_s)
            except DamagedError as damage:
                refused.append(f"step-{step}: {damage}")
                say(f"checkpoint step-{step} in {store.url} is refused: {damage}.")
                continue
            say(f"checkpoint step-{step} is fetched from {store.url}.")
            return
    except InputError:
        raise
    except Exception as error:
        trouble = f"checkpoints can't be fetched from {store.url} ({trouble_text(error)})"
        if local < 0:
            raise InputError(
                f"{trouble}, which may have some of this run: mend checkpoint.copy_to or its "
                "credentials, or leave it out."
            ) from None
        say(f"{trouble}; the run goes on from those of the disk.")
        return
    if refused and local < 0:
        raise InputError(
            f"none of the {len(refused)} checkpoints in {store.url} is good "
            f"({'; '.join(refused)}): put back a copy, or start over with --fresh."
        )


def tried(attempt: Callable[[], T], waits_s: tuple[float, ...]) -> T:
    """The result of an attempt that is made again after failures of a store."""
    for wait_s in waits_s:
        try:
            return attempt()
        except (InputError, DamagedError):
            raise
        except Exception:
            time.sleep(wait_s)
    return attempt()


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece
