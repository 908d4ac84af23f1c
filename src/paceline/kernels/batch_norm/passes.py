"""The four passes of batch normalisation in training, in Triton.

Memory is seen as rows (pixels) of channels. A program has a block of channels and a stretch of
rows, which it walks down in blocks; its threads don't need each other before the end of it. Both
launches of a direction have the same stretches. STAGES - 1 blocks are fetched ahead: what is done
with one is little, against the time that it takes to come.
"""

# Triton's functions are no Python: types of their arguments are Triton's own.
# mypy: allow-untyped-defs, no-check-untyped-defs

import triton
import triton.language as tl


@triton.jit
def statistics(
    x, means, squares,
    rows, channels, stretch,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of each channel of a stretch of rows: the mean, and the sum of squares about it."""
    program = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    place = tl.arange(0, ROWS)[:, None]
    start = program * stretch
    end = tl.minimum(start + stretch, rows)
    # Each place of the block has its own, after Welford: no mean is subtracted from its square.
    mean = tl.zeros((ROWS, BLOCK), tl.float32)
    square = tl.zeros((ROWS, BLOCK), tl.float32)
    count = 0.0
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = first + place
        inside = (row < end) & (column < channels)
        at = row.to(tl.int64) * channels + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        count += 1.0
        apart = tl.where(inside, value - mean, 0.0)
        mean += apart * (1.0 / count)
        square += apart * tl.where(inside, value - mean, 0.0)
    # Chan, Golub, LeVeque 1979, over the places; the last ones may have seen a row less.
    counts = tl.maximum((end - start - place + ROWS - 1) // ROWS, 0).to(tl.float32)
    whole = tl.sum(counts * mean, axis=0) / (end - start)
    apart = mean - whole[None, :]
    total = tl.sum(square + counts * apart * apart, axis=0)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = program * channels + channel
    tl.store(means + own, whole, mask=channel < channels)
    tl.store(squares + own, total, mask=channel < channels)


@triton.jit
def _together(means, squares, rows, channels, stretch, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """All stretches' means and squares put together: mean and variance of a block of channels."""
    num_parts = tl.num_programs(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # About the first stretch's mean, which is near the others': so one sweep is enough.
    about = tl.load(means + channel, mask=channel < channels, other=0.0)
    apart = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        inside = (part < num_parts) & (channel < channels)[None, :]
        at = part * channels + channel[None, :]
        count = tl.minimum(rows - part * stretch, stretch).to(tl.float32)
        away = tl.load(means + at, mask=inside, other=0.0) - about[None, :]
        weighed = tl.where(inside, count * away, 0.0)
        apart += tl.sum(weighed, axis=0)
        square += tl.sum(weighed * away + tl.load(squares + at, mask=inside, other=0.0), axis=0)
    away = apart / rows
    return about + away, tl.maximum(square / rows - away * away, 0.0)


@triton.jit
def apply(
    x, residual, weight, bias, means, squares, out, bits, batch_mean, batch_variance, scales,
    rows, channels, stretch, eps,
    HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalise a stretch, add the residual, cut off below zero, and keep a bit of where not."""
    mean, variance = _together(means, squares, rows, channels, stretch, PARTS, BLOCK)
    scale = tl.rsqrt(variance + eps)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_channel = channel < channels
    program = tl.program_id(1)
    if program == 0:
        tl.store(batch_mean + channel, mean, mask=has_channel)
        # As torch records it: over one less than there are.
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(batch_variance + channel, unbiased, mask=has_channel)
        tl.store(scales + channel, scale, mask=has_channel)
    factor = scale * tl.load(weight + channel, mask=has_channel, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=has_channel, other=0.0).to(tl.float32)
    start = program * stretch
    end = tl.minimum(start + stretch, rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < end) & has_channel[None, :]
        at = row * channels + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * factor[None, :] + shift[None, :]
        if HAS_RESIDUAL:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            is_cut = value <= 0.0  # NaN isn't
            _store_bits(bits, is_cut, row, row < end, channels, ROWS, BLOCK)
            value = tl.where(is_cut, 0.0, value)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_bits(bits, is_cut, row, has_row, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Eight channels a byte; a bit is 1 where the value stayed."""
    eight = tl.reshape(1 - is_cut.to(tl.int32), (ROWS, BLOCK // 8, 8))
    packed = tl.sum(eight << tl.arange(0, 8)[None, None, :], axis=2)
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    num_bytes = tl.cdiv(channels, 8)
    tl.store(bits + row * num_bytes + byte, packed.to(tl.uint8), mask=has_row & (byte < num_bytes))


@triton.jit
def _load_bits(bits, row, has_row, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """1 where the value stayed: (ROWS, BLOCK)."""
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    num_bytes = tl.cdiv(channels, 8)
    packed = tl.load(bits + row * num_bytes + byte, mask=has_row & (byte < num_bytes), other=0).to(
        tl.int32
    )
    eight = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(eight, (ROWS, BLOCK))


@triton.jit
def sums(
    grad, x, bits, batch_mean, scales, grad_sums, product_sums,
    rows, channels, stretch,
    RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a stretch: the sums of the gradient, and of its product with x normalised."""
    program = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_channel = channel < channels
    mean = tl.load(batch_mean + channel, mask=has_channel, other=0.0)
    scale = tl.load(scales + channel, mask=has_channel, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    start = program * stretch
    end = tl.minimum(start + stretch, rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < end) & has_channel[None, :]
        at = row * channels + channel[None, :]
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            stayed = _load_bits(bits, row, row < end, channels, ROWS, BLOCK)
            d = tl.where(stayed > 0, d, 0.0)
        total += d
        products += d * (value - mean[None, :])
    own = program * channels + channel
    tl.store(grad_sums + own, tl.sum(total, axis=0), mask=has_channel)
    tl.store(product_sums + own, tl.sum(products, axis=0) * scale, mask=has_channel)


@triton.jit
def _add_up(parts, channels, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """All stretches' sums of a block of channels."""
    num_parts = tl.num_programs(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        inside = (part < num_parts) & (channel < channels)
        total += tl.load(parts + part * channels + channel, mask=inside, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def gradients(
    grad, x, bits, weight, batch_mean, scales, grad_sums, product_sums, grad_x, grad_residual,
    grad_weight, grad_bias,
    rows, channels, stretch,
    HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write a stretch's gradients of x and of the residual; the first program, the weights'."""
    program = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_channel = channel < channels
    total = _add_up(grad_sums, channels, PARTS, BLOCK)
    products = _add_up(product_sums, channels, PARTS, BLOCK)
    if program == 0:
        tl.store(grad_weight + channel, products.to(grad_weight.dtype.element_ty), mask=has_channel)
        tl.store(grad_bias + channel, total.to(grad_bias.dtype.element_ty), mask=has_channel)
    mean = tl.load(batch_mean + channel, mask=has_channel, other=0.0)
    scale = tl.load(scales + channel, mask=has_channel, other=0.0)
    factor = scale * tl.load(weight + channel, mask=has_channel, other=0.0).to(tl.float32)
    level = total / rows
    slope = products * scale / rows
    start = program * stretch
    end = tl.minimum(start + stretch, rows)
    for first in tl.range(start, end, ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < end) & has_channel[None, :]
        at = row * channels + channel[None, :]
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            stayed = _load_bits(bits, row, row < end, channels, ROWS, BLOCK)
            d = tl.where(stayed > 0, d, 0.0)
            if HAS_RESIDUAL:
                tl.store(grad_residual + at, d.to(grad_residual.dtype.element_ty), mask=inside)
        change = d - level[None, :] - (value - mean[None, :]) * slope[None, :]
        change *= factor[None, :]
        tl.store(grad_x + at, change.to(grad_x.dtype.element_ty), mask=inside)
