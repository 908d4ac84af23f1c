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
    out,
    summed,
    scales,
    x_stride,
    residual_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise a row; keep what it is multiplied by."""
    row = tl.program_id(0).to(tl.int64)
    mine, residual_mine = x + row * x_stride, residual + row * residual_stride
    out_mine, summed_mine = out + row * width, summed + row * width
    offsets = tl.arange(0, BLOCK)
    squares = 0.0
    for start in range(0, width, BLOCK):
        value = _read(mine, residual_mine, summed, start, width, HAS_RESIDUAL, BLOCK)
        squares += tl.sum(value * value, axis=0)
    scale = tl.rsqrt(squares / width + eps)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        column = start + offsets
        inside = column < width
        value = _read(mine, residual_mine, summed, start, width, HAS_RESIDUAL, BLOCK)
        if HAS_RESIDUAL:
            tl.store(summed_mine + column, value.to(summed.dtype.element_ty), mask=inside)
        result = value * scale
        if HAS_WEIGHT:
            result *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_mine + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_means(
    grad,
    x,
    weight,
    scales,
    means,
    grad_stride,
    x_stride,
    width,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's mean of the gradient times normalised x."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            d *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        products += d * (value * scale)
    tl.store(means + row, tl.sum(products, axis=0) / width)


@triton.jit
def backward(
    grad,
    grad_sum,
    x,
    weight,
    scales,
    means,
    grad_x,
    weight_sums,
    grad_stride,
    grad_sum_stride,
    x_stride,
    rows,
    width,
    HAS_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk down a block of columns, over rows that are a grid's length apart.

    Written are the gradient of x, and this program's sums of the gradient of the weight.
    """
    program = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    weights = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for each in range(program, rows, tl.num_programs(1)):
        row = tl.cast(each, tl.int64)
        d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        hat = value * scale
        if HAS_WEIGHT:
            weights += d * hat
            d *= factors
        change = (d - hat * tl.load(means + row)) * scale
        if HAS_SUM:
            add = tl.load(grad_sum + row * grad_sum_stride + column, mask=inside, other=0.0)
            change += add.to(tl.float32)
        own = grad_x + row * width + column
        tl.store(own, change.to(grad_x.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * width + column
    if HAS_WEIGHT:
        tl.store(weight_sums + at, weights, mask=inside)
