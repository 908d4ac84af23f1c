"""StoredTokens: the tokens of a published stream, read by blocks and kept on this machine's disk.

How it works: a block is 64 KiB of a shard, and the smallest range that is read. Beside the tokens'
description stands blocks.bin, which has a fixed number of places: block b is kept in place
b % places, with its number. So the file never grows, nobody has to say what goes, and the processes
of a machine share it without a lock: what is read of it is copied first and has to have the block's
checksum then. Where that isn't so, because it was never fetched, another block took its place, or a
bit flipped, the block is fetched again.

Samples are read in random order. So where not all blocks have a place, which of them are kept makes
no difference to how often one is found there.

Threads fetch what `will_need` names, while the device computes. One request brings blocks that are
near each other and those between them, which are kept too: a store takes as long to begin an answer
as to send a megabyte.
"""

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.train.data.checksums import BLOCK_BYTES, num_blocks
from paceline.train.data.dataset import STREAM, document_starts, shard_path
from paceline.train.data.order import Ids
from paceline.train.data.published import CHECKSUMS_FILE, DOCUMENTS_FILE, Manifest, Published

BLOCKS_FILE = "blocks.bin"
_NUMBER_BYTES = 8
PLACE_BYTES = BLOCK_BYTES + _NUMBER_BYTES
_FEWEST_PLACES = 16
_NUM_THREADS = 16
_MOST_AHEAD = 1024
"""Blocks that are fetched and not read yet: 64 MiB."""
_MOST_AT_ONCE = 64
"""Blocks of one request."""
_MOST_BETWEEN = 15
"""Blocks that are fetched in vain rather than by two requests: a megabyte."""
_TOKENS_AT_ONCE = 2**20
_TRIES = 3
_DOCUMENT_BYTES = 8 * 2**20

_Blocks = dict[int, bytes]


def fixed_bytes(manifest: Manifest) -> int:
    """What is kept of a publication beside its blocks."""
    return sum(facts.size_bytes for facts in manifest.files.values())


