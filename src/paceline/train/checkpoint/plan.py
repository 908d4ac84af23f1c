"""Who writes which chunk, and which pieces of a saved layout make up a piece of the present one.

Both plans are made by the planners of torch.distributed.checkpoint: on saving, a tensor that
several ranks hold is written by the one of them with the least to write; on loading, each rank
reads exactly the overlaps of the saved chunks with its own. Neither needs a whole tensor anywhere.
Pure but for copying and reading.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from paceline.config.errors import InputError
from paceline.train.checkpoint.files import (
    DTYPES,
    Chunk,
    FoundState,
    TensorEntry,
    chunk_key,
    dtype_name,
    shard_name,
)

# Entries below this name belong to one rank each; ranks that weren't there have none.
PER_RANK_SECTION = "rng"


@dataclass(frozen=True)
class Leaf:
    """An entry of a nested dict, and where to replace it."""

    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """The entry."""
        return self.holder[self.key]


def leaves(nested: dict[str, Any], prefix: str = "") -> dict[str, Leaf]:
    """Return the entries of nested dicts by their dotted path.

    Raises:
        InputError: a key isn't text, or two paths read the same.
    """
    flat: dict[str, Leaf] = {}
    for key, value in nested.items():
        if not isinstance(key, str):
            raise InputError(f"the state has the key {key!r} under {prefix!r}; keys must be text.")
        is_inner = isinstance(value, dict)
        inner = leaves(value, f"{prefix}{key}.") if is_inner else {prefix + key: Leaf(nested, key)}
        if clash := flat.keys() & inner.keys():
            raise InputError(f"two entries of the state are named {min(clash)}; rename one.")
        flat.update(inner)
    return flat


@dataclass(frozen=True)
class ShareRequest:
    """What one rank could write: the same again means that the last division still holds."""

    items: list[WriteItem]
    value_names: list[str]

    def plain(self) -> list[Any]:
        """As a record for another rank."""
        return [[_plain(item) for item in self.items], self.value_names]

    @staticmethod
    def of_plain(record: list[Any]) -> "ShareRequest":
        """What another rank sent."""
        items, value_names = record
        return ShareRequest([_of_plain(item) for item in items], value_names)


@dataclass(frozen=True)
class WriteShare(ShareRequest):
    """What one rank is to write."""

    tensors: dict[str, TensorEntry]
    """The index of the whole checkpoint; rank 0 alone has it, and it isn't sent."""


@dataclass(frozen=True)
class Staging:
    """A share with the host memory that it is copied to, kept from one save to the next."""

    asked: ShareRequest
    share: WriteShare
    buffers: list[Tensor]

    @staticmethod
    def of(asked: ShareRequest, share: WriteShare) -> "Staging":
        """Allocate the memory; pinned beside an accelerator, so that it copies at full speed."""
        pin = torch.accelerator.is_available()
        buffers = [
            torch.empty(data.chunk.sizes, dtype=data.properties.dtype, pin_memory=pin)
            for data in map(_tensor_data, share.items)
        ]
        return Staging(asked, share, buffers)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers, under the names they get in the shard file."""
        datas = map(_tensor_data, self.share.items)
        keys = [
            chunk_key(item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size)
            for item, data in zip(self.share.items, datas, strict=True)
        ]
        return list(zip(keys, self.buffers, strict=True))


@dataclass(frozen=True)
class RankState:
    """The state of one rank at one save: tensors (behind the planner) and plain values, flat."""

    asked: ShareRequest
    values: dict[str, Any]
    planner: DefaultSavePlanner

    @staticmethod
    def of(nested: dict[str, Any]) -> "RankState":
        """Flatten a state and list what there is to write.

        Raises:
            InputError: an entry is neither a tensor of a known dtype nor JSON data.
        """
        flat = {path: leaf.value for path, leaf in leaves(nested).items()}
        tensors = {path: value for path, value in flat.items() if isinstance(value, Tensor)}
        values = {path: value for path, value in flat.items() if path not in tensors}
        values = {path: as_json(path, value) for path, value in values.items()}
        for path, tensor in tensors.items():
            dtype_name(tensor.dtype, path)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(tensors)
        return RankState(
            ShareRequest(planner.create_local_plan().items, list(values)), values, planner
        )

    def pieces(self) -> Iterator[tuple[WriteItem, TensorWriteData, Tensor]]:
        """What this rank holds something of: its place, and the live tensor."""
        for item in self.asked.items:
            if _holds_something(item):
                tensor = cast(Tensor, self.planner.resolve_data(item))
                yield item, _tensor_data(item), tensor.detach()

    @torch.no_grad()
    def copy_to_host(self, staging: Staging) -> None:
        """Copy this rank's share into the buffers, and wait until it is there."""
        is_on_device = False
        for item, buffer in zip(staging.share.items, staging.buffers, strict=True):
            source = cast(Tensor, self.planner.resolve_data(item))
            is_on_device |= not source.is_cpu
            buffer.copy_(source, non_blocking=True)
        if is_on_device:
            torch.accelerator.synchronize()


