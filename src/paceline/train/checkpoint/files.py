"""A checkpoint on disk: tensor files, and one manifest that says what each of them must be.

    step-<n>/rank<k>.safetensors    the chunks that rank k wrote, in the safetensors format
    step-<n>/manifest.json          facts, values, where each chunk is, size and sha256 of each file

Nothing in it is a pickle, so reading one can't run code. (torch's own `.metadata` file is a pickle.
Its `HuggingFaceStorageWriter` avoids that, but serialises a rank's whole share into memory once
more, keeps one chunk per name and file, and leaves no room for plain values.) A shard is written
tensor by tensor straight from the staged copy and hashed on the way; both calls release the GIL, so
the training thread keeps running. The manifest carries its own checksum and is compared byte for
byte with what it would be written as, so no flipped bit passes.

Not here: who writes which chunk (`plan`), when and in what order (`checkpointer`). A checksum finds
damage; it doesn't prove who wrote the file.

Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, raw tensors).
"""

import hashlib
import json
import re
import shutil
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import field_validator
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.files import read_bytes, to_disk
from paceline.config.frozen import FrozenConfig
from paceline.observe.run import MANIFEST as MANIFEST
from paceline.observe.run import MOST_MANIFEST_BYTES
from paceline.observe.run import complete_steps as complete_steps
from paceline.train.checkpoint.regions import Region

FORMAT_VERSION = 1
SHARD_FILE = re.compile(r"rank\d+\.safetensors")

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class DamagedError(Exception):
    """A checkpoint is not what was written; the text says what is wrong with it."""


class FileEntry(FrozenConfig):
    """What a file must be."""

    size_bytes: int
    """Its length."""
    sha256: str
    """Its checksum, in hexadecimal."""


class Chunk(FrozenConfig):
    """One rectangular piece of a tensor and the file it is in."""

    offsets: list[int]
    """Where it starts in the whole tensor, per dimension."""
    sizes: list[int]
    """Its shape."""
    file: str
    """The shard file that holds it."""


class TensorEntry(FrozenConfig):
    """A whole tensor, as the chunks that cover it."""

    dtype: str
    """Element type, in safetensors' names."""
    size: list[int]
    """Shape of the whole tensor."""
    chunks: list[Chunk]
    """Pieces that don't overlap and together cover it."""

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype} is unknown")
        return dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch names it."""
        return DTYPES[self.dtype]


class Manifest(FrozenConfig):
    """Everything a checkpoint says about itself."""

    format: int
    """Version of this layout."""
    step: int
    """The training step it was taken at."""
    facts: dict[str, Any]
    """What the caller saved beside the state: schedule, data cursor, seed, fingerprint."""
    values: dict[str, Any]
    """The entries of the state that are plain numbers or text, by name."""
    files: dict[str, FileEntry]
    """The shard files."""
    tensors: dict[str, TensorEntry]
    """The entries of the state that are tensors, by name."""


class Overlap(NamedTuple):
    """What of a saved chunk goes where."""

    name: str
    number: int
    """Of the chunk among the tensor's."""
    part: Region
    """Of the chunk."""
    target: Tensor


