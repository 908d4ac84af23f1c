"""The activation of feed-forward layers, in Triton.

Tensors are seen as rows; a program works on one block of one row, so rows may be strided (gate and
up are often halves of one product) and a load is coalesced. Nothing is reused, so blocks only have
to be large enough to keep loads in flight.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import (
    Kernel,
    as_rows,
    like,
    other_row_launches,
    row_grid,
    row_rule,
)
from paceline.kernels.operator import Differentiable, Operator


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
    grad, gate, up, grad_gate, grad_up,
    grad_stride, gate_stride, up_stride, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
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


_SIZES = (1024, 4096, 14336)
GATED_FORWARD = Kernel(
    "activations.gated_forward", _gated_forward,
    "gate up out: *T; gate_stride up_stride width: i32",
    row_rule, _SIZES, others=other_row_launches,
)  # fmt: skip
GATED_BACKWARD = Kernel(
    "activations.gated_backward", _gated_backward,
    "grad gate up grad_gate grad_up: *T; grad_stride gate_stride up_stride width: i32",
    row_rule, _SIZES, others=other_row_launches,
)  # fmt: skip
KERNELS = (GATED_FORWARD, GATED_BACKWARD)


def _run_gated(gate: Tensor, up: Tensor) -> Tensor:
    out = like(gate)
    if out.numel():
        g, u = as_rows(gate), as_rows(up)
        arguments = g, u, out, g.stride(0), u.stride(0), g.shape[1]
        GATED_FORWARD(row_grid(g), g.shape[1], g, *arguments)
    return out


def _run_gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = like(gate), like(up)
    if grad.numel():
        d, g, u = as_rows(grad), as_rows(gate), as_rows(up)
        strides = d.stride(0), g.stride(0), u.stride(0)
        arguments = d, g, u, grad_gate, grad_up, *strides, g.shape[1]
        GATED_BACKWARD(row_grid(g), g.shape[1], g, *arguments)
    return grad_gate, grad_up


_forward = Operator("gated", _run_gated, lambda gate, up: like(gate))
_backward = Operator(
    "gated_backward", _run_gated_backward, lambda grad, gate, up: (like(gate), like(up))
)


def _gated_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(grad, *ctx.saved_tensors)


gated = Differentiable(_forward, None, _gated_gradient)