def as_json(name: str, value: Any) -> Any:
    """Return a copy of JSON data, as it will be read back; the caller's may change meanwhile.

    Raises:
        InputError: the value can't be written as JSON.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise InputError(
            f"{name} is a {type(value).__name__}; a checkpoint holds tensors and JSON data only."
        ) from None


def divide_writes(asked: Sequence[ShareRequest]) -> list[WriteShare]:
    """Decide who writes what.

    Args:
        asked: what each rank holds, in rank order.

    Returns:
        One share per rank: each chunk and each value is in exactly one.

    Raises:
        InputError: ranks hold tensors of one name but different shapes or dtypes.
    """
    _require_same_shapes(asked)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans, _ = planner.create_global_plan(
        [SavePlan([item for item in one.items if _holds_something(item)]) for one in asked]
    )
    index = _index(plans)
    owner: dict[str, int] = {}
    for rank, one in enumerate(asked):
        for name in one.value_names:
            owner.setdefault(name, rank)
    return [
        WriteShare(plan.items, [n for n, of in owner.items() if of == rank], {} if rank else index)
        for rank, plan in enumerate(plans)
    ]


def _holds_something(item: WriteItem) -> bool:
    """False for the share of a rank that is left without, where there are more ranks than rows."""
    data = _tensor_data(item)
    return 0 not in data.chunk.sizes or 0 in data.size


def _require_same_shapes(asked: Sequence[ShareRequest]) -> None:
    seen: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for item in (item for one in asked for item in one.items):
        data = _tensor_data(item)
        mine = (data.size, data.properties.dtype)
        other = seen.setdefault(item.index.fqn, mine)
        if other != mine:
            raise InputError(
                f"{item.index.fqn} is {other[1]} {tuple(other[0])} on one rank and {mine[1]} "
                f"{tuple(mine[0])} on another; give tensors that differ different names."
            )


def _index(plans: Sequence[SavePlan]) -> dict[str, TensorEntry]:
    index: dict[str, TensorEntry] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = _tensor_data(item), item.index.fqn
            if name not in index:
                dtype = dtype_name(data.properties.dtype, name)
                index[name] = TensorEntry(dtype=dtype, size=list(data.size), chunks=[])
            offsets, sizes = list(data.chunk.offsets), list(data.chunk.sizes)
            chunk = Chunk(offsets=offsets, sizes=sizes, file=shard_name(rank))
            index[name].chunks.append(chunk)
    return index


def _plain(item: WriteItem) -> list[Any]:
    data, index = _tensor_data(item), item.index
    dtype = dtype_name(data.properties.dtype, index.fqn)
    place = None if index.offset is None else list(index.offset)
    chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
    return [index.fqn, place, index.index, item.type.name, *chunk, list(data.size), dtype]


def _of_plain(record: list[Any]) -> WriteItem:
    name, place, number, kind, offsets, sizes, size, dtype = record
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        TensorProperties(dtype=DTYPES[dtype]),
        torch.Size(size),
    )
    return WriteItem(MetadataIndex(name, place, number), WriteItemType[kind], tensor_data=data)


def _tensor_data(item: WriteItem) -> TensorWriteData:
    return cast(TensorWriteData, item.tensor_data)


def matching_entries(found: FoundState, nested: dict[str, Any]) -> dict[str, Leaf]:
    """Return the entries to load, having checked that the checkpoint has each as it is needed.

    Raises:
        InputError: a name is missing, or its shape, dtype or kind differs.
    """
    flat = leaves(nested)
    problems = {path: _misfit(found, path, leaf.value) for path, leaf in flat.items()}
    wrong = {path: problem for path, problem in problems.items() if problem is not None}
    per_rank = [path for path in wrong if path.startswith(f"{PER_RANK_SECTION}.")]
    serious = [path for path in wrong if path not in per_rank]
    if serious:
        what = first_few([wrong[path] for path in serious])
        raise InputError(
            f"checkpoint step-{found.step} doesn't fit: {what}; "
            "continue with the model, precision and optimizer that were saved."
        )
    return {path: leaf for path, leaf in flat.items() if path not in wrong}


def _misfit(found: FoundState, path: str, value: Any) -> str | None:
    entry = found.manifest.tensors.get(path)
    if not isinstance(value, Tensor):
        is_there = path in found.manifest.values
        return None if is_there else f"{path} is {'a tensor' if entry else 'not'} in it"
    if entry is None:
        return f"{path} is {'not a tensor' if path in found.manifest.values else 'not'} in it"
    if (entry.torch_dtype, entry.size) != (value.dtype, list(value.shape)):
        saved = f"{entry.torch_dtype} {tuple(entry.size)}"
        return f"{path} was saved as {saved} and is {value.dtype} {tuple(value.shape)}"
    return None


def unclaimed(found: FoundState, nested: Mapping[str, Any], taken: Collection[str]) -> set[str]:
    """Return the saved tensors that are not taken, though others of their section are asked for."""
    sections = set(nested) - {PER_RANK_SECTION}
    return {
        name
        for name in found.manifest.tensors
        if name.partition(".")[0] in sections and name not in taken
    }


def first_few(names: Sequence[str]) -> str:
    """Name the first few of a list in a sentence."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def fill(found: FoundState, wanted: Mapping[str, Leaf]) -> None:
    """Copy a state into the wanted tensors, in place, and replace the wanted values.

    Raises:
        InputError, DamagedError: as `FoundState.fill`.
    """
    values = found.manifest.values
    for path, leaf in wanted.items():
        if not isinstance(leaf.value, Tensor):
            is_tuple = isinstance(leaf.value, tuple)
            leaf.holder[leaf.key] = tuple(values[path]) if is_tuple else values[path]
    tensors = {path: leaf.value for path, leaf in wanted.items()}
    found.fill({path: value for path, value in tensors.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class FoundCheckpoint(FoundState):
    """A complete checkpoint whose every file was read and matched its checksum."""

    path: Path

    def fill(self, targets: dict[str, Tensor]) -> None:
        """Read what overlaps each target out of the files.

        Raises:
            InputError: a shard is no safetensors file or lacks a chunk, though its checksum is
                right.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(targets, _metadata(self, targets))
        by_file: dict[str, list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            by_file.setdefault(_saved_chunk(self, item).file, []).append(item)
        for file, items in by_file.items():
            _read(self, file, items, planner)


def _metadata(found: FoundCheckpoint, names: Collection[str]) -> Metadata:
    """Put the index into the form that DCP's load planner reads."""
    entries = {name: found.manifest.tensors[name] for name in names}
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=entry.torch_dtype),
                torch.Size(entry.size),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
            for name, entry in entries.items()
        }
    )


