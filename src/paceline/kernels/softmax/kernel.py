"""Softmax over the last dimension, in Triton: rows in registers, swept twice, or shared."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import sharding
from paceline.kernels.launch import Kernel, Launch, as_rows, next_power_of_2
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.partials import num_processors

_TILE = 2048
"""Values of a program, where rows are narrower."""
_WIDEST = 16384
"""The widest row that stays in registers."""
_MOST_PARTS = 64
"""Programs that share a row."""


@triton.jit
def _forward(x, out, stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    value = tl.load(x + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, axis=1)[:, None])
    result = power * (1.0 / tl.sum(power, axis=1))[:, None]
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, out, grad_x, grad_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    change = y * (d - tl.sum(d * y, axis=1)[:, None])
    tl.store(grad_x + row * width + column, change.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _largest_and_sum(x, start, end, BLOCK: tl.constexpr):
    """Of x from start to end: the largest value, and the sum of exp(x - largest).

    Every eight places of a block, a thread's load, keep their own maximum and sum until the end:
    so threads don't wait for each other, and of nine exponentials only one is for rescaling.
    """
    largest = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    places = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for at in range(start, end, BLOCK):
        column = at + places
        value = tl.load(x + column, mask=column < end, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, axis=1))
        # Where nothing but -inf was seen any finite number does; -inf - -inf would be NaN.
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        powers = tl.sum(tl.exp(value - pivot[:, None]), axis=1)
        total = total * tl.exp(largest - pivot) + powers
        largest = larger
    return _together(largest, total)


@triton.jit
def _together(largest, total):
    """Parts' maxima and sums, put together."""
    over_all = tl.max(largest, axis=0)
    pivot = tl.where(over_all == float("-inf"), 0.0, over_all)
    return over_all, tl.sum(total * tl.exp(largest - pivot), axis=0)


