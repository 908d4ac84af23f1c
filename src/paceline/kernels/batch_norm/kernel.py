"""Batch normalisation with residual and ReLU: launches, and the operators that torch sees."""

from typing import Any

import torch
import triton
from torch import Tensor

from paceline.kernels.batch_norm import passes
from paceline.kernels.launch import Kernel, Launch, next_power_of_2
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.partials import num_programs

_TILE = 4096
_MOST_CHANNELS = 128
_PARTS = 32
"""Stretches whose sums a program reads at once."""


def _rule(channels: int) -> Launch:
    """4096 values a block, 16 a thread; of 128 channels or all, so that rows are cache lines."""
    block = min(max(next_power_of_2(channels), 8), _MOST_CHANNELS)
    height = min(_TILE // block, 256)
    return Launch({"ROWS": height, "BLOCK": block, "STAGES": 3}, num_warps=8)


def _rule_with_parts(channels: int) -> Launch:
    """Likewise, and half as many rows: there are more values of a channel to keep."""
    launch = _rule(channels)
    height = max(launch.blocks["ROWS"] // 2, 1)
    return Launch({**launch.blocks, "ROWS": height, "PARTS": _PARTS}, num_warps=8)


def _others(channels: int) -> list[Launch]:
    return [
        Launch({"ROWS": tile // block, "BLOCK": block, "STAGES": stages}, warps)
        for block in (32, 64, 128, 256)
        for tile in (2048, 4096, 8192)
        for warps in (4, 8, 16)
        for stages in (1, 3, 5)
        if block < 2 * channels and 256 <= tile // warps <= 1024
    ]


def _others_with_parts(channels: int) -> list[Launch]:
    return [each._replace(blocks={**each.blocks, "PARTS": _PARTS}) for each in _others(channels)]


_SIZES = (64, 128)
_DTYPES = ("bf16", "fp32")
_SIZES_TAKEN = "rows channels stretch: i32"
_VARIANTS = tuple(
    {"HAS_RESIDUAL": residual, "RELU": relu} for residual in (False, True) for relu in (False, True)
)
STATISTICS = Kernel(
    "batch_norm.statistics", passes.statistics,
    "x: *T; means squares: *fp32; " + _SIZES_TAKEN,
    _rule, _SIZES, others=_others, dtypes=_DTYPES,
)  # fmt: skip
APPLY = Kernel(
    "batch_norm.apply", passes.apply,
    "x residual out: *T; weight bias means squares batch_mean batch_variance scales: *fp32; "
    "bits: *u8; eps: fp32; " + _SIZES_TAKEN,
    _rule_with_parts, _SIZES, _VARIANTS, _others_with_parts, _DTYPES,
)  # fmt: skip
SUMS = Kernel(
    "batch_norm.sums", passes.sums,
    "grad x: *T; batch_mean scales grad_sums product_sums: *fp32; bits: *u8; " + _SIZES_TAKEN,
    _rule, _SIZES, ({"RELU": False}, {"RELU": True}), _others, _DTYPES,
)  # fmt: skip
GRADIENTS = Kernel(
    "batch_norm.gradients", passes.gradients,
    "grad x grad_x grad_residual: *T; weight batch_mean scales grad_sums product_sums grad_weight "
    "grad_bias: *fp32; bits: *u8; " + _SIZES_TAKEN,
    _rule_with_parts, _SIZES, _VARIANTS, _others_with_parts, _DTYPES,
)  # fmt: skip
KERNELS = (STATISTICS, APPLY, SUMS, GRADIENTS)


def _stretches(kernel: Kernel, x: Tensor) -> tuple[int, int]:
    """How many stretches of rows the first launch of a direction takes, and how long each is."""
    rows, channels = _sizes(x)
    launch = kernel.at(channels, x)
    columns = triton.cdiv(channels, launch.blocks["BLOCK"])
    height = launch.blocks["ROWS"]
    blocks = triton.cdiv(rows, height)
    programs = max(num_programs(blocks * columns, launch.num_warps, x.device) // columns, 1)
    stretch = triton.cdiv(blocks, min(programs, blocks)) * height
    return triton.cdiv(rows, stretch), stretch


def _grid(channels: int, num_stretches: int) -> Any:
    return lambda blocks: (triton.cdiv(channels, blocks["BLOCK"]), num_stretches)


def _sizes(x: Tensor) -> tuple[int, int]:
    """Rows and channels."""
    return x.numel() // x.shape[1], x.shape[1]


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _floats(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = _results(x, relu)
    out, bits, *statistics = results
    ours = _channels_last(x)
    other = ours if residual is None else _channels_last(residual)
    rows, channels = _sizes(x)
    number, stretch = _stretches(STATISTICS, ours)
    means, squares = _floats(x, number, channels), _floats(x, number, channels)
    grid, sizes = _grid(channels, number), (rows, channels, stretch)
    STATISTICS(grid, channels, ours, ours, means, squares, *sizes)
    tensors = ours, other, weight.contiguous(), bias.contiguous(), means, squares, out, bits
    constants = {"HAS_RESIDUAL": residual is not None, "RELU": relu}
    APPLY(grid, channels, ours, *tensors, *statistics, *sizes, eps, **constants)
    return results


def _results(x: Tensor, relu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Result, bits, and the channels' mean, variance and scale."""
    rows, channels = _sizes(x)
    bits = x.new_empty((rows if relu else 0, (channels + 7) // 8), dtype=torch.uint8)
    return _like(x), bits, *(_floats(x, channels) for _ in range(3))  # type: ignore[return-value]


def _run_backward(
    grad: Tensor,
    x: Tensor,
    bits: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    has_residual: bool,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _gradients(x, weight, has_residual and relu)
    d, ours = _channels_last(grad), _channels_last(x)
    rows, channels = _sizes(x)
    number, stretch = _stretches(SUMS, ours)
    sums = _floats(x, number, channels), _floats(x, number, channels)
    grid, sizes = _grid(channels, number), (rows, channels, stretch)
    SUMS(grid, channels, ours, d, ours, bits, mean, scale, *sums, *sizes, RELU=relu)
    tensors = d, ours, bits, weight.contiguous(), mean, scale, *sums, *results
    constants = {"HAS_RESIDUAL": has_residual, "RELU": relu}
    GRADIENTS(grid, channels, ours, *tensors, *sizes, **constants)
    return results


def _gradients(
    x: Tensor, weight: Tensor, residual_has_own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x, the residual, weight and bias; without ReLU the residual's is the result's."""
    grad_residual = _like(x) if residual_has_own else x.new_empty(0)
    weights = (torch.empty_like(weight, memory_format=torch.contiguous_format) for _ in range(2))
    return _like(x), grad_residual, *weights  # type: ignore[return-value]


_forward = Operator(
    "batch_norm", _run, lambda x, residual, weight, bias, eps, relu: _results(x, relu)
)
_backward = Operator(
    "batch_norm_backward",
    _run_backward,
    lambda grad, x, bits, weight, mean, scale, has_residual, relu: _gradients(
        x, weight, has_residual and relu
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, _, ctx.relu = inputs
    _, bits, mean, variance, scale = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(bits, mean, variance, scale)
    ctx.save_for_backward(x, bits, weight, mean, scale)


def _gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad_x, own, grad_weight, grad_bias = _backward(
        grad, *ctx.saved_tensors, ctx.has_residual, ctx.relu
    )
    grad_residual = (own if ctx.relu else grad) if ctx.has_residual else None
    return grad_x, grad_residual, grad_weight, grad_bias, None, None


batch_norm = Differentiable(_forward, _save, _gradient)
