"""Small records between ranks: numbers, text, bytes, lists and dicts of them, as msgpack.

torch's object collectives pickle what they send, so that whoever gets into a connection between
ranks has the receiver run code. What arrives here is data. Tuples arrive as lists.

Every rank of a group calls alike; of `send` and `receive` two do. Records travel as tensors in host
memory; a process without a group is alone and hears itself.
"""

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Give every rank the record of every rank, in rank order."""
    if group is None and not dist.is_initialized():
        return [value]
    mine, lengths = _of_one_length(value, group)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine, group)
    return _decoded(everyone, lengths)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Give the first rank the record of every rank, in rank order; the others get an empty list."""
    if group is None and not dist.is_initialized():
        return [value]
    mine, lengths = _of_one_length(value, group)
    is_first = dist.get_rank(group) == 0
    everyone = [torch.empty_like(mine) for _ in lengths] if is_first else None
    dist.gather(mine, everyone, group=group, group_dst=0)
    return _decoded(everyone, lengths) if everyone else []


def scatter(values: list[Any], group: dist.ProcessGroup | None = None) -> Any:
    """Give each rank its entry of the first rank's list; what the others pass is not looked at."""
    if group is None and not dist.is_initialized():
        return values[0]
    is_first = dist.get_rank(group) == 0
    parts = [_encoded(value) for value in values] if is_first else []
    lengths = broadcast([len(part) for part in parts], group)
    mine = torch.empty(max(lengths), dtype=torch.uint8)
    padded = [_padded(part, len(mine)) for part in parts]
    dist.scatter(mine, padded if is_first else None, group=group, group_src=0)
    return _decoded([mine], [lengths[dist.get_rank(group)]])[0]


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Give every rank the first one's record; what the others pass is not looked at."""
    if group is None and not dist.is_initialized():
        return value
    is_first = dist.get_rank(group) == 0
    mine = _encoded(value) if is_first else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(mine)])
    dist.broadcast(length, group=group, group_src=0)
    record = mine if is_first else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(record, group=group, group_src=0)
    return _decoded([record], [len(record)])[0]


def send(value: Any, peer: int, group: dist.ProcessGroup | None = None) -> None:
    """Give one rank of the group a record; it calls `receive`."""
    record = _encoded(value)
    dist.send(torch.tensor([len(record)]), group=group, group_dst=peer)
    dist.send(record, group=group, group_dst=peer)


def receive(peer: int, group: dist.ProcessGroup | None = None) -> Any:
    """The counterpart of `send`."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=peer)
    record = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(record, group=group, group_src=peer)
    return _decoded([record], [len(record)])[0]


def _of_one_length(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """This rank's record, as long as the longest, and how long each rank's is."""
    mine = _encoded(value)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group)
    each = [int(length) for length in lengths]
    return _padded(mine, max(each)), each


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _padded(record: Tensor, length: int) -> Tensor:
    return torch.cat([record, record.new_zeros(length - len(record))])


def _decoded(records: list[Tensor], lengths: list[int]) -> list[Any]:
    return [
        msgspec.msgpack.decode(record[:length].numpy().tobytes())
        for record, length in zip(records, lengths, strict=True)
    ]
