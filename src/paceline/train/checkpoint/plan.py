"""Who writes which chunk, and which pieces of a saved layout make up a piece of the present one.

Both plans are made by the planners of torch.distributed.checkpoint: on saving, a tensor that
several ranks hold is written by the one of them with the least to write; on loading, each rank
reads exactly the overlaps of the saved chunks with its own. Neither needs a whole tensor anywhere.
Pure but for copying.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
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
    Overlap,
    TensorEntry,
    chunk_key,
    dtype_name,
    shard_name,
)
from paceline.train.checkpoint.leaves import leaves
from paceline.train.checkpoint.regions import Region


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


def _metadata(found: FoundState, names: Collection[str]) -> Metadata:
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


def overlaps(found: FoundState, targets: dict[str, Tensor]) -> list[Overlap]:
    """What of the saved chunks overlaps this rank's part of each target."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(targets, _metadata(found, targets))
    return [
        Overlap(
            item.storage_index.fqn,
            cast(int, item.storage_index.index),
            Region(tuple(item.storage_offsets), tuple(item.lengths)),
            planner.resolve_tensor(item),
        )
        for item in planner.create_local_plan().items
    ]
