"""Decoder weights from a folder of torch's Distributed Checkpoint (DCP).

    .metadata       which tensors there are, and where each chunk of one stands
    __<k>_<n>.distcp    chunks, each as torch.save writes a tensor

`.metadata` is a pickle, and DCP's own reader would run whatever one from elsewhere says. Here it is
read by an unpickler that knows the names of DCP's records alone, and makes something without
methods of each; anything else is refused. A chunk is read by torch's own restricted unpickler
(`weights_only`). DCP keeps no checksums: a flipped bit in a chunk is not noticed.

Parameters have our names, alone or after "model.", or those of torchtitan's Llama, whose queries
and keys are sorted for another form of rotary positions. The metadata of Megatron's and others'
names is read, and refused for its names.

Format: torch.distributed.checkpoint (metadata.py, filesystem.py). Names and order of torchtitan:
https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/state_dict_adapter.py
"""

import io
import math
import pickle
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.files import opened, read_bytes
from paceline.config.frozen import FrozenConfig
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.shares import assign
from paceline.models.weights import Shapes, check_shapes, shapes_of

METADATA = ".metadata"
_CURE = "give a folder that torch.distributed.checkpoint wrote"
_MOST_METADATA_BYTES = 1 << 30  # ranks times tensors, as a manifest of ours
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# What a metadata file may name. Each stands for data alone; torch's dtypes and sizes come besides.
RECORDS = frozenset(
    {
        *(
            (_METADATA_MODULE, name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    }
)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
}
_OTHER_DTYPES = {"int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"} | {
    f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
}
# Parts of a parameter's name: ours, torchtitan's.
_TITAN = (
    ("embed.", "tok_embeddings."),
    ("blocks.", "layers."),
    (".attention.q_proj.", ".attention.wq."),
    (".attention.k_proj.", ".attention.wk."),
    (".attention.v_proj.", ".attention.wv."),
    (".attention.o_proj.", ".attention.wo."),
    (".ffn.gate_proj.", ".feed_forward.w1."),
    (".ffn.down_proj.", ".feed_forward.w2."),
    (".ffn.up_proj.", ".feed_forward.w3."),
    ("head.", "output."),
)

_Sizes = tuple[Annotated[int, Field(ge=0)], ...]


class _Chunk(FrozenConfig):
    """A part of a tensor, and where it stands."""

    offsets: _Sizes
    sizes: _Sizes
    file: str
    start: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(gt=0)]


class _Saved(FrozenConfig):
    """A tensor as the metadata describes it."""

    dtype: str
    size: _Sizes
    chunks: tuple[_Chunk, ...]


class _Source(NamedTuple):
    """Where a tensor of ours comes from."""

    name: str
    num_heads: int | None = None
    """Of rows that are sorted for rotated pairs of neighbours; None: they are sorted as ours."""


def is_dcp(directory: str | Path) -> bool:
    """Whether torch's DCP wrote this folder."""
    return (Path(directory) / METADATA).is_file()


def check_dcp(model: Model, directory: str | Path) -> None:
    """Check that a folder of DCP's holds the tensors of a network; no tensor is read.

    Raises:
        InputError: it has other names or shapes, is damaged, or its metadata names what it may not.
    """
    _sources(model, shapes_of(model), DcpFolder(Path(directory)))


def load_dcp(decoder: Decoder, directory: str | Path) -> None:
    """Copy the weights of a folder of DCP's into a decoder; fill its rotary tables.

    The decoder may be sharded, or a stage of a pipeline, which takes its own part.

    Raises:
        InputError: as `check_dcp`, or a chunk is damaged.
    """
    folder = DcpFolder(Path(directory))
    found = _sources(decoder.model, shapes_of(decoder.model), folder)
    decoder.reset_buffers()
    for name, tensor in decoder.state_dict(keep_vars=True).items():
        source = found[name]
        whole = folder.tensor(source.name)
        assign(tensor, whole if source.num_heads is None else _halves(whole, source.num_heads))


def _sources(model: Model, shapes: Shapes, folder: "DcpFolder") -> dict[str, _Source]:
    """Our name of each tensor -> where it is."""
    first, *_ = shapes
    for prefix in ("model.", ""):
        if prefix + first in folder.shapes:
            found = {name: _Source(prefix + name) for name in shapes}
            break
    else:
        if _titan_name(first) not in folder.shapes:
            raise InputError(
                f"{folder.path} has no tensor model.{first}, {first} or {_titan_name(first)}: give "
                "a folder that paceline export --format dcp wrote, or torchtitan for a Llama."
            )
        if model.experts is not None or model.latent is not None:
            raise InputError(
                f"{folder.path} has torchtitan's names, which are known of dense networks alone: "
                "convert it to a folder of transformers with torchtitan's own script."
            )
        found = {name: _Source(_titan_name(name), _rotated_heads(model, name)) for name in shapes}
    theirs = {source.name: shapes[name] for name, source in found.items()}
    there = {name: shape for name, shape in folder.shapes.items() if name in theirs}
    check_shapes(theirs, there, str(folder.path))
    return found