def _saved_chunk(found: FoundCheckpoint, item: ReadItem) -> Chunk:
    return found.manifest.tensors[item.storage_index.fqn].chunks[
        cast(int, item.storage_index.index)
    ]


def _piece(shard: Any, key: str, item: ReadItem, chunk: Chunk) -> Tensor:
    """The part of a saved chunk that is asked for; the rest of it isn't read."""
    if list(item.lengths) == chunk.sizes:
        return shard.get_tensor(key)
    starts_and_lengths = zip(item.storage_offsets, item.lengths, strict=True)
    return shard.get_slice(key)[tuple(slice(at, at + n) for at, n in starts_and_lengths)]


@torch.no_grad()
def _read(
    found: FoundCheckpoint, file: str, items: Sequence[ReadItem], planner: DefaultLoadPlanner
) -> None:
    try:
        with safe_open(found.path / file, framework="pt") as shard:
            for item in items:
                name, chunk = item.storage_index.fqn, _saved_chunk(found, item)
                size = found.manifest.tensors[name].size
                key = chunk_key(name, chunk.offsets, chunk.sizes, size)
                planner.resolve_tensor(item).copy_(_piece(shard, key, item, chunk))
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"checkpoint step-{found.step}: {file} is not what its manifest says ({error}); "
            "put back a copy."
        ) from None
