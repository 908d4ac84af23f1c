"""Products with an epilogue, as operators: what is launched, what is kept, the gradients."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from paceline.kernels import switch
from paceline.kernels.launch import Kernel
from paceline.kernels.matmul.kernel import (
    BACKWARD_BY_OUTPUT,
    BACKWARD_DESCRIBED,
    BACKWARD_FP32,
    BACKWARD_POINTERS,
    FORWARD_DESCRIBED,
    FORWARD_FP32,
    FORWARD_POINTERS,
    SLOPE,
)
from paceline.kernels.operator import Differentiable, Operator

BY_OUTPUT = ("relu", "squared_relu")
"""Activations whose derivative follows from what comes out."""
_DESCRIBED_ALIGNMENT = 16
_INTERPRETER_PROCESSORS = 2
_SLOPE_PROGRAMS = 1056
"""Eight for each processor of an H200."""


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """See the package."""
    asking = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
    saves = (
        bool(asking)
        and torch.is_grad_enabled()
        and activation != "none"
        and not _is_output_enough(activation, residual is not None)
    )
    return _linear_act(x, weight, bias, residual, activation, saves)[0]


def grad_linear_act(
    grad: Tensor, weight: Tensor, preact: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """See the package."""
    change, sums, _ = _grad_act(grad, weight, preact, activation, False, False)
    return change, sums


def feed_forward(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    activation: str,
) -> Tensor:
    """See the package."""
    return _feed_forward(x, weight_in, weight_out, bias_in, bias_out, activation)[0]


def described(*tensors: Tensor) -> bool:
    """Whether the kernels for TMA can run: on Hopper or later, rows of 16 bytes or multiples."""
    first = tensors[0]
    if first.is_cuda:
        if first.dtype == torch.float32:  # no tensor cores: its tiles are small
            return False
        major, minor = torch.cuda.get_device_capability(first.device)
        if 10 * major + minor < FORWARD_DESCRIBED.least_capability:
            return False
    return all(
        each.stride(-1) == 1
        and all(extent > 0 for extent in each.shape)
        and each.data_ptr() % _DESCRIBED_ALIGNMENT == 0
        and each.stride(-2) * each.itemsize % _DESCRIBED_ALIGNMENT == 0
        and each.stride(-2) >= each.shape[-1]
        for each in tensors
    )


def allow_descriptors() -> None:
    """Give Triton memory for descriptors made on the device; asked anew in each thread."""
    triton.set_allocator(_memory)


@lru_cache
def processors(device: torch.device) -> int:
    """How many programs a launch has that goes through all tiles itself."""
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def slope(grad: Tensor, kept: Tensor, activation: str, kept_output: bool) -> tuple[Tensor, Tensor]:
    """The gradient (rows, columns) over an activation, and its sum over rows in fp32.

    Args:
        grad: (rows, width), of any row stride.
        kept: (rows, columns), contiguous; what the activation was applied to, or its output.
        activation: its name.
        kept_output: whether `kept` is the output.
    """
    rows, width = grad.shape
    out = torch.empty_like(kept)
    if not out.numel():
        return out, grad.new_zeros(kept.shape[1], dtype=torch.float32)
    blocks = SLOPE.at(width, grad).blocks
    num_columns = triton.cdiv(width, blocks["BLOCK_N"])
    num_rows = min(triton.cdiv(rows, blocks["BLOCK_M"]), max(_SLOPE_PROGRAMS // num_columns, 1))
    if not grad.is_cuda:
        num_rows = min(num_rows, _INTERPRETER_PROCESSORS)
    sums = grad.new_empty(num_rows, kept.shape[1], dtype=torch.float32)
    grad = _aligned(grad)
    arguments = grad, kept, out, sums, grad.stride(0), rows, width
    flags = {"ACTIVATION": activation, "KEPT_OUTPUT": kept_output}
    SLOPE((num_columns, num_rows), width, grad, *arguments, **flags)
    return out, sums.sum(0)


def _is_output_enough(activation: str, has_residual: bool) -> bool:
    """Whether the derivative can be had from what comes out."""
    return activation in BY_OUTPUT and not has_residual


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _flat(x: Tensor) -> Tensor:
    """(..., width) as (rows, width), also where that is no values."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _aligned(matrix: Tensor) -> Tensor:
    """A matrix whose neighbours in a row lie side by side; copies if it must."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _pick(with_tma: Kernel, pointers: Kernel, fp32: Kernel, operands: list[Tensor]) -> Kernel:
    if operands[0].shape[1] and described(*operands):
        allow_descriptors()
        return with_tma
    return fp32 if operands[0].is_cuda and operands[0].dtype == torch.float32 else pointers


def _launch(kernel: Kernel, x: Tensor, m: int, n: int, arguments: Any, flags: Any) -> None:
    """A program for each tile, or for each processor where it goes through the tiles itself."""
    blocks = kernel.at(m * n, x).blocks
    tiles = triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"])
    if kernel.least_capability == FORWARD_DESCRIBED.least_capability:
        tiles = min(tiles, processors(x.device))
    kernel((tiles,), m * n, x, *arguments, **flags, WIDEN=switch.is_interpreted())


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    saves: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and what the activation was applied to (rows, columns) where that is saved."""
    n, k = weight.shape
    width = n // 2 if activation == "swiglu" else n
    out, preact = _results(x, weight, bias, residual, activation, saves)
    if not out.numel():
        return out, preact
    rows, matrix = _aligned(_flat(x)), _aligned(weight)
    m = rows.shape[0]
    added = None if residual is None else _aligned(_flat(residual))
    used = [rows, matrix, out.view(m, width), *([preact] if saves else [])]
    used += [] if added is None else [added]
    kernel = _pick(FORWARD_DESCRIBED, FORWARD_POINTERS, FORWARD_FP32, used)
    arguments = (
        *(rows, matrix, out if bias is None else bias.contiguous()),
        *(out if added is None else added, out, preact if saves else out),
        *(rows.stride(0), matrix.stride(0), 0 if added is None else added.stride(0), m, n, k),
    )
    flags = {
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": added is not None,
        "SAVES": saves,
    }
    _launch(kernel, x, m, n, arguments, flags)
    return out, preact