def _titan_name(name: str) -> str:
    for ours, theirs in _TITAN:
        if ours.startswith("."):
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name


def _rotated_heads(model: Model, name: str) -> int | None:
    heads = {".q_proj.": model.num_heads, ".k_proj.": model.num_kv_heads}
    return next((count for part, count in heads.items() if part in name), None)


def _halves(rows: Tensor, num_heads: int) -> Tensor:
    """Sort each head's rows from pairs of neighbours (Meta's order) into two halves (ours)."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class DcpFolder:
    """The tensors of a folder that torch's DCP wrote.

    Raises:
        InputError: its metadata is damaged, or names what it may not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / METADATA
        try:
            root = _Unpickler(io.BytesIO(read_bytes(file, _CURE, _MOST_METADATA_BYTES))).load()
            self._saved = dict(_tensors(root))
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        except Exception as error:  # of an unpickler anything
            raise InputError(f"{file} is refused ({error}): {_CURE}.") from None

    @cached_property
    def shapes(self) -> Shapes:
        """The shape of each tensor."""
        return {name: saved.size for name, saved in self._saved.items()}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, from its chunks.

        Raises:
            InputError: a chunk is missing or damaged.
        """
        saved = self._saved[name]
        covered = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if saved.dtype not in _DTYPES or covered != math.prod(saved.size):
            raise InputError(f"{self.path}: {name} is {saved.dtype}, or lacks chunks: {_CURE}.")
        whole = torch.empty(saved.size, dtype=_DTYPES[saved.dtype])
        for chunk in saved.chunks:
            place = tuple(
                slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            part = self._part(name, chunk)
            if part.dtype != whole.dtype or not whole[place].shape == part.shape == chunk.sizes:
                raise InputError(f"{self.path}: a chunk of {name} has another shape: {_CURE}.")
            whole[place] = part
        return whole

    def _part(self, name: str, chunk: _Chunk) -> Tensor:
        file = self.path / chunk.file
        if file.name != chunk.file:  # none outside this folder
            raise InputError(
                f"{self.path}: {name} is in {chunk.file!r}, which is no name: {_CURE}."
            )
        with opened(file, "copy it there as well") as source:
            source.seek(chunk.start)
            data = source.read(chunk.length)
        try:
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged archive anything
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"{file} is damaged at {name} ({why}): copy it anew.") from None
        if not isinstance(part, Tensor) or part.layout != torch.strided:
            raise InputError(f"{file} holds no plain tensor for {name}: {_CURE}.")
        return part


class _Record:
    """Stands for one of DCP's own: what it was made with, or given afterwards."""

    fields: Any = None

    def __init__(self, *fields: Any) -> None:
        self.fields = fields

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Unpickler(pickle.Unpickler):
    """Makes records of DCP's metadata, and nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._kinds: dict[str, type[_Record]] = {}
        """Made anew for each file, which can so change nothing that stays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORDS:
            return self._kinds.setdefault(name, type(name, (_Record,), {}))
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and (name in _DTYPES or name in _OTHER_DTYPES):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of DCP's does")


def _tensors(root: Any) -> Iterator[tuple[str, _Saved]]:
    """The tensors that a metadata file lists; what else is in the folder is left out."""
    metadata = _fields(root, "Metadata")
    places: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for index, place in metadata["storage_data"].items():
        at = _fields(index, "MetadataIndex")
        places[at["fqn"], at.get("offset")] = _fields(place, "_StorageInfo")
    for name, entry in metadata["state_dict_metadata"].items():
        if type(entry).__name__ != "TensorStorageMetadata":
            continue
        saved = _fields(entry, "TensorStorageMetadata")
        chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in saved["chunks"]]
        dtype = saved["properties"].fields[0]
        yield (
            str(name),
            _Saved(
                dtype=str(dtype).removeprefix("torch."),
                size=saved["size"],
                chunks=tuple(
                    _chunk(chunk["offsets"], chunk["sizes"], places[name, chunk["offsets"]])
                    for chunk in chunks
                ),
            ),
        )


def _chunk(offsets: Any, sizes: Any, place: Mapping[str, Any]) -> _Chunk:
    if place.get("transform_descriptors"):
        raise ValueError("its chunks are compressed")
    return _Chunk(
        offsets=offsets,
        sizes=sizes,
        file=place["relative_path"],
        start=place["offset"],
        length=place["length"],
    )


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if type(record).__name__ != kind or not isinstance(record.fields, dict):
        raise ValueError(f"it holds no {kind} where one belongs")
    return record.fields
