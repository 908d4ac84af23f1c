"""Normalisation of rows: which kernel runs on what, and the operators that torch sees.

Rows of up to 16384 values stay in registers (`rows`); backward, in fp32 and for LayerNorm, of up to
8192. Wider ones are read twice from memory (`wide`).
"""

from typing import Any

import torch
import triton
from torch import Tensor

from paceline.kernels import sharding
from paceline.kernels.launch import Kernel, Launch, as_rows, next_power_of_2
from paceline.kernels.norm import rows, wide
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.partials import num_programs

_TILE = 2048
"""Values of a program, where rows are narrower."""
_VALUES_PER_WARP = 512
_MOST_WARPS = 16
_WIDEST = 16384
"""The widest row that stays in registers: forward, and backward of 16 bits a value and one sum."""
_LONG = 8192
"""The widest row of any other kind, backward."""
_BLOCK_OF_WIDE = 4096
_COLUMNS_OF_WIDE = 2048


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


def _layer_backward_rule(width: int) -> Launch:
    """Two sums a column take twice the registers: narrow rows come in smaller blocks."""
    blocks = _backward_rule(width).blocks
    return Launch({**blocks, "ROWS": max(blocks["ROWS"] // 2, 1)}, _rule(width).num_warps)


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


def _wide_rule(width: int) -> Launch:
    return Launch({"BLOCK": _BLOCK_OF_WIDE}, num_warps=8)


def _wide_backward_rule(width: int) -> Launch:
    return Launch({"BLOCK": _COLUMNS_OF_WIDE}, num_warps=4)


def _wide_others(width: int) -> list[Launch]:
    return [Launch({"BLOCK": b}, b // 512) for b in (1024, 2048, 4096, 8192)]


_SIZES = (128, 1024, 2048, 4096, 8192, 16384)
_WIDE_SIZES = (32768,)
_RMS = {"IS_LAYER": False, "HAS_WEIGHT": True, "HAS_BIAS": False}
_LAYER = {"IS_LAYER": True, "HAS_WEIGHT": True, "HAS_BIAS": True}
_FORWARDS = (
    {**_RMS, "HAS_RESIDUAL": False},
    {**_RMS, "HAS_RESIDUAL": True},
    {**_LAYER, "HAS_RESIDUAL": False},
)
_BACKWARDS = ({**_RMS, "HAS_SUM": False}, {**_RMS, "HAS_SUM": True})
_LAYER_BACKWARDS = ({**_LAYER, "HAS_SUM": False},)
_DTYPES = ("bf16", "fp32")
_FORWARD_TYPES = (
    "x residual weight bias out summed: *T; stats: *fp32; x_stride residual_stride: i32; "
)
_BACKWARD_TYPES = "grad grad_sum x weight grad_x: *T; stats weight_sums bias_sums: *fp32; "
_BACKWARD_STRIDES = "grad_stride grad_sum_stride x_stride rows width: i32"
FORWARD = Kernel(
    "norm.forward",
    rows.forward,
    _FORWARD_TYPES + "rows width: i32; eps: fp32",
    _rule,
    _SIZES,
    _FORWARDS,
    _others,
    _DTYPES,
)
BACKWARD = Kernel(
    "norm.backward",
    rows.backward,
    _BACKWARD_TYPES + _BACKWARD_STRIDES,
    _backward_rule,
    _SIZES[:-1],
    _BACKWARDS,
    _backward_others,
    _DTYPES,
)
LONG_BACKWARD = Kernel(
    "norm.long_backward",
    rows.backward,
    _BACKWARD_TYPES + _BACKWARD_STRIDES,
    _backward_rule,
    _SIZES[-1:],
    _BACKWARDS,
    _backward_others,
)
LAYER_BACKWARD = Kernel(
    "norm.layer_backward",
    rows.backward,
    _BACKWARD_TYPES + _BACKWARD_STRIDES,
    _layer_backward_rule,
    _SIZES[:-1],
    _LAYER_BACKWARDS,
    _backward_others,
    _DTYPES,
)
WIDE_FORWARD = Kernel(
    "norm.wide_forward",
    wide.forward,
    _FORWARD_TYPES + "width: i32; eps: fp32",
    _wide_rule,
    _WIDE_SIZES,
    _FORWARDS,
    _wide_others,
    _DTYPES,
)
WIDE_ROW_MEANS = Kernel(
    "norm.wide_row_means",
    wide.row_means,
    "grad x weight: *T; stats means: *fp32; grad_stride x_stride width: i32",
    _wide_rule,
    (16384, 32768),
    tuple({"IS_LAYER": each, "HAS_WEIGHT": True} for each in (False, True)),
    _wide_others,
    _DTYPES,
)
WIDE_BACKWARD = Kernel(
    "norm.wide_backward",
    wide.backward,
    _BACKWARD_TYPES + "means: *fp32; " + _BACKWARD_STRIDES,
    _wide_backward_rule,
    (16384, 32768),
    _BACKWARDS + _LAYER_BACKWARDS,
    _wide_others,
    _DTYPES,
)
KERNELS = (
    FORWARD,
    BACKWARD,
    LONG_BACKWARD,
    LAYER_BACKWARD,
    WIDE_FORWARD,
    WIDE_ROW_MEANS,
    WIDE_BACKWARD,
)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _stats(x: Tensor, is_layer: bool) -> Tensor:
    """Of every row: its mean (LayerNorm), and what it is multiplied by."""
    return x.new_empty((*x.shape[:-1], 2 if is_layer else 1), dtype=torch.float32)


def _normalise(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the sum (the result again, where there is no residual), and the statistics."""
    out, stats = _like(x), _stats(x, is_layer)
    summed = out if residual is None else _like(x)
    if not x.numel():
        return out, summed, stats
    ours = as_rows(x)
    other = ours if residual is None else as_rows(residual)
    height, width = ours.shape
    constants = {
        "IS_LAYER": is_layer,
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
    }
    # Where a tensor is absent the kernel never looks at what stands in its place.
    tensors = ours, other, _or(weight, ours), _or(bias, ours), out, summed, stats
    strides = ours.stride(0), other.stride(0)
    if width <= _WIDEST:
        FORWARD(_row_grid(height), width, ours, *tensors, *strides, height, width, eps, **constants)
    else:
        WIDE_FORWARD((height,), width, ours, *tensors, *strides, width, eps, **constants)
    return out, summed, stats


def _or(given: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if given is None else given.contiguous()


def _row_grid(height: int) -> Any:
    return lambda blocks: (triton.cdiv(height, blocks["ROWS"]),)


def _run_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor]:
    out, _, stats = _normalise(x, None, weight, bias, eps, is_layer)
    return out, stats


def _run_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _normalise(x, residual, weight, None, eps, False)


def _run_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    is_layer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = _fake_backward(
        grad, grad_sum, x, weight, bias, stats, is_layer
    )
    if not x.numel():
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    d, ours = as_rows(grad), as_rows(x)
    other = ours if grad_sum is None else as_rows(grad_sum)
    constants = {
        "IS_LAYER": is_layer,
        "HAS_SUM": grad_sum is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
    }
    tensors = d, other, ours, _or(weight, ours), stats
    sizes = d.stride(0), other.stride(0), ours.stride(0), *ours.shape
    widest = _LONG if is_layer or x.element_size() > 2 else _WIDEST
    is_wide = ours.shape[1] > widest
    run = _backward_of_wide_rows if is_wide else _backward_of_rows
    weight_sums, bias_sums = run(tensors, grad_x, sizes, constants)
    if weight is not None:
        grad_weight = weight_sums.sum(0).to(weight.dtype)
    if bias is not None:
        grad_bias = bias_sums.sum(0).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _backward_of_rows(
    tensors: tuple[Tensor, ...], grad_x: Tensor, sizes: tuple[int, ...], constants: dict[str, bool]
) -> tuple[Tensor, Tensor]:
    """The programs' sums of the gradients of weight and bias."""
    height, width = sizes[-2:]
    kernel = BACKWARD if width <= _LONG else LONG_BACKWARD
    if constants["IS_LAYER"]:
        kernel = LAYER_BACKWARD
    launch = kernel.at(width, grad_x)
    blocks = triton.cdiv(height, launch.blocks["ROWS"])
    programs = num_programs(blocks, launch.num_warps, grad_x.device)
    sums = _sums(programs, tensors, width, constants)
    kernel((programs,), width, grad_x, *tensors, grad_x, *sums, *sizes, **constants)
    return sums


def _backward_of_wide_rows(
    tensors: tuple[Tensor, ...], grad_x: Tensor, sizes: tuple[int, ...], constants: dict[str, bool]
) -> tuple[Tensor, Tensor]:
    """The programs' sums of the gradients of weight and bias."""
    d, _, ours, weight, stats = tensors
    height, width = sizes[-2:]
    means = stats.new_empty(height, 2)
    along = {name: constants[name] for name in ("IS_LAYER", "HAS_WEIGHT")}
    strides = d.stride(0), ours.stride(0)
    WIDE_ROW_MEANS((height,), width, d, d, ours, weight, stats, means, *strides, width, **along)
    launch = WIDE_BACKWARD.at(width, grad_x)
    columns = triton.cdiv(width, launch.blocks["BLOCK"])
    programs = num_programs(height * columns, launch.num_warps, grad_x.device)
    programs = min(triton.cdiv(programs, columns), height)
    sums = _sums(programs, tensors, width, constants)
    WIDE_BACKWARD(
        (columns, programs), width, grad_x, *tensors, means, grad_x, *sums, *sizes, **constants
    )
    return sums


def _sums(
    programs: int, tensors: tuple[Tensor, ...], width: int, constants: dict[str, bool]
) -> tuple[Tensor, Tensor]:
    stats = tensors[-1]
    shapes = ((programs if constants[name] else 0, width) for name in ("HAS_WEIGHT", "HAS_BIAS"))
    weight_sums, bias_sums = (stats.new_empty(shape) for shape in shapes)
    return weight_sums, bias_sums


def _fake_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor]:
    return _like(x), _stats(x, is_layer)


def _fake_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(x), _stats(x, False)


def _fake_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    is_layer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what is absent are empty: an operator can't answer None."""
    grads = (x.new_empty(0) if each is None else _like(each) for each in (weight, bias))
    return _like(x), *grads  # type: ignore[return-value]


_norm = Operator("norm", _run_norm, _fake_norm)
_add_norm = Operator("add_norm", _run_add_norm, _fake_add_norm)
_backward = Operator("norm_backward", _run_backward, _fake_backward)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.is_layer = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _norm_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias, stats = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = _backward(grad, None, x, weight, bias, stats, ctx.is_layer)
    return grad_x, _if(weight, grad_weight), _if(bias, grad_bias), None, None


def _if(given: Tensor | None, grad: Tensor) -> Tensor | None:
    return None if given is None else grad


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, summed, stats = output
    ctx.mark_non_differentiable(stats)
    # Nobody reads the last layer's sum: it must not cost a pass over zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(summed, inputs[2], stats)


def _add_norm_gradient(
    ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    summed, weight, stats = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None
    grad_x, grad_weight, _ = _backward(grad, grad_sum, summed, weight, None, stats, False)
    return grad_x, grad_x, _if(weight, grad_weight), None


norm = Differentiable(_norm, _save_norm, _norm_gradient)
add_norm = Differentiable(_add_norm, _save_add_norm, _add_norm_gradient)

sharding.by_rows(_norm, "rows whole whole", "rows rows")
sharding.by_rows(_add_norm, "rows rows whole", "rows rows rows")
sharding.by_rows(_backward, "rows rows rows whole whole rows", "rows sum sum")