def _results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    saves: bool,
) -> tuple[Tensor, Tensor]:
    columns = weight.shape[0]
    width = columns // 2 if activation == "swiglu" else columns
    rows = math.prod(x.shape[:-1]) if saves else 0
    return x.new_empty(*x.shape[:-1], width), x.new_empty(rows, columns)


def _run_grad_act(
    grad: Tensor,
    weight: Tensor,
    kept: Tensor,
    activation: str,
    kept_output: bool,
    wants_postact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient before the activation, its sum over rows, and the activation again."""
    k, n = weight.shape
    change, sums, postact = _grad_results(
        grad, weight, kept, activation, kept_output, wants_postact
    )
    if not change.numel():
        return change, sums.zero_(), postact
    kept = kept.contiguous()
    rows, matrix = _aligned(_flat(grad)), _aligned(weight)
    m, width = rows.shape[0], kept.shape[-1]
    used = [rows, matrix, kept.view(m, width), change.view(m, width)] + [postact] * wants_postact
    with_tma = BACKWARD_BY_OUTPUT if kept_output else BACKWARD_DESCRIBED
    kernel = _pick(with_tma, BACKWARD_POINTERS, BACKWARD_FP32, used)
    num_partial = triton.cdiv(m, kernel.at(m * n, grad).blocks["BLOCK_M"])
    partial = sums.new_empty(num_partial, width)
    arguments = (
        *(rows, matrix, kept, change, postact if wants_postact else change, partial),
        *(rows.stride(0), matrix.stride(0), m, n, k),
    )
    flags = {
        "ACTIVATION": activation,
        "KEPT_OUTPUT": kept_output,
        "WANTS_POSTACT": wants_postact,
    }
    _launch(kernel, grad, m, n, arguments, flags)
    return change, partial.sum(0), postact


def _grad_results(
    grad: Tensor,
    weight: Tensor,
    kept: Tensor,
    activation: str,
    kept_output: bool,
    wants_postact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    change = torch.empty_like(kept, memory_format=torch.contiguous_format)
    rows = math.prod(kept.shape[:-1]) if wants_postact else 0
    sums = kept.new_empty(kept.shape[-1], dtype=torch.float32)
    return change, sums, kept.new_empty(rows, weight.shape[1])


def _run_slope(
    grad: Tensor, kept: Tensor, activation: str, kept_output: bool
) -> tuple[Tensor, Tensor]:
    return slope(_flat(grad), kept, activation, kept_output)


_forward = Operator("linear_act", _run, _results)
_grad_act = Operator("grad_linear_act", _run_grad_act, _grad_results)
over_activation = Operator(
    "over_activation",
    _run_slope,
    lambda grad, kept, activation, kept_output: (
        torch.empty_like(kept),
        kept.new_empty(kept.shape[1], dtype=torch.float32),
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.activation, saves = inputs
    out, preact = output
    ctx.mark_non_differentiable(preact)
    ctx.by_output = not saves
    ctx.bias_type = None if bias is None else bias.dtype
    kept = preact if saves else out
    ctx.save_for_backward(x, weight, kept if ctx.activation != "none" else x.new_empty(0))


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, kept = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad[:4]
    rows, sums = _flat(x), None
    change = _flat(grad)
    if ctx.activation != "none" and (wants_x or wants_weight or wants_bias):
        kept = kept.reshape(rows.shape[0], weight.shape[0])
        change, sums = over_activation(change, kept, ctx.activation, ctx.by_output)
    elif wants_bias:
        sums = change.sum(0)
    return (
        (change @ weight).view_as(x) if wants_x else None,
        change.mT @ rows if wants_weight else None,
        sums.to(ctx.bias_type) if wants_bias and sums is not None else None,
        grad if wants_residual else None,
        None,
        None,
    )


_linear_act = Differentiable(_forward, _save, _gradient)


def _run_feed_forward(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """The result, and what its gradient needs (..., columns)."""
    by_output = _is_output_enough(activation, False)
    inner, preact = _run(x, weight_in, bias_in, None, activation, not by_output)
    kept = inner if by_output else preact.view(*x.shape[:-1], weight_in.shape[0])
    return linear(inner, weight_out, bias_out), kept


def _fake_feed_forward(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias_in: Tensor | None,
    bias_out: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    outer = x.shape[:-1]
    return x.new_empty(*outer, weight_out.shape[0]), x.new_empty(*outer, weight_in.shape[0])


def _save_feed_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight_in, weight_out, bias_in, bias_out, ctx.activation = inputs
    kept = output[1]
    ctx.mark_non_differentiable(kept)
    ctx.bias_types = [None if bias is None else bias.dtype for bias in (bias_in, bias_out)]
    ctx.save_for_backward(x, weight_in, weight_out, kept)


def _feed_forward_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight_in, weight_out, kept = ctx.saved_tensors
    wants_x, wants_in, wants_out, wants_bias_in, wants_bias_out, _ = ctx.needs_input_grad
    by_output = _is_output_enough(ctx.activation, False)
    rows, grad, kept = _flat(x), _flat(grad), _flat(kept)
    arguments = grad, weight_out, kept, ctx.activation, by_output, wants_out and not by_output
    change, sums, inner = _grad_act(*arguments)
    inner = kept if by_output else inner
    return (
        (change @ weight_in).view_as(x) if wants_x else None,
        change.mT @ rows if wants_in else None,
        grad.mT @ inner if wants_out else None,
        sums.to(ctx.bias_types[0]) if wants_bias_in else None,
        grad.sum(0) if wants_bias_out else None,
        None,
    )


_feed_forward = Differentiable(
    Operator("feed_forward", _run_feed_forward, _fake_feed_forward),
    _save_feed_forward,
    _feed_forward_gradient,
)
