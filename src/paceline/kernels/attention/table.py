"""Measured choices between implementations of causal attention, remembered in a file.

Measured when asked, forward and backward, on random data, implementations in turn: a device's clock
drifts, and depends on the data. A row holds for one device, type, bucket of shapes and version of
torch, for with torch its kernels change.
"""

import json
import os
import statistics
import time
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor
from typing_extensions import TypedDict

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.kernels.attention.backends import attend, candidates
from paceline.kernels.attention.rule import AttentionShape, Backend, BackendChoice
from paceline.kernels.launch import OWN as OWN_LAUNCHES
from paceline.kernels.launch import device_name, next_power_of_2

OWN = "PACELINE_ATTENTION_TABLE"
"""The environment variable that names the file; else it is beside one's own table of launches."""
_NAME = "attention.json"
_WARM_UP = 2


class BackendTiming(NamedTuple):
    """What was measured."""

    device: str
    dtype: str
    mask: str
    """Always "causal": no other is chosen for."""
    bucket: str
    torch: str
    ms: Mapping[Backend, float]
    """Forward and backward, the median, of each implementation that took the call."""


class _Table(TypedDict):
    rows: list[BackendTiming]


_TABLE = TypeAdapter(_Table)


def default_path() -> Path | None:
    """The file of this process; None where no environment variable names it."""
    if named := os.environ.get(OWN):
        return Path(named)
    launches = os.environ.get(OWN_LAUNCHES)
    return Path(launches).with_name(_NAME) if launches else None


def bucket(shape: AttentionShape) -> str:
    """Shapes that are taken to be alike: work and length up to the next power of two."""
    lines, length = shape.batch * shape.heads, shape.seq_len
    return (
        f"{next_power_of_2(lines)}x{next_power_of_2(length)}"
        f"x{shape.head_dim}x{shape.value_dim}/{shape.heads // shape.kv_heads}"
    )


def remembered(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, path: Path | None = None
) -> BackendChoice | None:
    """The choice that was measured; None where none was with this version of torch.

    Raises:
        InputError: the file is no such table.
    """
    path = path or default_path()
    if path is None or not path.exists():
        return None
    row = _rows(path, path.stat().st_mtime_ns).get(_key(shape, dtype, device))
    if row is None or not row.ms:
        return None
    return _fastest(row)


def measure(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    path: Path | None = None,
    rounds: int = 10,
) -> BackendChoice:
    """Run every implementation that takes the call, and remember how long each took.

    Args:
        shape: of the call.
        dtype: of queries, keys and values.
        device: where to run.
        path: the file to keep it in; by default `default_path`.
        rounds: how often each runs.

    Raises:
        InputError: no file is named, or no implementation takes the call.
    """
    path = path or default_path()
    if path is None:
        raise InputError(
            f"No file was named to keep the measurement in; give a path, or set {OWN}."
        )
    times = _times(shape, dtype, device, rounds)
    if not times:
        raise InputError(
            f"Attention of {shape} in {dtype} was to be measured, but no implementation takes it "
            f"on {device}; change the shape or the type."
        )
    key = _key(shape, dtype, device)
    rows = dict(_rows(path, path.stat().st_mtime_ns)) if path.exists() else {}
    rows[key] = BackendTiming(*key, times)
    _write(path, rows)
    return _fastest(rows[key])


def _fastest(row: BackendTiming) -> BackendChoice:
    best = min(row.ms, key=row.ms.__getitem__)
    told = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(row.ms.items()))
    return BackendChoice(best, f"measured on this device: {told}")


_Key = tuple[str, str, str, str, str]


def _key(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> _Key:
    named = str(dtype).removeprefix("torch.")
    return device_name(device), named, "causal", bucket(shape), torch.__version__


@lru_cache(maxsize=1)
def _rows(path: Path, changed_ns: int) -> Mapping[_Key, BackendTiming]:
    """The file's rows; read anew when it changed.

    Raises:
        InputError: the file is no such table.
    """
    read = read_json(path, _TABLE, "let paceline bench kernels --tune write it anew")["rows"]
    return {(row.device, row.dtype, row.mask, row.bucket, row.torch): row for row in read}


def _write(path: Path, rows: Mapping[_Key, BackendTiming]) -> None:
    """All or nothing: another process may be reading."""
    text = json.dumps({"rows": [row._asdict() for row in rows.values()]}, indent=1)
    from paceline.observe.run import write_atomic  # which reads all settings of a Job

    write_atomic(path, text + "\n")
    _rows.cache_clear()


def _times(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, rounds: int
) -> dict[Backend, float]:
    inputs = _random_inputs(shape, dtype, device)
    taken: dict[Backend, list[float]] = {}
    for backend in candidates(shape, dtype, device):
        try:
            for _ in range(_WARM_UP):
                _once(inputs, backend)
        except RuntimeError:
            continue  # torch's tests of a call are not complete
        taken[backend] = []
    for _ in range(rounds):
        for backend, mine in taken.items():
            mine.append(_once(inputs, backend))
    return {backend: statistics.median(mine) for backend, mine in taken.items()}


def _random_inputs(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the gradient of the result, laid out as a layer makes them."""
    batch, heads, kv_heads, length, width, value_width = shape

    def random(heads: int, width: int) -> Tensor:
        made = torch.randn(batch, length, heads, width, device=device, dtype=dtype)
        return made.transpose(1, 2).requires_grad_()

    return (
        *(random(heads, width), random(kv_heads, width), random(kv_heads, value_width)),
        random(heads, value_width).detach(),
    )


def _once(inputs: tuple[Tensor, ...], backend: Backend) -> float:
    """Milliseconds of forward and backward."""
    *asking, grad = inputs
    q, k, v = asking
    start = _now(q.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why torch doesn't take a call, or runs it unfused
        torch.autograd.grad(attend(q, k, v, backend), asking, grad)
    return (_now(q.device) - start) * 1e3


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
