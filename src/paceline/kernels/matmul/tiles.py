"""What products of matrices in Triton share: the order of tiles, and what is done to a tile.

Everything here works on one tile (rows, columns) of a result, in fp32 registers.
"""
# Triton's functions are no Python: types of their arguments are Triton's own.
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def place(tile, num_rows, num_columns, GROUP: tl.constexpr):
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
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Its left and its right half."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def pairs(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Its even and its odd columns."""
    return tl.split(tl.reshape(tile, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The activation of a tile; that of "swiglu" has half the columns."""
    if ACTIVATION == "swiglu":
        gate, up = pairs(z, ROWS, COLUMNS)
        z = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "relu":
        z = _positive(z)
    elif ACTIVATION == "squared_relu":
        z = _positive(z)
        z = z * z
    return z


@triton.jit
def differentiate(
    change,
    kept,
    ACTIVATION: tl.constexpr,
    KEPT_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient before an activation.

    Args:
        change: (ROWS, COLUMNS), the gradient after it.
        kept: what it was applied to (of "swiglu" twice the columns), or what came out.
        ACTIVATION: its name.
        KEPT_OUTPUT: whether kept is what came out ("relu" and "squared_relu" only).
        ROWS: of the tile.
        COLUMNS: of the tile.
    """
    if ACTIVATION == "swiglu":
        gate, up = pairs(kept, ROWS, 2 * COLUMNS)
        share = tl.sigmoid(gate)
        of_gate = change * up * share * (1 + gate * (1 - share))
        both = tl.join(of_gate, change * gate * share)
        change = tl.reshape(both, (ROWS, 2 * COLUMNS))
    elif ACTIVATION == "gelu":
        share = tl.sigmoid(1.5957691216057308 * (kept + 0.044715 * kept * kept * kept))
        slope = 1.5957691216057308 * (1 + 3 * 0.044715 * kept * kept)
        change = change * (share + kept * slope * share * (1 - share))
    elif ACTIVATION == "relu":
        change = tl.where(kept <= 0, 0.0, change)
    elif ACTIVATION == "squared_relu":
        root = _positive(kept)
        if KEPT_OUTPUT:
            root = tl.sqrt(root)
        change = 2.0 * change * root
    return change


@triton.jit
def _positive(z):
    """max(z, 0), but what is not a number stays so; `tl.maximum` would make it zero."""
    return tl.where(z < 0, 0.0, z)


@triton.jit
def product(
    left,
    right,
    left_stride,
    right_stride,
    row,
    column,
    m,
    n,
    k,
    TRANSPOSED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of left (m, k) times right, by pointers of any alignment.

    Args:
        left: (m, k), its rows left_stride apart.
        right: (k, n), or (n, k) where TRANSPOSED; its rows right_stride apart.
        left_stride: in values.
        right_stride: in values.
        row: the tile's first.
        column: the tile's first.
        m: rows of the result.
        n: columns of the result.
        k: what is summed over.
        TRANSPOSED: how right lies.
        WIDEN: whether operands become fp32 first: the interpreter multiplies only those rightly.
        BLOCK_M: rows of a tile.
        BLOCK_N: columns of a tile.
        BLOCK_K: summed in one step.
    """
    rows, columns, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    left_at = left + row.to(tl.int64) * left_stride + (rows[:, None] * left_stride + inner[None, :])
    if TRANSPOSED:
        right_at = right + column.to(tl.int64) * right_stride
        right_at += columns[None, :] * right_stride + inner[:, None]
    else:
        right_at = right + column + (inner[:, None] * right_stride + columns[None, :])
    row_inside, column_inside = (row + rows < m)[:, None], (column + columns < n)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        inner_inside = start + inner < k
        a = tl.load(left_at, mask=row_inside & inner_inside[None, :], other=0.0)
        b = tl.load(right_at, mask=inner_inside[:, None] & column_inside, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        left_at += BLOCK_K
        if TRANSPOSED:
            right_at += BLOCK_K
        else:
            right_at += BLOCK_K * right_stride.to(tl.int64)
    return total
