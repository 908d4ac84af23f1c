"""Tokens to experts and back, and the experts' products, in Triton.

Moving rows: a program has a block of a token's columns; it reads the token once and writes all its
copies, or reads the copies and writes their sum. A sum goes through the copies in their order, so
it is the same to the bit each time.

Products: one launch for all experts, though the host doesn't know how many rows each has. There is
a program for each processor; it reads all counts, knows from them how many tiles there are, and
goes through its share. A tile lies within one expert. Hopper's copy engine (TMA) brings whole tiles
in; what it brings of the next expert's rows isn't stored, and a product that sums over rows (that
of the gradient of weights) does its last, cut step with loads that stop at the expert's last row.
"""

import triton
import triton.language as tl

from paceline.kernels.launch import Kernel, Launch, other_row_launches, row_rule


@triton.jit
def _place(tile, num_rows, num_columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number among num_rows * num_columns.

    Neighbours in number share operands: they go down a column of GROUP rows before the next column
    begins, so tiles that run at one time read few rows and few columns, and find them in the L2.
    """
    per_group = GROUP * num_columns
    first = tile // per_group * GROUP
    height = tl.minimum(num_rows - first, GROUP)
    inside = tile % per_group
    return first + inside % height, inside // height


@triton.jit
def _spread(x, places, out, stride, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + token * stride + columns, mask=inside)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + token * COPIES + copy)
        tl.store(out + row * width + columns, value, mask=inside)


@triton.jit
def _collect(
    rows, places, weights, out,
    stride, width,
    HAS_WEIGHTS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + token * COPIES + copy)
        value = tl.load(rows + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights + token * COPIES + copy)
        total += value
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _collect_backward(
    grad, rows, places, weights, grad_rows, grad_weights,
    grad_stride, stride, width,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has all columns of a token: the gradient of a weight is a sum over them."""
    token = tl.program_id(0).to(tl.int64)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + token * COPIES + copy)
        weight = tl.load(weights + token * COPIES + copy)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            d = tl.load(grad + token * grad_stride + columns, mask=inside, other=0.0)
            d = d.to(tl.float32)
            value = tl.load(rows + row * stride + columns, mask=inside, other=0.0)
            total += d * value.to(tl.float32)
            change = (d * weight).to(grad_rows.dtype.element_ty)
            tl.store(grad_rows + row * width + columns, change, mask=inside)
        tl.store(grad_weights + token * COPIES + copy, tl.sum(total, 0))


