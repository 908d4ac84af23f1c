"""What an index is on disk.

    manifest.json    what it is of, how it was cut, which encoder made it, and a sum of each file
    texts.bin        the documents in UTF-8, one behind the other
    documents.json   their names
    chunks.bin       of each chunk: document, first and last character, first and last byte (int64)
    centroids.bin    of each list of vectors its middle (fp32)
    sizes.bin        how many vectors each list has (int64)
    lists.bin        of each list its vectors (fp32), then the numbers of their chunks (int64)

All is verified before anything is used. The files are plain arrays, which numpy and faiss map: no
parser of faiss reads what somebody else may have written.
"""

import hashlib
import mmap
import os
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import opened, read_json
from paceline.config.frozen import Count, CountOrNone, FrozenConfig
from paceline.serve.retrieval.encoder import Vectors

MANIFEST, TEXTS, DOCUMENTS, CHUNKS = "manifest.json", "texts.bin", "documents.json", "chunks.bin"
CENTROIDS, SIZES, LISTS = "centroids.bin", "sizes.bin", "lists.bin"
FILES = (TEXTS, DOCUMENTS, CHUNKS, CENTROIDS, SIZES, LISTS)
CURE = "make it anew by paceline index"
Numbers = NDArray[np.int64]
_READ_BYTES = 1 << 20
_NAMES = TypeAdapter(list[str])


class FileSum(FrozenConfig):
    """What a file has to be."""

    bytes: CountOrNone
    sha256: str


class Manifest(FrozenConfig):
    """Of an index."""

    format_version: Literal[1]
    encoder: str
    """Where it was."""
    encoder_step: int | None
    encoder_sum: str
    """`Encoder.fingerprint`."""
    width: Annotated[int, Field(gt=0, le=1 << 20)]
    chunk_tokens: Count
    overlap: CountOrNone
    num_documents: Count
    num_chunks: Count
    num_lists: Count
    probes: Count
    """Lists that are searched where nobody says how many."""
    recall: float
    """Of the ten nearest chunks of some of its own, what part is found with so many."""
    files: dict[str, FileSum]


def sum_of(file: Path) -> FileSum:
    """What a file is.

    Raises:
        InputError: it can't be read.
    """
    digest, size = hashlib.sha256(), 0
    with opened(file, CURE) as source:
        while part := source.read(_READ_BYTES):
            digest.update(part)
            size += len(part)
    return FileSum(bytes=size, sha256=digest.hexdigest())


class IndexFolder:
    """An index that is whole.

    Raises:
        InputError: there is none, a file is missing or damaged, or says what can't be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise InputError(f"{path} is no index: give the folder that paceline index wrote.")
        told = self.manifest = read_json(path / MANIFEST, TypeAdapter(Manifest), CURE)
        for name in FILES:
            if told.files.get(name) != sum_of(path / name):
                raise InputError(f"{path / name} is damaged or of another index: {CURE}.")
        self.documents = read_json(path / DOCUMENTS, _NAMES, CURE)
        self._texts = _mapped(path / TEXTS)
        self._chunks = self._array(CHUNKS, np.dtype("<i8"), 5)  # (num_chunks, 5)
        self.centroids: Vectors = self._array(CENTROIDS, np.dtype("<f4"), told.width)
        self.sizes: Numbers = self._array(SIZES, np.dtype("<i8"), 1)[:, 0]
        self._check()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def lists_file(self) -> Path:
        """The lists of vectors."""
        return self.path / LISTS

    def place(self, chunk: int) -> tuple[str, int, int]:
        """The document of a chunk, and where it begins and ends there, in characters."""
        document, start, stop, _, _ = self._chunks[chunk].tolist()
        return self.documents[document], start, stop

    def text(self, chunk: int) -> str:
        """What it says."""
        _, _, _, first, last = self._chunks[chunk].tolist()
        return bytes(self._texts[first:last]).decode(errors="replace")

    def _array(self, name: str, dtype: np.dtype, width: int) -> NDArray:
        data = np.frombuffer(_mapped(self.path / name), dtype)
        if data.size % width:
            raise self._odd(name)
        return data.reshape(-1, width)

    def _check(self) -> None:
        """Everything fits together, so that whatever is found can be looked up."""
        told, chunks, sizes = self.manifest, self._chunks, self.sizes
        if len(chunks) != told.num_chunks or len(self.documents) != told.num_documents:
            raise self._odd(CHUNKS)
        document, start, stop, first, last = chunks.T
        fits = (document >= 0) & (document < len(self.documents)) & (start >= 0) & (start <= stop)
        if not (fits & (first >= 0) & (first <= last) & (last <= len(self._texts))).all():
            raise self._odd(CHUNKS)
        if len(sizes) != told.num_lists or (sizes < 0).any() or sizes.sum() != len(chunks):
            raise self._odd(SIZES)
        if len(self.centroids) != told.num_lists:
            raise self._odd(CENTROIDS)
        if self.lists_file.stat().st_size != len(chunks) * (4 * told.width + 8):
            raise self._odd(LISTS)

    def _odd(self, name: str) -> InputError:
        return InputError(f"{self.path / name} doesn't fit the rest of its index: {CURE}.")


def _mapped(file: Path) -> mmap.mmap | bytes:
    with file.open("rb") as source:
        if not os.fstat(source.fileno()).st_size:
            return b""
        return mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
