"""Bias, dropout and residual, in Triton.

Forward, a program works on one block of values. Backward, it walks down a block of columns and sums
the bias's gradient as it goes. Random bits are the costly part: one call of Philox makes 128, and
sixteen of them are enough for a value (an eighth of a call; with a call for each value, the kernel
would be five times slower than memory).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch, as_rows, next_power_of_2
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.partials import num_programs
from paceline.kernels.residual import reference


@triton.jit
def _levels(seed, row, first_column, width, BLOCK: tl.constexpr):
    """16 random bits of each value of rows (ROWS, 1) from a column on: (ROWS, BLOCK)."""
    group = first_column // 8 + tl.arange(0, BLOCK // 8)[None, :]
    counter = row * tl.cdiv(width, 8) + group
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), low, high, low * 0, low * 0)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def _forward(
    x,
    bias,
    residual,
    out,
    seed,
    x_stride,
    residual_stride,
    rows,
    width,
    threshold,
    scale,
    HAS_BIAS: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask=inside).to(tl.float32)
    add = tl.load(residual + row * residual_stride + column, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < width).to(tl.float32)
    if DROPS:
        is_kept = _levels(seed, row, first, width, BLOCK) >= threshold
        value = tl.where(is_kept, value * scale, 0.0)
    result = (add + value).to(out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=inside)


@triton.jit
def _backward(
    grad,
    grad_x,
    bias_sums,
    seed,
    grad_stride,
    rows,
    width,
    threshold,
    scale,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    blocks = tl.cdiv(rows, ROWS)
    for block in tl.range(program, blocks, tl.num_programs(1), num_stages=STAGES):
        row = (tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < width)
        d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        is_kept = _levels(seed, row, first, width, BLOCK) >= threshold
        change = tl.where(is_kept, d * scale, 0.0)
        if HAS_BIAS:
            sums += change
        tl.store(grad_x + row * width + column, change.to(grad_x.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        at = first + tl.arange(0, BLOCK)
        total = tl.sum(sums, axis=0)
        tl.store(bias_sums + program.to(tl.int64) * width + at, total, mask=at < width)


def _rule(width: int) -> Launch:
    """2048 values a program, 16 a thread: of one row, or of as many narrow ones as that makes."""
    block = min(max(next_power_of_2(width), 8), 2048)
    return Launch({"ROWS": min(2048 // block, 128), "BLOCK": block}, num_warps=4)


def _backward_rule(width: int) -> Launch:
    """Likewise; of fewer columns, so that there are enough programs, and fetched ahead."""
    block = min(max(next_power_of_2(width), 8), 512)
    height = min(2048 // block, 128)
    return Launch({"ROWS": height, "BLOCK": block, "STAGES": 3}, num_warps=4)


def _others(width: int) -> list[Launch]:
    return [
        Launch({"ROWS": height, "BLOCK": block}, warps)
        for block in (256, 512, 1024, 2048)
        for height in (1, 2, 4, 8)
        for warps in (2, 4, 8)
        if 256 <= height * block // warps <= 1024
    ]


def _backward_others(width: int) -> list[Launch]:
    return [
        each._replace(blocks={**each.blocks, "STAGES": stages})
        for each in _others(width)
        for stages in (1, 3)
    ]


_SIZES = (128, 1024, 4096)
_DTYPES = ("bf16", "fp32")
FORWARD = Kernel(
    "residual.forward",
    _forward,
    "x bias residual out: *T; seed: *i64; x_stride residual_stride rows width threshold: i32; "
    "scale: fp32",
    _rule,
    _SIZES,
    ({"HAS_BIAS": True, "DROPS": True}, {"HAS_BIAS": True, "DROPS": False}),
    _others,
    _DTYPES,
)
BACKWARD = Kernel(
    "residual.backward",
    _backward,
    "grad grad_x: *T; bias_sums: *fp32; seed: *i64; grad_stride rows width threshold: i32; "
    "scale: fp32",
    _backward_rule,
    _SIZES,
    ({"HAS_BIAS": True}, {"HAS_BIAS": False}),
    _backward_others,
    _DTYPES,
)
KERNELS = (FORWARD, BACKWARD)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor) -> Tensor:
    out = _like(x)
    if not out.numel():
        return out
    ours, other = as_rows(x), as_rows(residual)
    rows, width = ours.shape
    threshold, scale = reference.dropping(p)
    FORWARD(
        lambda blocks: (triton.cdiv(rows, blocks["ROWS"]), triton.cdiv(width, blocks["BLOCK"])),
        width,
        ours,
        ours,
        ours if bias is None else bias.contiguous(),
        other,
        out,
        seed,
        ours.stride(0),
        other.stride(0),
        rows,
        width,
        threshold,
        scale,
        HAS_BIAS=bias is not None,
        DROPS=threshold > 0,
    )
    return out


def _run_backward(
    grad: Tensor, bias: Tensor | None, p: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_bias = _fake_backward(grad, bias, p, seed)
    if not grad.numel():
        return grad_x, grad_bias.zero_()
    d = as_rows(grad)
    rows, width = d.shape
    launch = BACKWARD.at(width, d)
    columns = triton.cdiv(width, launch.blocks["BLOCK"])
    blocks = triton.cdiv(rows, launch.blocks["ROWS"])
    programs = num_programs(blocks * columns, launch.num_warps, d.device)
    programs = min(triton.cdiv(programs, columns), blocks)
    sums = d.new_empty((programs, width) if bias is not None else 0, dtype=torch.float32)
    constants = {"HAS_BIAS": bias is not None}
    sizes = d.stride(0), rows, width, *reference.dropping(p)
    BACKWARD((columns, programs), width, d, d, grad_x, sums, seed, *sizes, **constants)
    if bias is not None:
        grad_bias = sums.sum(0).to(bias.dtype)
    return grad_x, grad_bias


def _fake_backward(
    grad: Tensor, bias: Tensor | None, p: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of a bias that is absent is empty: an operator can't answer None."""
    return _like(grad), grad.new_empty(0) if bias is None else _like(bias)


_residual = Operator("bias_dropout_residual", _run, lambda x, bias, residual, p, seed: _like(x))
_residual_backward = Operator("bias_dropout_residual_backward", _run_backward, _fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.p, seed = inputs
    ctx.save_for_backward(bias, seed)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    bias, seed = ctx.saved_tensors
    if reference.dropping(ctx.p).threshold == 0:
        # The gradient of x is the result's own; only the bias's has to be computed.
        summed = None if bias is None else grad.sum_to_size(bias.shape).to(bias.dtype)
        return grad, summed, grad, None, None
    grad_x, grad_bias = _residual_backward(grad, bias, ctx.p, seed)
    return grad_x, None if bias is None else grad_bias, grad, None, None


bias_dropout_residual = Differentiable(_residual, _save, _gradient)