@triton.jit
def _grouped(
    rows, weights, counts, out,
    rows_stride, num_rows, num_experts, n, k,
    TRANSPOSED: tl.constexpr, EXPERTS: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows times their expert's weights: (n, k) of each where TRANSPOSED, else (k, n)."""
    HALF: tl.constexpr = BLOCK_N // 2
    row_tiles = tl.make_tensor_descriptor(rows, [num_rows, k], [rows_stride, 1], [BLOCK_M, BLOCK_K])
    size = tl.cast(n, tl.int64) * k
    if TRANSPOSED:
        weight_tiles = tl.make_tensor_descriptor(
            weights, [num_experts, n, k], [size, k, 1], [1, BLOCK_N, BLOCK_K]
        )
    else:
        weight_tiles = tl.make_tensor_descriptor(
            weights, [num_experts, k, n], [size, n, 1], [1, BLOCK_K, BLOCK_N]
        )
    experts = tl.arange(0, EXPERTS)
    of_expert = tl.load(counts + experts, mask=experts < num_experts, other=0).to(tl.int32)
    tiles_of_expert = (of_expert + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles_of_expert, 0)
    num_row_tiles, num_columns = tl.sum(tiles_of_expert, 0), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_columns, tl.num_programs(0)):
        row_tile, column = _place(tile, num_row_tiles, num_columns, GROUP)
        expert = tl.sum((ends <= row_tile).to(tl.int32), 0)
        before = experts < expert
        first = tl.sum(tl.where(before, of_expert, 0), 0)
        end = first + tl.sum(tl.where(experts == expert, of_expert, 0), 0)
        row = first + (row_tile - tl.sum(tl.where(before, tiles_of_expert, 0), 0)) * BLOCK_M
        column = column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            a = row_tiles.load([row, start])
            if TRANSPOSED:
                b = weight_tiles.load([expert, column, start]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = weight_tiles.load([expert, start, column]).reshape(BLOCK_K, BLOCK_N)
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
        # Half a tile at a time, for registers.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        _store(left, out, row, end, column, n, BLOCK_M, HALF)
        _store(right, out, row, end, column + HALF, n, BLOCK_M, HALF)


@triton.jit
def _store(z, out, row, end, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = (row + tl.arange(0, ROWS))[:, None]
    columns = (column + tl.arange(0, COLUMNS))[None, :]
    at = rows.to(tl.int64) * width + columns
    tl.store(out + at, z.to(out.dtype.element_ty), mask=(rows < end) & (columns < width))


@triton.jit
def _grouped_weights(
    left, right, counts, out,
    left_stride, right_stride, num_rows, num_experts, n, k,
    EXPERTS: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of each expert's rows, left (rows, n) transposed times right (rows, k)."""
    left_tiles = tl.make_tensor_descriptor(
        left, [num_rows, n], [left_stride, 1], [BLOCK_K, BLOCK_M]
    )
    right_tiles = tl.make_tensor_descriptor(
        right, [num_rows, k], [right_stride, 1], [BLOCK_K, BLOCK_N]
    )
    experts = tl.arange(0, EXPERTS)
    of_expert = tl.load(counts + experts, mask=experts < num_experts, other=0).to(tl.int32)
    of_row, of_column = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    tiles = of_row * of_column
    for tile in tl.range(tl.program_id(0), tiles * num_experts, tl.num_programs(0)):
        expert = tile // tiles
        row, column = _place(tile % tiles, of_row, of_column, GROUP)
        row, column = row * BLOCK_M, column * BLOCK_N
        first = tl.sum(tl.where(experts < expert, of_expert, 0), 0)
        end = first + tl.sum(tl.where(experts == expert, of_expert, 0), 0)
        # All steps but the last, which may be cut.
        last = first + tl.maximum(tl.cdiv(end - first, BLOCK_K) - 1, 0) * BLOCK_K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(first, last, BLOCK_K):
            a = left_tiles.load([start, row])
            b = right_tiles.load([start, column])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a.T, b, total, input_precision="ieee")
        at = (last + tl.arange(0, BLOCK_K))[:, None]
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        a = tl.load(
            left + at.to(tl.int64) * left_stride + rows[None, :],
            mask=(at < end) & (rows < n)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + at.to(tl.int64) * right_stride + columns[None, :],
            mask=(at < end) & (columns < k)[None, :],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a.T, b, total, input_precision="ieee")
        tl.store(
            out + (tl.cast(expert, tl.int64) * n + rows[:, None]) * k + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=(rows < n)[:, None] & (columns < k)[None, :],
        )


def _grouped_rule(size: int) -> Launch:
    """By values of the result: narrower tiles where there are few, for all processors."""
    if size >= 132 * 128 * 256:
        return Launch(_blocks(128, 256, 64), num_warps=8, num_stages=3)
    if size >= 132 * 64 * 128:
        return Launch(_blocks(128, 128, 64), num_warps=8, num_stages=4)
    return Launch(_blocks(64, 64, 64), num_warps=8, num_stages=4)


def _blocks(m: int, n: int, k: int, group: int = 8) -> dict[str, int]:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group}


def _other_groups(size: int) -> list[Launch]:
    tiles = ((128, 256, 8), (128, 128, 4), (128, 128, 8), (64, 128, 4), (64, 256, 4))
    return [
        Launch(_blocks(m, n, 64, group), warps, stages)
        for m, n, warps in tiles
        for group in (4, 8, 16)
        for stages in (3, 4)
    ]


_WIDTHS = (2048, 7168)
_SIZES = (64 * 1024, 1024 * 2048, 65536 * 2048)
SPREAD = Kernel(
    "experts.spread", _spread,
    "x out: *T; places: *i64; stride width: i32",
    row_rule, _WIDTHS, ({"COPIES": 2}, {"COPIES": 8}), other_row_launches,
)  # fmt: skip
COLLECT = Kernel(
    "experts.collect", _collect,
    "rows out: *T; places: *i64; weights: *fp32; stride width: i32",
    row_rule, _WIDTHS, ({"COPIES": 8, "HAS_WEIGHTS": False}, {"COPIES": 8, "HAS_WEIGHTS": True}),
    other_row_launches,
)  # fmt: skip
COLLECT_BACKWARD = Kernel(
    "experts.collect_backward", _collect_backward,
    "grad rows grad_rows: *T; places: *i64; weights grad_weights: *fp32; "
    "grad_stride stride width: i32",
    row_rule, _WIDTHS, ({"COPIES": 2}, {"COPIES": 8}), other_row_launches,
)  # fmt: skip
GROUPED = Kernel(
    "experts.grouped", _grouped,
    "rows weights out: *T; counts: *i64; rows_stride num_rows num_experts n k: i32",
    _grouped_rule, _SIZES,
    (
        {"TRANSPOSED": True, "EXPERTS": 32, "WIDEN": False},
        {"TRANSPOSED": False, "EXPERTS": 128, "WIDEN": False},
    ),
    _other_groups, least_capability=90,
)  # fmt: skip
GROUPED_WEIGHTS = Kernel(
    "experts.grouped_weights", _grouped_weights,
    "left right out: *T; counts: *i64; left_stride right_stride num_rows num_experts n k: i32",
    _grouped_rule, _SIZES, ({"EXPERTS": 32, "WIDEN": False}, {"EXPERTS": 128, "WIDEN": False}),
    _other_groups, least_capability=90,
)  # fmt: skip
KERNELS = (SPREAD, COLLECT, COLLECT_BACKWARD, GROUPED, GROUPED_WEIGHTS)
