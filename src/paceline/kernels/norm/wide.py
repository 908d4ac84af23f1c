"""Normalisation of rows that are too wide for a program's registers, in Triton.

Forward, a program reads its row twice, and finds it in a cache the second time. Backward takes two
launches, for the sums of weights' gradients are as wide as the row: the first finds the sums along
rows, the second works on columns, a block of them in each program.
"""

# Triton's functions are no Python: types of their arguments are Triton's own.
# mypy: allow-untyped-defs, no-check-untyped-defs

import triton
import triton.language as tl


@triton.jit
def _read(x, residual, summed, start, width, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row; with a residual, of their sum as it is stored."""
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        add = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
        value = (value + add).to(summed.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def forward(
    x,
    residual,
    weight,
    bias,
    out,
    summed,
    stats,
    x_stride,
    residual_stride,
    width,
    eps,
    IS_LAYER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise a row; keep its mean (LayerNorm) and scale."""
    row = tl.program_id(0).to(tl.int64)
    mine, residual_mine = x + row * x_stride, residual + row * residual_stride
    out_mine, summed_mine = out + row * width, summed + row * width
    offsets = tl.arange(0, BLOCK)
    mean, squares = 0.0, 0.0
    for start in range(0, width, BLOCK):
        value = _read(mine, residual_mine, summed, start, width, HAS_RESIDUAL, BLOCK)
        if IS_LAYER:
            # Chan, Golub, LeVeque 1979: squares of two parts about each one's mean, put together.
            count = tl.minimum(width - start, BLOCK).to(tl.float32)
            block_mean = tl.sum(value, axis=0) / count
            value = tl.where(start + offsets < width, value - block_mean, 0.0)
            apart = block_mean - mean
            mean += apart * (count / (start + count))
            squares += apart * apart * (start * (count / (start + count)))
        squares += tl.sum(value * value, axis=0)
    scale = tl.rsqrt(squares / width + eps)
    if IS_LAYER:
        tl.store(stats + row * 2, mean)
        tl.store(stats + row * 2 + 1, scale)
    else:
        tl.store(stats + row, scale)
    for start in range(0, width, BLOCK):
        column = start + offsets
        inside = column < width
        value = _read(mine, residual_mine, summed, start, width, HAS_RESIDUAL, BLOCK)
        if HAS_RESIDUAL:
            tl.store(summed_mine + column, value.to(summed.dtype.element_ty), mask=inside)
        result = (value - mean) * scale
        if HAS_WEIGHT:
            result *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_mine + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normalised(x, stats, row, column, inside, IS_LAYER: tl.constexpr):
    """x's row at columns, normalised, and the row's scale."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if IS_LAYER:
        value -= tl.load(stats + row * 2)
        scale = tl.load(stats + row * 2 + 1)
    else:
        scale = tl.load(stats + row)
    return value * scale, scale


@triton.jit
def row_means(
    grad,
    x,
    weight,
    stats,
    means,
    grad_stride,
    x_stride,
    width,
    IS_LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's means of gradient times normalised x, and (LayerNorm) of the gradient."""
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            d *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        hat, _ = _normalised(x + row * x_stride, stats, row, column, inside, IS_LAYER)
        products += d * hat
        total += d
    tl.store(means + row * 2, tl.sum(products, axis=0) / width)
    if IS_LAYER:
        tl.store(means + row * 2 + 1, tl.sum(total, axis=0) / width)


@triton.jit
def backward(
    grad,
    grad_sum,
    x,
    weight,
    stats,
    means,
    grad_x,
    weight_sums,
    bias_sums,
    grad_stride,
    grad_sum_stride,
    x_stride,
    rows,
    width,
    IS_LAYER: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk down a block of columns, over rows that are a grid's length apart.

    Written are the gradient of x, and this program's sums of the gradients of weight and bias.
    """
    program = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    weights = tl.zeros((BLOCK,), tl.float32)
    biases = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for each in range(program, rows, tl.num_programs(1)):
        row = tl.cast(each, tl.int64)
        d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        hat, scale = _normalised(x + row * x_stride, stats, row, column, inside, IS_LAYER)
        if HAS_BIAS:
            biases += d
        if HAS_WEIGHT:
            weights += d * hat
            d *= scales
        change = d - hat * tl.load(means + row * 2)
        if IS_LAYER:
            change -= tl.load(means + row * 2 + 1)
        change *= scale
        if HAS_SUM:
            add = tl.load(grad_sum + row * grad_sum_stride + column, mask=inside, other=0.0)
            change += add.to(tl.float32)
        own = grad_x + row * width + column
        tl.store(own, change.to(grad_x.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * width + column
    if HAS_WEIGHT:
        tl.store(weight_sums + at, weights, mask=inside)
    if HAS_BIAS:
        tl.store(bias_sums + at, biases, mask=inside)
