"""The activation of feed-forward layers, in Triton.

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
def _gated_forward(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * gate_stride + columns, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside).to(tl.float32)
    result = g * tl.sigmoid(g) * u
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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    d = tl.load(grad + row * grad_stride + columns, mask=inside).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside).to(tl.float32)
    share = tl.sigmoid(g)
    # d(g * s(g)) = s + g * s * (1 - s)
    change = d * u * (share + g * share * (1 - share))
    own = row * width + columns
    tl.store(grad_gate + own, change.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + own, (d * g * share).to(grad_up.dtype.element_ty), mask=inside)


def _rule(width: int) -> Launch:
    """Blocks of at most 4096 values, 512 for a warp: 16 values of each thread are in flight."""
    block = min(next_power_of_2(width), _WIDEST)
    return Launch({"BLOCK": block}, num_warps=min(max(block // 512, 1), 8))


def _others(width: int) -> list[Launch]:
    blocks = [block for block in (1024, 2048, 4096, 8192) if block < 2 * width]
    return [Launch({"BLOCK": block}, warps) for block in blocks for warps in (2, 4, 8, 16)]


_SIZES = (1024, 4096, 14336)
GATED_FORWARD = Kernel(
    "activations.gated_forward",
    _gated_forward,
    "gate up out: *T; gate_stride up_stride width: i32",
    _rule,
    _SIZES,
    others=_others,
)
GATED_BACKWARD = Kernel(
    "activations.gated_backward",
    _gated_backward,
    "grad gate up grad_gate grad_up: *T; grad_stride gate_stride up_stride width: i32",
    _rule,
    _SIZES,
    others=_others,
)
KERNELS = (GATED_FORWARD, GATED_BACKWARD)


def _grid(x: Tensor) -> Any:
    rows, width = x.shape
    return lambda blocks: (rows, triton.cdiv(width, blocks["BLOCK"]))


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run_gated(gate: Tensor, up: Tensor) -> Tensor:
    out = _like(gate)
    if out.numel():
        g, u = as_rows(gate), as_rows(up)
        arguments = g, u, out, g.stride(0), u.stride(0), g.shape[1]
        GATED_FORWARD(_grid(g), g.shape[1], g, *arguments)
    return out


def _run_gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = _like(gate), _like(up)
    if grad.numel():
        d, g, u = as_rows(grad), as_rows(gate), as_rows(up)
        strides = d.stride(0), g.stride(0), u.stride(0)
        arguments = d, g, u, grad_gate, grad_up, *strides, g.shape[1]
        GATED_BACKWARD(_grid(g), g.shape[1], g, *arguments)
    return grad_gate, grad_up


_forward = Operator("gated", _run_gated, lambda gate, up: _like(gate))
_backward = Operator(
    "gated_backward",
    _run_gated_backward,
    lambda grad, gate, up: (_like(gate), _like(up)),
)


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gated_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(grad, *ctx.saved_tensors)


gated = Differentiable(_forward, _save_gated, _gated_gradient)

sharding.by_rows(_forward, "rows rows", "rows", num_whole_dims=0)
sharding.by_rows(_backward, "rows rows rows", "rows rows", num_whole_dims=0)
