"""Activations of feed-forward layers, in Triton.

Tensors are seen as rows; a program works on one block of one row, so rows may be strided (gate and
up are often halves of one product) and a load is coalesced. Nothing is reused, so blocks only have
to be large enough to keep loads in flight.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import sharding
from paceline.kernels.launch import Kernel, Launch, as_rows, next_power_of_2
from paceline.kernels.operator import Differentiable, Operator

_WIDEST = 4096


@triton.jit
def _gelu_slope(x):
    """The factor k of gelu(x) = x * sigmoid(k(x)), the tanh form, and k's derivative."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x), 1.5957691216057308 * (
        1 + 3 * 0.044715 * x * x
    )


@triton.jit
def _gated_forward(
    gate, up, out, gate_stride, up_stride, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * gate_stride + columns, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside).to(tl.float32)
    exponent = g
    if IS_GELU:
        exponent, _ = _gelu_slope(g)
    result = g * tl.sigmoid(exponent) * u
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    grad_stride,
    gate_stride,
    up_stride,
    width,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    d = tl.load(grad + row * grad_stride + columns, mask=inside).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside).to(tl.float32)
    exponent, slope = g, tl.full((BLOCK,), 1.0, tl.float32)
    if IS_GELU:
        exponent, slope = _gelu_slope(g)
    share = tl.sigmoid(exponent)
    # d(g * s(e(g))) = s + g * e' * s * (1 - s)
    change = d * u * (share + g * slope * share * (1 - share))
    own = row * width + columns
    tl.store(grad_gate + own, change.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + own, (d * g * share).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _relu(x):
    """Zero below zero; a maximum would lose NaN on a GPU."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _squared_relu_forward(x, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    value = _relu(tl.load(x + row * stride + columns, mask=inside).to(tl.float32))
    tl.store(out + row * width + columns, (value * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _squared_relu_backward(grad, x, grad_x, grad_stride, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    d = tl.load(grad + row * grad_stride + columns, mask=inside).to(tl.float32)
    value = _relu(tl.load(x + row * stride + columns, mask=inside).to(tl.float32))
    change = 2.0 * d * value
    tl.store(grad_x + row * width + columns, change.to(grad_x.dtype.element_ty), mask=inside)


def _rule(width: int) -> Launch:
    """Blocks of at most 4096 values, 512 for a warp: 16 values of each thread are in flight."""
    block = min(next_power_of_2(width), _WIDEST)
    return Launch({"BLOCK": block}, num_warps=min(max(block // 512, 1), 8))


def _others(width: int) -> list[Launch]:
    blocks = [block for block in (1024, 2048, 4096, 8192) if block < 2 * width]
    return [Launch({"BLOCK": block}, warps) for block in blocks for warps in (2, 4, 8, 16)]


_SIZES = (1024, 4096, 14336)
_ACTIVATIONS = ({"IS_GELU": False}, {"IS_GELU": True})
GATED_FORWARD = Kernel(
    "activations.gated_forward",
    _gated_forward,
    "gate up out: *T; gate_stride up_stride width: i32",
    _rule,
    _SIZES,
    _ACTIVATIONS,
    _others,
)
GATED_BACKWARD = Kernel(
    "activations.gated_backward",
    _gated_backward,
    "grad gate up grad_gate grad_up: *T; grad_stride gate_stride up_stride width: i32",
    _rule,
    _SIZES,
    _ACTIVATIONS,
    _others,
)
SQUARED_RELU_FORWARD = Kernel(
    "activations.squared_relu_forward",
    _squared_relu_forward,
    "x out: *T; stride width: i32",
    _rule,
    _SIZES,
    others=_others,
)
SQUARED_RELU_BACKWARD = Kernel(
    "activations.squared_relu_backward",
    _squared_relu_backward,
    "grad x grad_x: *T; grad_stride stride width: i32",
    _rule,
    _SIZES,
    others=_others,
)
KERNELS = (GATED_FORWARD, GATED_BACKWARD, SQUARED_RELU_FORWARD, SQUARED_RELU_BACKWARD)


def _grid(x: Tensor) -> Any:
    rows, width = x.shape
    return lambda blocks: (rows, triton.cdiv(width, blocks["BLOCK"]))


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = _like(gate)
    if out.numel():
        g, u = as_rows(gate), as_rows(up)
        arguments = g, u, out, g.stride(0), u.stride(0), g.shape[1]
        GATED_FORWARD(_grid(g), g.shape[1], g, *arguments, IS_GELU=activation == "gelu")
    return out


def _run_gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = _like(gate), _like(up)
    if grad.numel():
        d, g, u = as_rows(grad), as_rows(gate), as_rows(up)
        strides = d.stride(0), g.stride(0), u.stride(0)
        arguments = d, g, u, grad_gate, grad_up, *strides, g.shape[1]
        GATED_BACKWARD(_grid(g), g.shape[1], g, *arguments, IS_GELU=activation == "gelu")
    return grad_gate, grad_up


def _run_squared_relu(x: Tensor) -> Tensor:
    out = _like(x)
    if out.numel():
        rows = as_rows(x)
        arguments = rows, out, rows.stride(0), rows.shape[1]
        SQUARED_RELU_FORWARD(_grid(rows), rows.shape[1], rows, *arguments)
    return out


def _run_squared_relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad_x = _like(x)
    if grad.numel():
        d, rows = as_rows(grad), as_rows(x)
        arguments = d, rows, grad_x, d.stride(0), rows.stride(0), rows.shape[1]
        SQUARED_RELU_BACKWARD(_grid(rows), rows.shape[1], rows, *arguments)
    return grad_x


_forward = Operator("gated", _run_gated, lambda gate, up, activation: _like(gate))
_backward = Operator(
    "gated_backward",
    _run_gated_backward,
    lambda grad, gate, up, activation: (_like(gate), _like(up)),
)


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gated_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.activation), None


gated = Differentiable(_forward, _save_gated, _gated_gradient)

_squared = Operator("squared_relu", _run_squared_relu, _like)
_squared_backward = Operator(
    "squared_relu_backward", _run_squared_relu_backward, lambda grad, x: _like(x)
)


def _save_squared(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _squared_gradient(ctx: Any, grad: Tensor) -> Tensor:
    return _squared_backward(grad, *ctx.saved_tensors)


squared_relu = Differentiable(_squared, _save_squared, _squared_gradient)

sharding.by_rows(_forward, "rows rows", "rows", num_whole_dims=0)
sharding.by_rows(_backward, "rows rows rows", "rows rows", num_whole_dims=0)
sharding.by_rows(_squared, "rows", "rows", num_whole_dims=0)
sharding.by_rows(_squared_backward, "rows rows", "rows", num_whole_dims=0)
