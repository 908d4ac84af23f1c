"""Plain data: what a checkpoint keeps of a person's iterable, as JSON.

What an iterable gives as its `state_dict` may hold tensors, arrays, bytes and keys that are no
text. It is kept without pickle, so that reading a checkpoint runs no code.
"""

import base64
from typing import Any

import numpy as np
import torch

_BYTES, _TUPLE, _ITEMS, _TENSOR, _ARRAY = "bytes", "tuple", "items", "tensor", "array"
_MARK = "paceline"
"""The key of what isn't JSON by itself."""


class NotPlainError(Exception):
    """Something in it is an object; the text names its type."""


def to_plain(value: Any) -> Any:
    """Data as JSON.

    Raises:
        NotPlainError: there is something else in it.
    """
    match value:
        case None | bool() | str():
            return value
        case np.ndarray() | np.generic() if value.dtype.kind in "biufc":
            array = np.ascontiguousarray(value)
            data = base64.b64encode(array.tobytes()).decode()
            return {_MARK: _ARRAY, "dtype": array.dtype.str, "shape": [*value.shape], "data": data}
        case int() | float():
            return value
        case bytes():
            return {_MARK: _BYTES, "data": base64.b64encode(value).decode()}
        case list():
            return [to_plain(each) for each in value]
        case tuple() if type(value) is tuple:
            return {_MARK: _TUPLE, "data": [to_plain(each) for each in value]}
        case dict():
            if all(isinstance(key, str) for key in value) and _MARK not in value:
                return {key: to_plain(each) for key, each in value.items()}
            pairs = [[to_plain(key), to_plain(each)] for key, each in value.items()]
            return {_MARK: _ITEMS, "data": pairs}
        case torch.Tensor() if value.dtype is not torch.bfloat16:
            return {_MARK: _TENSOR, "data": to_plain(value.detach().cpu().numpy())}
    raise NotPlainError(type(value).__name__)


def from_plain(value: Any) -> Any:
    """What `to_plain` was given.

    Raises:
        ValueError: it isn't what that gives; so do KeyError and TypeError.
    """
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value.get(_MARK):
        case None:
            return {key: from_plain(each) for key, each in value.items()}
        case "bytes":
            return base64.b64decode(value["data"])
        case "tuple":
            return tuple(from_plain(each) for each in value["data"])
        case "items":
            return {from_plain(key): from_plain(each) for key, each in value["data"]}
        case "array":
            data = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
            return data.reshape(value["shape"]).copy()[()]
        case "tensor":
            return torch.from_numpy(np.asarray(from_plain(value["data"])))
    raise ValueError(f"{value[_MARK]!r} is no kind of plain data")