@triton.jit
def _write_powers(x, out, largest, total, start, end, BLOCK: tl.constexpr):
    """exp(x - largest) / total from start to end, the last block first: it was read last."""
    share = 1.0 / total
    for behind in range(0, end - start, BLOCK):
        first = start + ((end - start - 1) // BLOCK) * BLOCK - behind
        column = first + tl.arange(0, BLOCK)
        inside = column < end
        value = tl.load(x + column, mask=inside, eviction_policy="evict_first").to(tl.float32)
        result = tl.exp(value - largest) * share
        # Not kept in the cache: it is for what will be read again.
        tl.store(out + column, result.to(out.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _forward_wide(x, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total = _largest_and_sum(x + row * stride, 0, width, BLOCK)
    _write_powers(x + row * stride, out + row * width, largest, total, 0, width, BLOCK)


@triton.jit
def _part_sums(x, sums, stride, width, part, BLOCK: tl.constexpr):
    """Largest value and sum of one part of one row."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = index * part
    largest, total = _largest_and_sum(
        x + row * stride, start, tl.minimum(start + part, width), BLOCK
    )
    own = sums + (row * tl.num_programs(1) + index) * 2
    tl.store(own, largest)
    tl.store(own + 1, total)


@triton.jit
def _write_part(
    x, sums, out, stride, width, part, num_parts, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Put all parts' maxima and sums together, and write one part of one row."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PARTS)
    of_row, inside = sums + (row * num_parts + parts) * 2, parts < num_parts
    largest, total = _together(
        tl.load(of_row, mask=inside, other=float("-inf")),
        tl.load(of_row + 1, mask=inside, other=0.0),
    )
    start = index * part
    end = tl.minimum(start + part, width)
    _write_powers(x + row * stride, out + row * width, largest, total, start, end, BLOCK)


@triton.jit
def _dot(grad, out, start, end, BLOCK: tl.constexpr):
    """Sum of grad * out from start to end."""
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(start, end, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < end
        d = tl.load(grad + column, mask=inside, other=0.0).to(tl.float32)
        total += d * tl.load(out + column, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def _write_gradient(grad, out, grad_x, dot, start, end, BLOCK: tl.constexpr):
    """out * (grad - dot) from start to end, the last block first: it was read last."""
    for behind in range(0, end - start, BLOCK):
        first = start + ((end - start - 1) // BLOCK) * BLOCK - behind
        column = first + tl.arange(0, BLOCK)
        inside = column < end
        d = tl.load(grad + column, mask=inside, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(out + column, mask=inside, eviction_policy="evict_first").to(tl.float32)
        change = (y * (d - dot)).to(grad_x.dtype.element_ty)
        tl.store(grad_x + column, change, mask=inside, cache_modifier=".cs")


@triton.jit
def _backward_wide(grad, out, grad_x, grad_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d, y = grad + row * grad_stride, out + row * width
    dot = _dot(d, y, 0, width, BLOCK)
    _write_gradient(d, y, grad_x + row * width, dot, 0, width, BLOCK)


@triton.jit
def _part_dots(grad, out, sums, grad_stride, width, part, BLOCK: tl.constexpr):
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = index * part
    end = tl.minimum(start + part, width)
    dot = _dot(grad + row * grad_stride, out + row * width, start, end, BLOCK)
    tl.store(sums + row * tl.num_programs(1) + index, dot)


@triton.jit
def _write_gradient_part(
    grad,
    out,
    sums,
    grad_x,
    grad_stride,
    width,
    part,
    num_parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PARTS)
    dot = tl.sum(tl.load(sums + row * num_parts + parts, mask=parts < num_parts, other=0.0), axis=0)
    start = index * part
    end = tl.minimum(start + part, width)
    d, y = grad + row * grad_stride, out + row * width
    _write_gradient(d, y, grad_x + row * width, dot, start, end, BLOCK)


def _rule(width: int) -> Launch:
    """A row a program, or as many as make 2048 values; 16 values a thread, or more if it must."""
    block = next_power_of_2(width)
    height = max(_TILE // block, 1) if block >= 16 else 128
    warps = min(max(height * block // 512, 1), 16)
    return Launch({"ROWS": height, "BLOCK": block}, num_warps=warps)


def _others(width: int) -> list[Launch]:
    usual = _rule(width).blocks
    heights = {max(usual["ROWS"] * factor // 4, 1) for factor in (1, 2, 4, 8, 16)}
    return [
        Launch({"ROWS": height, "BLOCK": usual["BLOCK"]}, warps)
        for height in sorted(heights)
        for warps in (1, 2, 4, 8, 16, 32)
        if 128 <= height * usual["BLOCK"] // warps <= 2048
    ]


def _wide_rule(width: int) -> Launch:
    return Launch({"BLOCK": 8192}, num_warps=16)


def _part_rule(part: int) -> Launch:
    """By the length of a part."""
    block = min(max(next_power_of_2(part), 512), 4096)
    return Launch({"BLOCK": block}, num_warps=block // 512)


def _wide_others(width: int) -> list[Launch]:
    return [
        Launch({"BLOCK": block}, warps)
        for block in (2048, 4096, 8192, 16384)
        for warps in (4, 8, 16)
        if 256 <= block // warps <= 1024
    ]


_SIZES = (128, 1024, 4096, 8192, 16384)
_WIDE_SIZES = (65536, 131072, 262144)
_PART_SIZES = (2048, 4096, 16384)
_PARTS = tuple({"PARTS": each} for each in (2, 16, _MOST_PARTS))
_DTYPES = ("bf16", "fp32")
FORWARD = Kernel(
    "softmax.forward",
    _forward,
    "x out: *T; stride rows width: i32",
    _rule,
    _SIZES,
    others=_others,
    dtypes=_DTYPES,
)
BACKWARD = Kernel(
    "softmax.backward",
    _backward,
    "grad out grad_x: *T; grad_stride rows width: i32",
    _rule,
    _SIZES,
    others=_others,
    dtypes=_DTYPES,
)
WIDE_FORWARD = Kernel(
    "softmax.wide_forward",
    _forward_wide,
    "x out: *T; stride width: i32",
    _wide_rule,
    _WIDE_SIZES,
    others=_wide_others,
    dtypes=_DTYPES,
)
WIDE_BACKWARD = Kernel(
    "softmax.wide_backward",
    _backward_wide,
    "grad out grad_x: *T; grad_stride width: i32",
    _wide_rule,
    _WIDE_SIZES,
    others=_wide_others,
    dtypes=_DTYPES,
)
PART_SUMS = Kernel(
    "softmax.part_sums",
    _part_sums,
    "x: *T; sums: *fp32; stride width part: i32",
    _part_rule,
    _PART_SIZES,
    others=_wide_others,
    dtypes=_DTYPES,
)
WRITE_PART = Kernel(
    "softmax.write_part",
    _write_part,
    "x out: *T; sums: *fp32; stride width part num_parts: i32",
    _part_rule,
    _PART_SIZES,
    _PARTS,
    _wide_others,
    _DTYPES,
)
PART_DOTS = Kernel(
    "softmax.part_dots",
    _part_dots,
    "grad out: *T; sums: *fp32; grad_stride width part: i32",
    _part_rule,
    _PART_SIZES,
    others=_wide_others,
    dtypes=_DTYPES,
)
WRITE_GRADIENT_PART = Kernel(
    "softmax.write_gradient_part",
    _write_gradient_part,
    "grad out grad_x: *T; sums: *fp32; grad_stride width part num_parts: i32",
    _part_rule,
    _PART_SIZES,
    _PARTS,
    _wide_others,
    _DTYPES,
)
KERNELS = (
    FORWARD,
    BACKWARD,
    WIDE_FORWARD,
    WIDE_BACKWARD,
    PART_SUMS,
    WRITE_PART,
    PART_DOTS,
    WRITE_GRADIENT_PART,
)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _num_parts(rows: int, width: int, device: torch.device) -> int:
    """How many programs should share a row: as many as there are processors without one.

    Each has 2048 values at least, so that it is worth a program.
    """
    wanted = num_processors(device) * 2 // rows
    return max(min(wanted, width // 2048, _MOST_PARTS), 1)


def _part(width: int, num_parts: int) -> int:
    """The length of a part: a multiple of 64, so that all begin on a cache line."""
    return triton.cdiv(triton.cdiv(width, num_parts), 64) * 64


def _row_grid(rows: int) -> Any:
    return lambda blocks: (triton.cdiv(rows, blocks["ROWS"]),)


def _run(x: Tensor) -> Tensor:
    out = _like(x)
    if not out.numel():
        return out
    ours = as_rows(x)
    rows, width = ours.shape
    stride = ours.stride(0)
    num_parts = _num_parts(rows, width, x.device)
    if width <= _WIDEST:
        FORWARD(_row_grid(rows), width, ours, ours, out, stride, rows, width)
    elif num_parts == 1:
        WIDE_FORWARD((rows,), width, ours, ours, out, stride, width)
    else:
        part = _part(width, num_parts)
        sizes = stride, width, part
        grid = rows, triton.cdiv(width, part)
        sums = x.new_empty((*grid, 2), dtype=torch.float32)
        PART_SUMS(grid, part, ours, ours, sums, *sizes)
        parts = next_power_of_2(grid[1])
        WRITE_PART(grid, part, ours, ours, sums, out, *sizes, grid[1], PARTS=parts)
    return out


def _run_backward(grad: Tensor, out: Tensor) -> Tensor:
    grad_x = _like(out)
    if not grad_x.numel():
        return grad_x
    d, y = as_rows(grad), as_rows(out.contiguous())
    rows, width = y.shape
    stride = d.stride(0)
    num_parts = _num_parts(rows, width, y.device)
    if width <= _WIDEST:
        BACKWARD(_row_grid(rows), width, y, d, y, grad_x, stride, rows, width)
    elif num_parts == 1:
        WIDE_BACKWARD((rows,), width, y, d, y, grad_x, stride, width)
    else:
        part = _part(width, num_parts)
        sizes = stride, width, part
        grid = rows, triton.cdiv(width, part)
        sums = y.new_empty(grid, dtype=torch.float32)
        PART_DOTS(grid, part, y, d, y, sums, *sizes)
        parts = next_power_of_2(grid[1])
        WRITE_GRADIENT_PART(grid, part, y, d, y, sums, grad_x, *sizes, grid[1], PARTS=parts)
    return grad_x


_softmax = Operator("softmax", _run, _like)
_softmax_backward = Operator("softmax_backward", _run_backward, lambda grad, out: _like(out))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    return _softmax_backward(grad, *ctx.saved_tensors)


softmax = Differentiable(_softmax, _save, _gradient)

sharding.by_rows(_softmax, "rows", "rows")
sharding.by_rows(_softmax_backward, "rows rows", "rows")
