"""A nested dict of tensors and plain values, handed from the first member of a group to others.

How it works: a table of names, shapes and values travels first, as JSON, then one tensor after the
other as bytes. So whoever takes it needs to know nothing of it before. Members that have it
already take part too, for each tensor's time-out is then their own; they keep none of it.

What it is not: a checkpoint (`train.checkpoint`), which any number of ranks can load.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Nested = dict[str, Any]
"""{name: tensor, number, text or list of them, or such a dict}."""
_Path = tuple[str, ...]


def send_state(state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """As the first member: hand it to the others.

    Args:
        state: a `Nested`; its tensors, on any device, are left alone.
        group: whose backend takes tensors in host memory.
    """
    flat = dict(_flat(state))
    table = [[path, _entry(value)] for path, value in flat.items()]
    text = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)
    _broadcast(torch.tensor([text.numel()]), group)
    _broadcast(text, group)
    for value in flat.values():
        if isinstance(value, Tensor):
            _broadcast(_bytes_of(value.detach().to("cpu", copy=True).contiguous()), group)


def receive_state(group: dist.ProcessGroup, device: torch.device, *, keep: bool = True) -> Nested:
    """As another member: take part in `send_state`.

    Args:
        device: where what isn't in host memory at the giver goes.
        keep: False: let each tensor go again and return nothing.
    """
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length, group)
    text = torch.empty(int(length), dtype=torch.uint8)
    _broadcast(text, group)
    state: Nested = {}
    for path, entry in json.loads(text.numpy().tobytes()):
        value = _received(entry, group, device) if "shape" in entry else entry["value"]
        if keep:
            _put(state, path, value)
    return state


def _flat(state: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        else:
            yield (*path, name), value


def _put(state: Nested, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        state = state.setdefault(name, {})
    state[path[-1]] = value


def _entry(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"shape": list(value.shape), "dtype": dtype, "on_host": value.device.type == "cpu"}


def _received(entry: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    value = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    _broadcast(_bytes_of(value), group)
    return value if entry["on_host"] else value.to(device)


def _bytes_of(value: Tensor) -> Tensor:
    """The same memory as bytes: (n,)."""
    return value.reshape(-1).view(torch.uint8)


def _broadcast(values: Tensor, group: dist.ProcessGroup) -> None:
    if values.numel():
        dist.broadcast(values, group=group, group_src=0)
