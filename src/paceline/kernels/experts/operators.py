"""Tokens to experts and back, as operators: what is launched, what is kept, the gradients."""

from typing import Any

import torch
import triton
from torch import Tensor

from paceline.kernels import switch
from paceline.kernels.experts.kernel import (
    COLLECT,
    COLLECT_BACKWARD,
    GROUPED,
    GROUPED_WEIGHTS,
    SPREAD,
)
from paceline.kernels.launch import Kernel, as_rows, like, next_power_of_2, row_grid
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.partials import num_processors

_ROW_BYTES = 16
"""What Hopper's copy engine wants rows to be multiples of."""
_LEAST_COUNTS = 32
_MOST_EXPERTS = 1024  # their counts are in the registers of one program


def can_multiply(rows: Tensor, weights: Tensor) -> bool:
    """Whether the grouped products run: on Hopper or later, rows of 16 bytes, 16-bit types."""
    if rows.is_cuda:
        major, minor = torch.cuda.get_device_capability(rows.device)
        if rows.dtype == torch.float32 or 10 * major + minor < GROUPED.least_capability:
            return False
    aligned = all(n * rows.itemsize % _ROW_BYTES == 0 for n in weights.shape[1:])
    return aligned and weights.shape[0] <= _MOST_EXPERTS


def _run_spread(x: Tensor, places: Tensor, copies: int) -> Tensor:
    out = x.new_empty(x.shape[0] * copies, x.shape[1])
    if out.numel():
        rows = as_rows(x)
        arguments = rows, places, out, rows.stride(0), rows.shape[1]
        SPREAD(row_grid(rows), rows.shape[1], rows, *arguments, COPIES=copies)
    return out


def _run_collect(rows: Tensor, places: Tensor, weights: Tensor | None, copies: int) -> Tensor:
    """The sum of each token's copies; weights (tokens, copies) fp32 and contiguous."""
    out = rows.new_empty(rows.shape[0] // copies, rows.shape[1])
    if out.numel():
        lines = as_rows(rows)
        given = lines if weights is None else weights
        arguments = lines, places, given, out, lines.stride(0), lines.shape[1]
        flags = {"HAS_WEIGHTS": weights is not None, "COPIES": copies}
        COLLECT(row_grid(out), lines.shape[1], lines, *arguments, **flags)
    return out


def _run_collect_backward(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    grad_rows = like(rows)
    grad_weights = torch.empty_like(weights)
    if not grad.numel():
        return grad_rows, grad_weights.zero_()
    grad, lines = as_rows(grad), as_rows(rows)
    strides = grad.stride(0), lines.stride(0), lines.shape[1]
    arguments = grad, lines, places, weights, grad_rows, grad_weights, *strides
    flags = {"COPIES": weights.shape[1]}
    COLLECT_BACKWARD((grad.shape[0],), lines.shape[1], lines, *arguments, **flags)
    return grad_rows, grad_weights


def _run_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    _launch_grouped(rows, weights, counts, out, True)
    return out


def _run_rows_gradient(grad: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    out = grad.new_empty(grad.shape[0], weights.shape[2])
    _launch_grouped(grad, weights, counts, out, False)
    return out


def _launch_grouped(
    rows: Tensor, weights: Tensor, counts: Tensor, out: Tensor, transposed: bool
) -> None:
    if not out.numel():
        return
    if not rows.shape[1]:
        raise NotImplementedError("No values were given to sum over.")
    rows, weights = _movable(rows), _movable(weights.contiguous())
    num_experts, *extents = weights.shape
    n, k = extents if transposed else extents[::-1]
    size = rows.shape[0] * n
    arguments = rows, weights, counts, out, rows.stride(0), rows.shape[0], num_experts, n, k
    flags = {"TRANSPOSED": transposed, "EXPERTS": _counts_block(num_experts)}
    _launch_persistent(GROUPED, size, rows, arguments, flags)


def _run_weights_gradient(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    num_experts, n, k = counts.shape[0], grad.shape[1], rows.shape[1]
    out = rows.new_empty(num_experts, n, k)
    if not rows.shape[0]:
        return out.zero_()
    if out.numel():
        left, right = _movable(grad), _movable(rows)
        arguments = (
            *(left, right, counts, out),
            *(left.stride(0), right.stride(0), rows.shape[0], num_experts, n, k),
        )
        flags = {"EXPERTS": _counts_block(num_experts)}
        _launch_persistent(GROUPED_WEIGHTS, num_experts * n * k, rows, arguments, flags)
    return out


def _launch_persistent(kernel: Kernel, size: int, x: Tensor, arguments: Any, flags: Any) -> None:
    """A program for each processor, which goes through many tiles."""
    # Memory for descriptors made on the device: Triton asks anew in each thread.
    triton.set_allocator(_memory)
    kernel((num_processors(x.device),), size, x, *arguments, **flags, WIDEN=switch.is_interpreted())


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _counts_block(num_experts: int) -> int:
    """A whole warp at least has the counts; few experts don't make another kernel."""
    return max(next_power_of_2(num_experts), _LEAST_COUNTS)


def _movable(x: Tensor) -> Tensor:
    """As it is where the copy engine can read it, else a copy: torch aligns what it allocates."""
    row_stride = x.stride(-2)
    is_movable = (
        x.stride(-1) == 1
        and row_stride >= x.shape[-1] > 0
        and x.shape[-2] > 0
        and row_stride * x.itemsize % _ROW_BYTES == 0
        and x.data_ptr() % _ROW_BYTES == 0
    )
    return x if is_movable else x.clone(memory_format=torch.contiguous_format)


_spread = Operator(
    "spread_to_experts",
    _run_spread,
    lambda x, places, copies: x.new_empty(x.shape[0] * copies, x.shape[1]),
)
_collect = Operator(
    "collect_from_experts",
    _run_collect,
    lambda rows, places, weights, copies: rows.new_empty(rows.shape[0] // copies, rows.shape[1]),
)
_collect_backward = Operator(
    "collect_from_experts_backward",
    _run_collect_backward,
    lambda grad, rows, places, weights: (
        like(rows),
        torch.empty_like(weights),
    ),
)
_forward = Operator(
    "grouped_linear",
    _run_linear,
    lambda rows, weights, counts: rows.new_empty(rows.shape[0], weights.shape[1]),
)
_rows_gradient = Operator(
    "grouped_linear_rows",
    _run_rows_gradient,
    lambda grad, weights, counts: grad.new_empty(grad.shape[0], weights.shape[2]),
)
_weights_gradient = Operator(
    "grouped_linear_weights",
    _run_weights_gradient,
    lambda grad, rows, counts: rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1]),
)


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, places, ctx.copies = inputs
    ctx.save_for_backward(places)


def _spread_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _collect(grad, *ctx.saved_tensors, None, ctx.copies), None, None


spread = Differentiable(_spread, _save_spread, _spread_gradient)


def _save_collect(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, places, weights, _ = inputs
    ctx.save_for_backward(rows, places, weights)


def _collect_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
    grad_rows, grad_weights = _collect_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights, None


collect = Differentiable(_collect, _save_collect, _collect_gradient)


def _linear_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, counts = ctx.saved_tensors
    return (
        _rows_gradient(grad, weights, counts) if ctx.needs_input_grad[0] else None,
        _weights_gradient(grad, rows, counts) if ctx.needs_input_grad[1] else None,
        None,
    )


grouped_linear = Differentiable(_forward, None, _linear_gradient)
