"""Normalisation of rows that fit a program's registers, in Triton.

A program holds a block of whole rows: many narrow ones (queries of a head), or one wide one. So
memory is read once, and what depends on a row's sums follows at once.
"""

# Triton's functions are no Python: types of their arguments are Triton's own.
# mypy: allow-untyped-defs, no-check-untyped-defs

import triton
import triton.language as tl


@triton.jit
def forward(
    x, residual, weight, out, summed, scales,
    x_stride, residual_stride, rows, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows; keep what each one is multiplied by."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        add = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        stored = (value + add.to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row * width + column, stored, mask=inside)
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / width + eps)
    tl.store(scales + row, scale, mask=row < rows)
    result = value * scale
    if HAS_WEIGHT:
        result *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, grad_sum, x, weight, scales, grad_x, weight_sums,
    grad_stride, grad_sum_stride, x_stride, rows, width,
    HAS_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Walk over blocks of ROWS rows, a grid's length apart.

    Written are the gradient of x, and this program's sums of the gradient of the weight.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < width
    weights = tl.zeros((ROWS, BLOCK), tl.float32)
    share = 1.0 / width
    blocks = tl.cdiv(rows, ROWS)
    if HAS_WEIGHT and STAGES > 1:
        # What a loop that fetches ahead loads passes by the nearest cache: it must load this once.
        factors = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    for block in tl.range(program, blocks, tl.num_programs(0), num_stages=STAGES):
        row = (tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & in_row
        grads, values = grad + row * grad_stride + column, x + row * x_stride + column
        d = tl.load(grads, mask=inside, other=0.0).to(tl.float32)
        hat = tl.load(values, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        hat = hat * scale
        if HAS_WEIGHT:
            weights += d * hat
            if STAGES == 1:
                # From the nearest cache, for every row: to keep it would take registers.
                factors = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
            d *= factors
        along = (tl.sum(d * hat, axis=1) * share)[:, None]
        if AGAIN:
            # What was read a moment ago is near, and didn't have to be kept in registers.
            d = tl.load(grads, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            hat = tl.load(values, mask=inside, other=0.0, eviction_policy="evict_first")
            hat = hat.to(tl.float32) * scale
            if HAS_WEIGHT:
                d *= tl.load(
                    weight + column, mask=in_row, other=0.0, eviction_policy="evict_last"
                ).to(tl.float32)
        change = (d - hat * along) * scale
        if HAS_SUM:
            add = tl.load(grad_sum + row * grad_sum_stride + column, mask=inside, other=0.0)
            change += add.to(tl.float32)
        own = grad_x + row * width + column
        tl.store(own, change.to(grad_x.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * width + tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        tl.store(weight_sums + at, tl.sum(weights, axis=0), mask=tl.arange(0, BLOCK) < width)
