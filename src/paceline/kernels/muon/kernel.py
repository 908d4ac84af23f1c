"""x xᵀ in Triton, half of it computed.

A program computes one tile of the product, on or above the diagonal, and writes it twice: as it is,
and mirrored. A tile on the diagonal is made its own mirror, so the result equals its transpose bit
by bit. A sum with another symmetric matrix is part of the same pass.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import switch
from paceline.kernels.launch import Kernel, Launch
from paceline.kernels.operator import Operator


@triton.jit
def _product(
    x,
    plus,
    out,
    rows,
    columns,
    alpha,
    beta,
    HAS_PLUS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Tiles are numbered along columns of the upper triangle: column j begins at j (j + 1) / 2.
    tile = tl.program_id(0)
    right = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    right = tl.where(right * (right + 1) // 2 > tile, right - 1, right)
    right = tl.where((right + 1) * (right + 2) // 2 <= tile, right + 1, right)
    left = tile - right * (right + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    i = left * BLOCK + tl.arange(0, BLOCK)
    j = right * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    # Rows beyond the last are computed and not written; the last stands in for them.
    x += matrix * rows * columns
    to_left = x + tl.minimum(i, rows - 1).to(tl.int64)[:, None] * columns + depth[None, :]
    to_right = x + tl.minimum(j, rows - 1).to(tl.int64)[:, None] * columns + depth[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, columns, DEPTH):
        inside = (depth < columns - start)[None, :]
        a = tl.load(to_left + start, mask=inside, other=0.0)
        b = tl.load(to_right + start, mask=inside, other=0.0)
        if IS_WIDENED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    total = total * alpha
    place = matrix * rows * rows + i.to(tl.int64)[:, None] * rows + j[None, :]
    inside = (i < rows)[:, None] & (j < rows)[None, :]
    if HAS_PLUS:
        total += beta * tl.load(plus + place, mask=inside, other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    flipped = tl.trans(total)
    # On the diagonal the lower half becomes the upper's mirror; elsewhere nothing changes.
    total = tl.where(i[:, None] <= j[None, :], total, flipped)
    tl.store(out + place, total, mask=inside)
    if left != right:
        mirrored = matrix * rows * rows + j.to(tl.int64)[:, None] * rows + i[None, :]
        tl.store(out + mirrored, flipped, mask=(j < rows)[:, None] & (i < rows)[None, :])


def _rule(columns: int) -> Launch:
    """Tiles of 128 by 128, 64 deep: what two warp groups of a Hopper multiply at a time."""
    return Launch({"BLOCK": 128, "DEPTH": 64}, num_warps=8, num_stages=3)


def _others(columns: int) -> list[Launch]:
    sizes = ((64, 64, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
    return [
        Launch({"BLOCK": block, "DEPTH": depth}, warps, stages)
        for block, depth, warps in sizes
        for stages in (2, 3, 4)
    ]


PRODUCT = Kernel(
    "muon.symmetric_product",
    _product,
    "x plus out: *T; rows columns: i32; alpha beta: fp32",
    _rule,
    (4096,),
    [{"HAS_PLUS": has, "IS_WIDENED": False} for has in (False, True)],
    _others,
)
KERNELS = (PRODUCT,)


def _run(x: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    if not out.numel():
        return out
    x = x.contiguous()
    given = out if plus is None else plus.contiguous()
    rows, columns = x.shape[1:]

    def grid(blocks: dict[str, int]) -> tuple[int, int]:
        tiles = triton.cdiv(rows, blocks["BLOCK"])
        return tiles * (tiles + 1) // 2, x.shape[0]

    arguments = x, given, out, rows, columns, alpha, beta
    # The interpreter multiplies 16 bits wrongly.
    constants = {"HAS_PLUS": plus is not None, "IS_WIDENED": switch.is_interpreted()}
    PRODUCT(grid, columns, x, *arguments, **constants)
    return out


symmetric_product = Operator(
    "symmetric_product",
    _run,
    lambda x, plus, alpha, beta: x.new_empty(x.shape[0], x.shape[1], x.shape[1]),
)
"""alpha x xᵀ + beta plus: (batch, rows, columns) and symmetric (batch, rows, rows), or None."""
