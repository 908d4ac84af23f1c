"""Normalisation of rows: how `rows` is launched, and the operators that torch sees."""

from typing import Any

import torch
import triton
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch, as_rows, like, next_power_of_2
from paceline.kernels.norm import rows
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.partials import num_programs

_TILE = 2048
"""Values of a program, where rows are narrower."""
_VALUES_PER_WARP = 512
_MOST_WARPS = 16
_LONG = 8192
"""The widest row that fp32 has; longer ones are of 16 bits."""


def _rule(width: int) -> Launch:
    """A row a program, or as many as make 2048 values; 16 values a thread, or more if it must."""
    block = next_power_of_2(width)
    height = max(_TILE // block, 1) if block >= 16 else 128
    warps = min(max(height * block // _VALUES_PER_WARP, 1), _MOST_WARPS)
    return Launch({"ROWS": height, "BLOCK": block}, num_warps=warps)


def _backward_rule(width: int) -> Launch:
    """As forward, with sums of the weights' gradients to keep.

    Rows of middling width are fetched a row ahead. The widest leave no room in registers for that,
    nor for the row itself: it is read again, from the nearest cache, once its sums are known.
    """
    usual = _rule(width)
    is_wide = width > 4096
    blocks = {**usual.blocks, "STAGES": 2 if 1024 < width <= 4096 else 1, "AGAIN": int(is_wide)}
    return Launch(blocks, 8 if usual.blocks["BLOCK"] == _LONG else usual.num_warps)


def _others(width: int) -> list[Launch]:
    """Other numbers of rows and warps."""
    usual = _rule(width).blocks
    heights = {max(usual["ROWS"] * factor // 4, 1) for factor in (1, 2, 4, 8, 16)}
    return [
        Launch({"ROWS": height, "BLOCK": usual["BLOCK"]}, warps)
        for height in sorted(heights)
        for warps in (1, 2, 4, 8, 16, 32)
        if 128 <= height * usual["BLOCK"] // warps <= 2048
    ]


def _backward_others(width: int) -> list[Launch]:
    ways = ((1, 0), (2, 0), (3, 0), (1, 1))
    return [
        each._replace(blocks={**each.blocks, "STAGES": stages, "AGAIN": again})
        for each in _others(width)
        for stages, again in ways
    ]


_SIZES = (128, 1024, 2048, 4096, 8192, 16384)
_FORWARDS = tuple({"HAS_WEIGHT": True, "HAS_RESIDUAL": each} for each in (False, True))
_BACKWARDS = tuple({"HAS_WEIGHT": True, "HAS_SUM": each} for each in (False, True))
_DTYPES = ("bf16", "fp32")
_BACKWARD_TYPES = (
    "grad grad_sum x weight grad_x: *T; scales weight_sums: *fp32; "
    "grad_stride grad_sum_stride x_stride rows width: i32"
)
FORWARD = Kernel(
    "norm.forward", rows.forward,
    "x residual weight out summed: *T; scales: *fp32; "
    "x_stride residual_stride rows width: i32; eps: fp32",
    _rule, _SIZES, _FORWARDS, _others, _DTYPES,
)  # fmt: skip
BACKWARD = Kernel(
    "norm.backward", rows.backward,
    _BACKWARD_TYPES,
    _backward_rule, _SIZES[:-1], _BACKWARDS, _backward_others, _DTYPES,
)  # fmt: skip
LONG_BACKWARD = Kernel(
    "norm.long_backward", rows.backward,
    _BACKWARD_TYPES,
    _backward_rule, _SIZES[-1:], _BACKWARDS, _backward_others,
)  # fmt: skip
KERNELS = (FORWARD, BACKWARD, LONG_BACKWARD)


def _scales(x: Tensor) -> Tensor:
    """What every row is multiplied by."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the sum (the result again, where there is no residual), and the rows' scales."""
    out, scales = like(x), _scales(x)
    summed = out if residual is None else like(x)
    if not x.numel():
        return out, summed, scales
    ours = as_rows(x)
    other = ours if residual is None else as_rows(residual)
    height, width = ours.shape
    constants = {"HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None}
    # Where a tensor is absent the kernel never looks at what stands in its place.
    tensors = ours, other, _or(weight, ours), out, summed, scales
    arguments = *tensors, ours.stride(0), other.stride(0), height, width, eps

    def grid(blocks: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(height, blocks["ROWS"]),)

    FORWARD(grid, width, ours, *arguments, **constants)
    return out, summed, scales


def _or(given: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if given is None else given.contiguous()


def _run_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out, _, scales = _normalise(x, None, weight, eps)
    return out, scales


def _run_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _normalise(x, residual, weight, eps)


def _run_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _fake_backward(grad, grad_sum, x, weight, scales)
    if not x.numel():
        return grad_x, grad_weight.zero_()
    d, ours = as_rows(grad), as_rows(x)
    other = ours if grad_sum is None else as_rows(grad_sum)
    height, width = ours.shape
    kernel = BACKWARD if width <= _LONG else LONG_BACKWARD
    launch = kernel.at(width, ours)
    programs = num_programs(
        triton.cdiv(height, launch.blocks["ROWS"]), launch.num_warps, ours.device
    )
    # Each program's sums of the gradient of the weight.
    sums = scales.new_empty(0 if weight is None else programs, width)
    tensors = d, other, ours, _or(weight, ours), scales, grad_x, sums
    strides = d.stride(0), other.stride(0), ours.stride(0)
    constants = {"HAS_SUM": grad_sum is not None, "HAS_WEIGHT": weight is not None}
    kernel((programs,), width, ours, *tensors, *strides, height, width, **constants)
    return grad_x, grad_weight if weight is None else sums.sum(0).to(weight.dtype)


def _fake_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of a weight that is absent is empty: an operator can't answer None."""
    return like(x), x.new_empty(0) if weight is None else like(weight)


_norm = Operator("norm", _run_norm, lambda x, weight, eps: (like(x), _scales(x)))
_add_norm = Operator(
    "add_norm", _run_add_norm, lambda x, residual, weight, eps: (like(x), like(x), _scales(x))
)
_backward = Operator("norm_backward", _run_backward, _fake_backward)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _norm_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, scales = ctx.saved_tensors
    grad_x, grad_weight = _backward(grad, None, x, weight, scales)
    return grad_x, None if weight is None else grad_weight, None


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, summed, scales = output
    ctx.mark_non_differentiable(scales)
    # Nobody reads the last layer's sum: it must not cost a pass over zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(summed, inputs[2], scales)


def _add_norm_gradient(
    ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    summed, weight, scales = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None
    grad_x, grad_weight = _backward(grad, grad_sum, summed, weight, scales)
    return grad_x, grad_x, None if weight is None else grad_weight, None


norm = Differentiable(_norm, _save_norm, _norm_gradient)
add_norm = Differentiable(_add_norm, _save_add_norm, _add_norm_gradient)
