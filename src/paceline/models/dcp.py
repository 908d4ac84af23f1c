"""Decoder weights from a folder of torch's Distributed Checkpoint (DCP).

    .metadata       which tensors there are, and where each chunk of one stands
    __<k>_<n>.distcp    chunks, each as torch.save writes a tensor

`.metadata` is a pickle, and DCP's own reader would run whatever one from elsewhere says. Here it is
read by an unpickler that knows the names of DCP's records alone, and makes something without
methods of each; anything else is refused. A chunk is read by torch's own restricted unpickler
(`weights_only`). DCP keeps no checksums: a flipped bit in a chunk is not noticed.

Parameters have our names, or torchtitan's or Megatron-Core's (`dcp_names`).

Format: torch.distributed.checkpoint (metadata.py, filesystem.py). Megatron-Core's metadata has
SavePlans (planner.py) besides, which say nothing more.
"""

import io
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.files import opened, read_bytes
from paceline.config.frozen import FrozenConfig
from paceline.config.model import Model
from paceline.models.dcp_names import Place, places
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
        *(
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
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
# A parameter of a layer, by any known name; beside layers others keep what they like.
_OF_A_LAYER = re.compile(r"((model\.)?blocks|layers|decoder\.layers)\..*\.(weight|bias)")
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


def is_dcp(directory: str | Path) -> bool:
    """Whether torch's DCP wrote this folder."""
    return (Path(directory) / METADATA).is_file()


def check_dcp(model: Model, directory: str | Path) -> None:
    """Check that a folder of DCP's holds the tensors of a network; no tensor is read.

    Raises:
        InputError: it has other names or shapes, or more layers or adapters, is damaged, or its
            metadata names what it may not.
    """
    _places(model, DcpFolder(Path(directory)))


def load_dcp(decoder: Decoder, directory: str | Path) -> None:
    """Copy the weights of a folder of DCP's into a decoder; fill its rotary tables.

    The decoder may be sharded, or a stage of a pipeline, which takes its own part.

    Raises:
        InputError: as `check_dcp`, or a chunk is damaged.
    """
    folder = DcpFolder(Path(directory))
    found = _places(decoder.model, folder)
    decoder.reset_buffers()
    for name, tensor in decoder.state_dict(keep_vars=True).items():
        place = found[name]
        theirs = folder.tensor(place.name, place.layer)
        assign(tensor, theirs if place.take is None else place.take(theirs))


def _places(model: Model, folder: "DcpFolder") -> dict[str, Place]:
    """Our name of each tensor -> where it is."""
    shapes = shapes_of(model)
    found = places(model, shapes, folder.shapes)
    if found is None:
        first, *_ = shapes
        raise InputError(
            f"{folder.path} has no tensor model.{first} or {first}, nor the first one of "
            "torchtitan's or Megatron's names: give a folder that paceline export --format dcp "
            "wrote, torchtitan for a Llama, or Megatron-Core for a GPTModel (torch_dist)."
        )
    for name in sorted(folder.shapes.keys() - found.shapes.keys()):
        if _OF_A_LAYER.fullmatch(name):
            raise InputError(
                f"The tensor {name} in {folder.path} is not part of the model: give the Job the "
                "network that was saved, or of a run with adapters what paceline export writes "
                "without --format, where they are merged."
            )
    there = {name: shape for name, shape in folder.shapes.items() if name in found.shapes}
    check_shapes(found.shapes, there, str(folder.path))
    return found.of


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
        self._newest: dict[tuple[str, int | None], Tensor] = {}
        """What was read last: several of our tensors may be one of theirs."""

    @cached_property
    def shapes(self) -> Shapes:
        """The shape of each tensor."""
        return {name: saved.size for name, saved in self._saved.items()}

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """A whole tensor, from its chunks.

        Args:
            layer: of a tensor of all layers, layers first: its part alone is read.

        Raises:
            InputError: a chunk is missing or damaged.
        """
        saved = self._saved[name]
        covered = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if saved.dtype not in _DTYPES or covered != math.prod(saved.size):
            raise InputError(f"{self.path}: {name} is {saved.dtype}, or lacks chunks: {_CURE}.")
        if (name, layer) not in self._newest:
            self._newest = {(name, layer): self._filled(name, saved, layer)}
        return self._newest[name, layer]

    def _filled(self, name: str, saved: _Saved, layer: int | None) -> Tensor:
        rows = range(saved.size[0]) if saved.size else range(1)
        rows = rows if layer is None else rows[layer : layer + 1]
        whole = torch.empty((len(rows), *saved.size[1:]), dtype=_DTYPES[saved.dtype])
        for chunk in saved.chunks:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            begin = max(rows.start, offsets[0])
            end = min(rows.stop, offsets[0] + sizes[0])
            if begin >= end:
                continue
            part = self._part(name, chunk)
            place = (
                slice(begin - rows.start, end - rows.start),
                *(slice(at, at + n) for at, n in zip(offsets[1:], sizes[1:], strict=True)),
            )
            if part.dtype != whole.dtype or part.shape != chunk.sizes:
                raise InputError(f"{self.path}: a chunk of {name} has another shape: {_CURE}.")
            inside = part.reshape(sizes)[begin - offsets[0] : end - offsets[0]]
            if whole[place].shape != inside.shape:
                raise InputError(f"{self.path}: a chunk of {name} has another shape: {_CURE}.")
            whole[place] = inside
        return whole.reshape(saved.size) if layer is None else whole[0]

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
