"""Batches of any form: collated from samples, cut by rows, moved to a device.

A batch is a tree: tensors in dicts, lists, tuples, named tuples, dataclasses, and whatever else is
registered with torch's pytrees (`transformers` registers its outputs).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from paceline.config.errors import InputError

Collate = Callable[[list[Any]], Any]
"""Maps samples to one batch of them."""


def collate_by_default(samples: list[Any]) -> Any:
    """Stack samples by torch's rule, which is extended to dataclasses.

    Raises:
        InputError: they can't be stacked.
    """
    first = samples[0]
    if _is_record(first):
        fields = [field.name for field in dataclasses.fields(first) if field.init]
        parts = {name: [getattr(sample, name) for sample in samples] for name in fields}
        stacked = {name: collate_by_default(values) for name, values in parts.items()}
        return dataclasses.replace(first, **stacked)
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"samples can't be stacked into a batch ({_first_line(error)}): give "
            "paceline.train(..., collate=) a function that maps a list of samples to a batch, one "
            "that pads where lengths differ."
        ) from error


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device; on CUDA the host doesn't wait for the copies."""

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            # The caching host allocator keeps the pinned memory until the copy is done.
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def move_other(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return _mapped(move, move_other, batch)


def num_rows(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor, or of its first list of texts.

    Raises:
        InputError: it has neither.
    """
    found: list[int] = []

    def note(value: Any) -> None:
        if (isinstance(value, Tensor) and value.ndim) or _is_column(value):
            found.append(len(value))

    _mapped(note, note, batch)
    if not found:
        raise InputError(
            f"data yielded a {type(batch).__name__} without a tensor in it: an iterable must yield "
            "batches of tensors, whose first dimension is the batch."
        )
    return found[0]


def rows_of(batch: Any, rows: slice) -> Any:
    """Some samples of a batch.

    Raises:
        InputError: not every tensor in the batch has as many rows.
    """
    count = num_rows(batch)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if len(tensor) != count:
            raise InputError(
                f"data yielded a batch of {count} samples with a tensor of shape "
                f"{tuple(tensor.shape)} in it: the first dimension of every tensor must be the "
                "batch, or else give a dataset and collate=."
            )
        return tensor[rows]

    def cut_other(value: Any) -> Any:
        return value[rows] if _is_column(value) and len(value) == count else value

    return _mapped(cut, cut_other, batch)


def _mapped(change: Callable[[Tensor], Any], change_other: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with its tensors changed, and its other leaves: texts, numbers, objects."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return change(torch.from_numpy(value))
        if _is_record(value):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{f: whole(getattr(value, f)) for f in fields})
        if isinstance(value, Mapping):  # no dict: transformers' BatchEncoding is one
            return {key: whole(item) for key, item in value.items()}
        return change_other(value)

    def whole(value: Any) -> Any:
        return tree_map(leaf, value, is_leaf=_is_column)

    return whole(batch)


def _is_column(value: Any) -> bool:
    """Whether a value is a list of plain ones, one of each sample: texts, names."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and bool(value) and all(isinstance(each, str | bytes) for each in value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