@dataclass(frozen=True)
class FoundState(ABC):
    """A training state that can be loaded: from a disk, or from the memory of ranks."""

    step: int
    manifest: Manifest

    @property
    def facts(self) -> dict[str, Any]:
        """The facts kept beside it."""
        return self.manifest.facts

    @property
    def sections(self) -> set[str]:
        """The first parts of its tensors' names."""
        return {name.partition(".")[0] for name in self.manifest.tensors}

    def section(self, section: str) -> dict[str, TensorEntry]:
        """The tensors of a section, by the rest of their names."""
        start = f"{section}."
        return {
            name.removeprefix(start): entry
            for name, entry in self.manifest.tensors.items()
            if name.startswith(start)
        }

    @abstractmethod
    def fill(self, targets: dict[str, Tensor]) -> None:
        """Copy what there is of each name into this rank's part of it; every rank calls this.

        Args:
            targets: tensors and DTensors of the sizes and types of the manifest.

        Raises:
            InputError, DamagedError: something isn't there as the manifest says.
        """


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return safetensors' name of a dtype.

    Raises:
        InputError: the format has no such type; `name` says which tensor has it.
    """
    for known, candidate in DTYPES.items():
        if candidate == dtype:
            return known
    raise InputError(f"{name} is {dtype}, which a checkpoint can't hold; convert it to float32.")


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank{rank}.safetensors"


def chunk_key(
    name: str, offsets: Sequence[int], sizes: Sequence[int], whole_size: Sequence[int]
) -> str:
    """Return the name of a chunk in its file: the tensor's own where the chunk is all of it."""
    if list(sizes) == list(whole_size):
        return name
    return f"{name}@{','.join(map(str, offsets))}"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file, its own checksum first."""
    body = json.dumps(manifest.model_dump(), separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"sha256":"{digest}",\n"manifest":{body}}}\n'.encode()


def decode_manifest(raw: bytes, step: int) -> Manifest:
    """Read the bytes of the manifest in `step-<step>`.

    Raises:
        DamagedError: they aren't what `encode_manifest` writes, or are of another step or format.
    """
    try:
        body = json.loads(raw)["manifest"]
        version = body["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is not readable") from None
    if version != FORMAT_VERSION:
        raise DamagedError(f"its format is {version!r}, this version reads format {FORMAT_VERSION}")
    try:
        manifest = Manifest.parse(body, MANIFEST)
    except InputError as error:
        raise DamagedError(str(error).rstrip(".")) from None
    if encode_manifest(manifest) != raw:
        raise DamagedError(f"{MANIFEST} doesn't match its own checksum")
    if manifest.step != step:
        raise DamagedError(f"{MANIFEST} belongs to step {manifest.step}")
    _check_references(manifest)
    return manifest


def _check_references(manifest: Manifest) -> None:
    """Only shard files of this directory may be named, and every chunk must be in one."""
    strangers = [name for name in manifest.files if not SHARD_FILE.fullmatch(name)]
    chunk_files = {chunk.file for entry in manifest.tensors.values() for chunk in entry.chunks}
    missing = sorted(chunk_files - set(manifest.files))
    if strangers or missing:
        raise DamagedError(f"{MANIFEST} names the unknown file {(strangers + missing)[0]!r}")


def check_file(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file, None where size and checksum are as they must be."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            return f"{path.name} has {size_bytes} bytes instead of {entry.size_bytes}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name} can't be read ({error.strerror})"
    return None if digest == entry.sha256 else f"{path.name} doesn't match its checksum"


def manifest_bytes(path: Path) -> bytes:
    """The manifest file in the directory of a checkpoint.

    Raises:
        DamagedError: there is none that can be read.
    """
    try:
        return read_bytes(path / MANIFEST, "it is lost", MOST_MANIFEST_BYTES)
    except InputError as error:
        raise DamagedError(f"{MANIFEST} can't be read ({str(error).rstrip('.')})") from None


def newest_facts(folder: Path) -> dict[str, Any]:
    """What the newest readable checkpoint in a Run's folder of them keeps besides tensors, {} where
    there is none."""
    for step in reversed(complete_steps(folder)):
        with suppress(DamagedError):
            return decode_manifest(manifest_bytes(folder / f"step-{step}"), step).facts
    return {}


def write_shard(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> FileEntry:
    """Write host tensors as one safetensors file, to the disk and not only to the page cache.

    Raises:
        OSError: the disk is full, the directory is gone, ...
    """
    # Widest elements first keeps every tensor aligned, as the reference implementation does.
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())
    header = _shard_header(ordered)
    digest = hashlib.sha256(header)
    size_bytes = len(header)
    with path.open("wb") as file:
        file.write(header)
        for _, tensor in ordered:
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
            size_bytes += len(data)
    to_disk(path)
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def _shard_header(ordered: Sequence[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": dtype_name(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def make_empty(directory: Path) -> None:
    """Make a directory, without what an earlier attempt may have left in it."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()


def rename_over(partial: Path, final: Path) -> None:
    """Give a finished directory its name. One that had the name is moved aside before, not lost.

    A rename can't replace a directory that isn't empty; `remove_unfinished` finishes what a crash
    between the two renames leaves.
    """
    if not final.exists():
        partial.rename(final)
        return
    aside = final.with_name(f"{final.name}.old")
    final.rename(aside)
    partial.rename(final)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what an interrupted save left, and give a replaced checkpoint its name back."""
    for path in directory.glob("step-*.old"):
        original = path.with_suffix("")
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in directory.glob("step-*.tmp"):
        shutil.rmtree(path)


def link_to(directory: Path, name: str, step: int) -> None:
    """Point a relative symbolic link to a checkpoint, replacing it in one move."""
    link = directory / f"{name}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(f"step-{step}")
    link.replace(directory / name)