def make_places(folder: Path, manifest: Manifest, most_bytes: float) -> None:
    """Make the file that blocks are kept in; one of the same size stays as it is.

    Raises:
        InputError: there is no room for a few blocks.
    """
    room = int((most_bytes - fixed_bytes(manifest)) // PLACE_BYTES)
    if room < min(_FEWEST_PLACES, manifest.num_blocks):
        raise InputError(
            f"{folder.parent} has room for {max(0, room)} blocks of tokens and needs "
            f"{_FEWEST_PLACES}: raise data.cache_gb, or set data.cache_dir to a larger disk."
        )
    size_bytes, path = min(room, manifest.num_blocks) * PLACE_BYTES, folder / BLOCKS_FILE
    if not path.is_file() or path.stat().st_size != size_bytes:
        with path.open("wb") as file:
            file.truncate(size_bytes)


class StoredTokens:
    """The tokens of a published stream; it has the interface of `TokenStream`."""

    def __init__(self, published: Published, folder: Path) -> None:
        """Open it.

        Args:
            folder: has what `Published.copy_facts` and `make_places` made.
        """
        self._published, self._folder = published, folder
        meta, sizes = published.manifest.meta, published.manifest.shard_bytes
        self._dtype, self._sizes = np.dtype(meta.dtype).newbyteorder("<"), sizes
        self._ends = np.cumsum(meta.shards).tolist()
        self._first_blocks = np.cumsum([0, *map(num_blocks, sizes)]).tolist()
        self._checksums = np.memmap(folder / CHECKSUMS_FILE, "<u4", "r")
        self._kept = (folder / BLOCKS_FILE).open("r+b", buffering=0)
        self._num_places = (folder / BLOCKS_FILE).stat().st_size // PLACE_BYTES
        self._ahead: dict[int, Future[_Blocks]] = {}
        self._asked: SimpleQueue[tuple[list[int], Future[_Blocks]]] = SimpleQueue()
        self._process = 0

    def document_starts(self, num_documents: int) -> NDArray[np.int64]:
        """The positions at which documents start, mapped; all are fetched when first asked for.

        Raises:
            InputError: they can't be read.
        """
        path = self._folder / DOCUMENTS_FILE
        with FileLock(self._folder.with_suffix(".lock")):
            if not path.is_file():
                self._fetch_documents(path)
        return document_starts(self._folder, num_documents)

    def is_advice_due(self) -> bool:
        """Whether `will_need` is of use: always."""
        return True

    def will_need(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Have so many tokens from each of some positions on fetched in the background."""
        blocks = sorted({block for piece in pieces for block, _, _ in self._pieces(*piece)})
        absent = [each for each in blocks if each not in self._ahead and not self._has(each)]
        coming = self._fetch(absent)  # first, since after a fork it begins anew
        self._ahead.update(coming)
        while len(self._ahead) > _MOST_AHEAD:
            del self._ahead[next(iter(self._ahead))]

    def rows(self, starts: Ids, width: int) -> NDArray[np.unsignedinteger]:
        """So many tokens from each of some positions on: (starts, width).

        Raises:
            InputError: as `read`.
        """
        rows = [list(self._pieces(start, width)) for start in starts.tolist()]
        contents = self._contents({block for row in rows for block, _, _ in row})
        out = np.empty((len(rows), width), self._dtype)
        for row, pieces in zip(out, rows, strict=True):
            done = 0
            for block, first, count in pieces:
                row[done : done + count] = contents[block][first : first + count]
                done += count
        return out

    def read(self, start: int, out: NDArray[np.integer]) -> None:
        """Fill `out` with the tokens from a position on, across shards.

        Raises:
            InputError: what was published is damaged, or the store stays away.
        """
        for at in range(0, len(out), _TOKENS_AT_ONCE):
            part = out[at : at + _TOKENS_AT_ONCE]
            part[:] = self.rows(np.array([start + at]), len(part))[0]

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Block by block where tokens stand: its number, the first one in it, how many."""
        size = self._dtype.itemsize
        while count:
            shard = bisect_right(self._ends, start)
            place = start - (self._ends[shard - 1] if shard else 0)
            block, first = divmod(place, BLOCK_BYTES // size)
            some = min(count, BLOCK_BYTES // size - first, self._ends[shard] - start)
            yield self._first_blocks[shard] + block, first, some
            start, count = start + some, count - some

    def _contents(self, blocks: set[int]) -> dict[int, NDArray[np.unsignedinteger]]:
        found, coming, absent = {}, {}, []
        for block in sorted(blocks):
            if (future := self._ahead.pop(block, None)) is not None:
                coming[block] = future
            elif (content := self._read_kept(block)) is not None:
                found[block] = content
            else:
                absent.append(block)
        coming.update(self._fetch(absent))
        found.update((block, future.result()[block]) for block, future in coming.items())
        return {block: np.frombuffer(content, self._dtype) for block, content in found.items()}

    # --- the disk

    def _has(self, block: int) -> bool:
        """Whether the place of a block says that it is there."""
        at = self._num_places * BLOCK_BYTES + block % self._num_places * _NUMBER_BYTES
        number = os.pread(self._kept.fileno(), _NUMBER_BYTES, at)
        return number == (block + 1).to_bytes(_NUMBER_BYTES, "little")

    def _read_kept(self, block: int) -> bytes | None:
        if not self._has(block):
            return None
        at = block % self._num_places * BLOCK_BYTES
        content = os.pread(self._kept.fileno(), BLOCK_BYTES, at)
        return content if self._is_good(block, content) else None

    def _keep(self, block: int, content: bytes) -> None:
        place, number = block % self._num_places, (block + 1).to_bytes(_NUMBER_BYTES, "little")
        with suppress(OSError):  # a disk that is full costs speed alone
            os.pwrite(self._kept.fileno(), content, place * BLOCK_BYTES)
            at = self._num_places * BLOCK_BYTES + place * _NUMBER_BYTES
            os.pwrite(self._kept.fileno(), number, at)

    def _is_good(self, block: int, content: bytes) -> bool:
        return len(content) == BLOCK_BYTES and zlib.crc32(content) == self._checksums[block]

    # --- the store

    def _fetch(self, blocks: Iterable[int]) -> dict[int, "Future[_Blocks]"]:
        """Have threads fetch ascending blocks, those that are near each other together."""
        runs: list[list[int]] = []
        for block in blocks:
            run = runs[-1] if runs else [block]
            goes_on = block - run[-1] <= _MOST_BETWEEN + 1 and block - run[0] < _MOST_AT_ONCE
            if runs and goes_on and self._shard(block) == self._shard(run[0]):
                run.append(block)
            else:
                runs.append([block])
        if runs and self._process != os.getpid():  # threads don't survive a fork
            self._process, self._ahead = os.getpid(), {}
            self._asked = SimpleQueue()
            for _ in range(_NUM_THREADS):
                # They end with the process, whatever they wait for.
                Thread(target=self._work, args=(self._asked,), daemon=True).start()
        coming: dict[int, Future[_Blocks]] = {}
        for run in runs:
            future: Future[_Blocks] = Future()
            coming.update(dict.fromkeys(run, future))
            self._asked.put((run, future))
        return coming

    def _work(self, asked: "SimpleQueue[tuple[list[int], Future[_Blocks]]]") -> None:
        while True:
            run, future = asked.get()
            try:
                future.set_result(self._load(run))
            except BaseException as error:  # is raised where the blocks are needed
                future.set_exception(error)
            del run, future

    def _load(self, blocks: list[int]) -> _Blocks:
        """Fetch ascending blocks, and keep them and those between."""
        run = range(blocks[0], blocks[-1] + 1)
        shard = self._shard(run.start)
        first, name = self._first_blocks[shard], shard_path(Path(), STREAM, shard).name
        begin = (run.start - first) * BLOCK_BYTES
        end = min((run.stop - first) * BLOCK_BYTES, self._sizes[shard])
        for _ in range(_TRIES):
            content = self._published.files.read(name, begin, end)
            if content is None or len(content) != end - begin:
                break
            found = {
                block: content[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
                for at, block in enumerate(run)
            }
            if all(self._is_good(block, each) for block, each in found.items()):
                for block, each in found.items():
                    self._keep(block, each)
                return {block: found[block] for block in blocks}
        raise self._published.files.damaged(name)

    def _shard(self, block: int) -> int:
        return bisect_right(self._first_blocks, block) - 1

    def _fetch_documents(self, path: Path) -> None:
        facts, crc, aside = self._published.manifest.files[path.name], 0, path.with_suffix(".new")
        with aside.open("wb") as file:
            for begin in range(0, facts.size_bytes, _DOCUMENT_BYTES):
                end = min(begin + _DOCUMENT_BYTES, facts.size_bytes)
                content = self._published.files.read(path.name, begin, end) or b""
                crc = zlib.crc32(content, crc)
                file.write(content)
        if crc != facts.crc or aside.stat().st_size != facts.size_bytes:
            aside.unlink()
            raise self._published.files.damaged(path.name)
        aside.replace(path)
