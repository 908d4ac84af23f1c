"""Digest: a short name of what a value holds, the same in every process that has the same value."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def digest(value: Any) -> str:
    """Of tensors, arrays, numbers and texts in any tree; of other objects only their type counts,
    since an address or a default text would differ from process to process."""
    found = hashlib.blake2b(digest_size=8)
    for part in _bytes_of(value):
        found.update(part + b"\0")
    return found.hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    leaves, tree = tree_flatten(value)
    if tree.is_leaf():
        yield from _bytes_of_leaf(value)
        return
    yield str(tree).encode()
    for leaf in leaves:
        yield from _bytes_of_leaf(leaf)


def _bytes_of_leaf(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield plain.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, bytes):
        yield value
    elif value is None or isinstance(value, str | int | float | complex | np.generic):
        yield repr(value).encode()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__.encode()
        for field in dataclasses.fields(value):
            yield from _bytes_of(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _bytes_of(item)
    else:
        yield type(value).__qualname__.encode()
        if callable(content := getattr(value, "tobytes", None)):  # an image
            yield content()
