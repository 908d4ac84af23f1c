"""Triton kernels, and with which blocks and warps each is launched.

How it works: a `Kernel` stands beside each `@triton.jit` function. It knows what the function takes
(so that it can be compiled ahead, on a machine without a GPU), proposes a `Launch` for a size by a
stated rule, and lists others worth measuring. `paceline bench kernels --tune` measures those and
writes a table, a row per device, kernel, type and size; a launch asks the table first, then the
rule. Nothing is tuned in training: the first step is as fast as the last, and two runs are equal.

`launches.json` beside this file ships with Paceline; what a person has tuned is in the file that
PACELINE_KERNEL_TABLE names.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict, TypeAdapter, with_config
from torch import Tensor
from typing_extensions import TypedDict

from paceline.config.files import read_json

SHIPPED = Path(__file__).with_name("launches.json")
OWN = "PACELINE_KERNEL_TABLE"
"""The environment variable that names a table of one's own."""


class Launch(NamedTuple):
    """How a kernel is compiled and started."""

    blocks: Mapping[str, int]
    """Its compile-time sizes, by argument."""
    num_warps: int = 4
    num_stages: int = 2
    """How many loop iterations' loads are in flight (loops over products only)."""

    @property
    def options(self) -> dict[str, int]:
        """As keyword arguments of a launch."""
        return {**self.blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


class MeasuredLaunch(NamedTuple):
    """A row of the table: a launch, and what it was measured to take."""

    launch: Launch
    ms: float
    peer_ms: float
    """The best of eager torch and torch.compile on the same inputs, in the same run."""


@with_config(ConfigDict(extra="allow", strict=True, allow_inf_nan=False))
class LaunchRow(TypedDict):
    """The same as the file has it, with what the launch is for."""

    device: str
    kernel: str
    dtype: str
    size: int
    blocks: dict[str, int]
    num_warps: int
    num_stages: int
    ms: float
    peer_ms: float


class _Table(TypedDict):
    rows: list[LaunchRow]


_TABLE = TypeAdapter(_Table)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A Triton function and how to launch it.

    Calling it launches it: `kernel(grid, size, tensor, *arguments, **constants)`.
    """

    name: str
    """Operator and direction: "gated.forward"."""
    function: Any
    takes: str
    """The arguments that aren't compile-time constants, by type: "x out: *T; width: i32". "*T" is a
    pointer to values of the operator's own type, else Triton's words: "*fp32", "i64"."""
    rule: Callable[[int], Launch]
    """The launch for a size that the table has no row for."""
    sizes: Sequence[int]
    """Sizes that matter: what the report compiles and the tuner measures."""
    variants: Sequence[Mapping[str, Any]] = ({},)
    """Compile-time constants that aren't blocks; the report compiles with each."""
    others: Callable[[int], Sequence[Launch]] = field(default=lambda size: ())
    """Launches worth measuring beside the rule's."""
    dtypes: Sequence[str] = ("bf16",)
    """What "*T" stands for in the report."""
    spills_because: str = ""
    """Why this kernel may spill registers; empty: it must not."""
    least_capability: int = 80
    """The oldest device that can run it: 80 is Ampere, 90 Hopper."""

    @property
    def argument_types(self) -> dict[str, str]:
        """Type of each argument that isn't a compile-time constant."""
        groups = (group.split(":") for group in self.takes.split(";"))
        return {name: kind.strip() for names, kind in groups for name in names.split()}

    def at(self, size: int, tensor: Tensor) -> Launch:
        """The launch for a size on the tensor's device: the table's, else the rule's."""
        row = measured(device_name(tensor.device), self.name, word(tensor.dtype), size)
        return self.rule(size) if row is None else row.launch

    def __call__(
        self, grid: Any, size: int, tensor: Tensor, *arguments: Any, **constants: Any
    ) -> None:
        """Launch it.

        Args:
            grid: as Triton takes it; a function gets the blocks.
            size: what the launch is chosen by.
            tensor: its device and type choose the table's row.
            arguments: of the function, in order.
            constants: its compile-time constants that aren't blocks.
        """
        options = self.at(size, tensor).options
        if _watchers:
            _watchers[-1].append(Launched(self, size, word(tensor.dtype)))
        self.function[grid](*arguments, **constants, **options)


class Launched(NamedTuple):
    """A launch that was seen: what its row of the table goes by."""

    kernel: Kernel
    size: int
    dtype: str


_watchers: list[list[Launched]] = []


@contextmanager
def record_launches() -> Iterator[list[Launched]]:
    """A list of the launches within a block."""
    seen: list[Launched] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.pop()


def measured(device: str, kernel: str, dtype: str, size: int) -> MeasuredLaunch | None:
    """The table's row: of this size, else of the next larger one that was measured."""
    rows = table().get((device, kernel, dtype), {})
    larger = [known for known in rows if known >= size]
    return rows[min(larger)] if larger else None


def faster_than_torch(device: torch.device) -> frozenset[tuple[str, torch.dtype]]:
    """Operators and types whose kernels were measured on this device, and all beat their peers."""
    name = device_name(device)
    best: dict[tuple[str, torch.dtype], bool] = {}
    for (on, kernel, dtype), rows in table().items():
        if on == name and rows:
            key = (kernel.partition(".")[0], _DTYPES[dtype])
            best[key] = best.get(key, True) and all(r.ms <= r.peer_ms for r in rows.values())
    return frozenset(key for key, wins in best.items() if wins)


@lru_cache
def table() -> dict[tuple[str, str, str], dict[int, MeasuredLaunch]]:
    """All rows: device, kernel and type, then size. One's own rows replace those that ship.

    Raises:
        InputError: the file of one's own is no such table.
    """
    found: dict[tuple[str, str, str], dict[int, MeasuredLaunch]] = {}
    own = os.environ.get(OWN)
    for file in (SHIPPED, Path(own)) if own else (SHIPPED,):
        for row in rows_of(file):
            launch = Launch(row["blocks"], row["num_warps"], row["num_stages"])
            sizes = found.setdefault((row["device"], row["kernel"], row["dtype"]), {})
            sizes[row["size"]] = MeasuredLaunch(launch, row["ms"], row["peer_ms"])
    return found


def rows_of(file: Path) -> list[LaunchRow]:
    """The rows of one table.

    Raises:
        InputError: the file is no such table.
    """
    cure = f"name in {OWN} a table that paceline bench kernels --tune wrote, or unset it"
    return read_json(file, _TABLE, cure)["rows"]


@lru_cache
def device_name(device: torch.device) -> str:
    """As the table names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}


def word(dtype: torch.dtype) -> str:
    """As the table names a type."""
    return _WORDS.get(dtype, "fp32")


def as_rows(x: Tensor) -> Tensor:
    """See (..., width) as (rows, width) whose rows lie in one piece; copies if it must."""
    x = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    return x if x.stride(1) == 1 else x.contiguous()


def like(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape and type, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def row_rule(width: int) -> Launch:
    """Of a kernel that goes over rows in blocks and reuses nothing.

    Blocks of at most 4096 values, 512 for a warp: 16 values of each thread are in flight.
    """
    block = min(next_power_of_2(width), 4096)
    return Launch({"BLOCK": block}, num_warps=min(max(block // 512, 1), 8))


def other_row_launches(width: int) -> list[Launch]:
    """Launches worth measuring beside `row_rule`'s."""
    blocks = [block for block in (1024, 2048, 4096, 8192) if block < 2 * width]
    return [Launch({"BLOCK": block}, warps) for block in blocks for warps in (2, 4, 8, 16)]


def row_grid(x: Tensor) -> Callable[[Mapping[str, int]], tuple[int, int]]:
    """A program for each block of each row of x (rows, width)."""
    rows, width = x.shape
    return lambda blocks: (rows, -(-width // blocks["BLOCK"]))


def next_power_of_2(size: int) -> int:
    """The least power of two that is no less: blocks must be powers of two."""
    return 1 << max(size - 1, 0).bit_length()
