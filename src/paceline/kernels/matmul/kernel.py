"""Products of matrices with their epilogue, in Triton.

Forward, a tile of x @ weight.T is finished while it is in registers: bias, activation, residual, so
what follows the product costs no pass over memory. Backward, the product that carries the gradient
over the *next* layer's weight is finished with the derivative of this activation, and with the sums
of its columns: the gradient of the bias, a partial sum of each row of tiles, so that it is the same
to the bit each time. The other products of the backward pass have no epilogue: they are cuBLAS's.

Each comes twice. "described": a program per processor goes through many tiles, and whole tiles are
moved by Hopper's copy engine (TMA), which wants rows of 16 bytes; half a tile is finished at a
time, for registers. "pointers": a program per tile, for all else.

The derivative is had from the least that is kept: of ReLU and its square from the output, which the
next product keeps anyway, of others from the values before.
"""

from typing import Any

import triton
import triton.language as tl

from paceline.kernels.launch import Kernel, Launch
from paceline.kernels.matmul.tiles import activate, differentiate, halves, place, product


@triton.jit
def _forward_pointers(
    x,
    weight,
    bias,
    residual,
    out,
    preact,
    x_stride,
    weight_stride,
    residual_stride,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVES: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, column = place(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    row, column = row * BLOCK_M, column * BLOCK_N
    z = product(
        *(x, weight, x_stride, weight_stride, row, column, m, n, k),
        *(True, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K),
    )
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    columns = column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if SAVES:
        inside = (rows < m) & (columns < n)[None, :]
        at = rows.to(tl.int64) * n + columns[None, :]
        tl.store(preact + at, z.to(preact.dtype.element_ty), mask=inside)
    y = activate(z, ACTIVATION, BLOCK_M, BLOCK_N)
    width = n
    if ACTIVATION == "swiglu":
        width = n // 2
        columns = column // 2 + tl.arange(0, BLOCK_N // 2)
    inside = (rows < m) & (columns < width)[None, :]
    if HAS_RESIDUAL:
        at = rows.to(tl.int64) * residual_stride + columns[None, :]
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    at = rows.to(tl.int64) * width + columns[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _forward_described(
    x,
    weight,
    bias,
    residual,
    out,
    preact,
    x_stride,
    weight_stride,
    residual_stride,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVES: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    NARROWER: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    WIDTH: tl.constexpr = HALF // NARROWER
    width = n // NARROWER
    x_tiles = tl.make_tensor_descriptor(x, [m, k], [x_stride, 1], [BLOCK_M, BLOCK_K])
    weight_tiles = tl.make_tensor_descriptor(weight, [n, k], [weight_stride, 1], [BLOCK_N, BLOCK_K])
    out_tiles = tl.make_tensor_descriptor(out, [m, width], [width, 1], [BLOCK_M, WIDTH])
    preact_tiles = out_tiles
    if SAVES:
        preact_tiles = tl.make_tensor_descriptor(preact, [m, n], [n, 1], [BLOCK_M, HALF])
    residual_tiles = out_tiles
    if HAS_RESIDUAL:
        residual_tiles = tl.make_tensor_descriptor(
            residual, [m, width], [residual_stride, 1], [BLOCK_M, WIDTH]
        )
    num_rows, num_columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0)):
        row, column = place(tile, num_rows, num_columns, GROUP)
        row, column = row * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            a = x_tiles.load([row, start])
            b = weight_tiles.load([column, start])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b.T, total, input_precision="ieee")
        left, right = halves(total, BLOCK_M, BLOCK_N)
        _finish_forward(
            *(left, row, column, n, bias, residual_tiles, out_tiles, preact_tiles),
            *(ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SAVES, BLOCK_M, HALF, NARROWER),
        )
        _finish_forward(
            *(right, row, column + HALF, n, bias, residual_tiles, out_tiles, preact_tiles),
            *(ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SAVES, BLOCK_M, HALF, NARROWER),
        )


@triton.jit
def _finish_forward(
    z,
    row,
    column,
    n,
    bias,
    residual_tiles,
    out_tiles,
    preact_tiles,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROWER: tl.constexpr,
):
    if HAS_BIAS:
        columns = column + tl.arange(0, COLUMNS)
        z += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if SAVES:
        preact_tiles.store([row, column], z.to(preact_tiles.dtype))
    y = activate(z, ACTIVATION, ROWS, COLUMNS)
    if HAS_RESIDUAL:
        y += residual_tiles.load([row, column // NARROWER]).to(tl.float32)
    out_tiles.store([row, column // NARROWER], y.to(out_tiles.dtype))


@triton.jit
def _backward_pointers(
    grad,
    weight,
    kept,
    out,
    postact,
    sums,
    grad_stride,
    weight_stride,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    KEPT_OUTPUT: tl.constexpr,
    WANTS_POSTACT: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    WIDER: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    row_tile, column = place(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    row, column = row_tile * BLOCK_M, column * BLOCK_N
    change = product(
        *(grad, weight, grad_stride, weight_stride, row, column, m, n, k),
        *(False, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K),
    )
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    columns = column * WIDER + tl.arange(0, BLOCK_N * WIDER)
    inside = (rows < m) & (columns < n * WIDER)[None, :]
    at = rows.to(tl.int64) * (n * WIDER) + columns[None, :]
    z = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
    if WANTS_POSTACT:
        y = activate(z, ACTIVATION, BLOCK_M, BLOCK_N * WIDER)
        narrow = column + tl.arange(0, BLOCK_N)
        tl.store(
            postact + rows.to(tl.int64) * n + narrow[None, :],
            y.to(postact.dtype.element_ty),
            mask=(rows < m) & (narrow < n)[None, :],
        )
    change = differentiate(change, z, ACTIVATION, KEPT_OUTPUT, BLOCK_M, BLOCK_N)
    tl.store(out + at, change.to(out.dtype.element_ty), mask=inside)
    # Rows beyond the last are zero: their gradients were read as zero.
    of_columns = sums + row_tile.to(tl.int64) * (n * WIDER) + columns
    tl.store(of_columns, tl.sum(change, 0), mask=columns < n * WIDER)


@triton.jit
def _backward_described(
    grad,
    weight,
    kept,
    out,
    postact,
    sums,
    grad_stride,
    weight_stride,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    KEPT_OUTPUT: tl.constexpr,
    WANTS_POSTACT: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    WIDER: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    HALF: tl.constexpr = BLOCK_N // 2
    WIDE: tl.constexpr = HALF * WIDER
    width = n * WIDER
    grad_tiles = tl.make_tensor_descriptor(grad, [m, k], [grad_stride, 1], [BLOCK_M, BLOCK_K])
    weight_tiles = tl.make_tensor_descriptor(weight, [k, n], [weight_stride, 1], [BLOCK_K, BLOCK_N])
    kept_tiles = tl.make_tensor_descriptor(kept, [m, width], [width, 1], [BLOCK_M, WIDE])
    out_tiles = tl.make_tensor_descriptor(out, [m, width], [width, 1], [BLOCK_M, WIDE])
    postact_tiles = out_tiles
    if WANTS_POSTACT:
        postact_tiles = tl.make_tensor_descriptor(postact, [m, n], [n, 1], [BLOCK_M, HALF])
    num_rows, num_columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0)):
        row_tile, column = place(tile, num_rows, num_columns, GROUP)
        row, column = row_tile * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            a = grad_tiles.load([row, start])
            b = weight_tiles.load([start, column])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
        of_row = sums + row_tile.to(tl.int64) * width
        left, right = halves(total, BLOCK_M, BLOCK_N)
        _finish_backward(
            *(left, row, column, width, of_row, kept_tiles, out_tiles, postact_tiles),
            *(ACTIVATION, KEPT_OUTPUT, WANTS_POSTACT, BLOCK_M, HALF, WIDER),
        )
        _finish_backward(
            *(right, row, column + HALF, width, of_row, kept_tiles, out_tiles, postact_tiles),
            *(ACTIVATION, KEPT_OUTPUT, WANTS_POSTACT, BLOCK_M, HALF, WIDER),
        )


@triton.jit
def _finish_backward(
    change,
    row,
    column,
    width,
    of_row,
    kept_tiles,
    out_tiles,
    postact_tiles,
    ACTIVATION: tl.constexpr,
    KEPT_OUTPUT: tl.constexpr,
    WANTS_POSTACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDER: tl.constexpr,
):
    z = kept_tiles.load([row, column * WIDER]).to(tl.float32)
    if WANTS_POSTACT:
        y = activate(z, ACTIVATION, ROWS, COLUMNS * WIDER)
        postact_tiles.store([row, column], y.to(postact_tiles.dtype))
    change = differentiate(change, z, ACTIVATION, KEPT_OUTPUT, ROWS, COLUMNS)
    out_tiles.store([row, column * WIDER], change.to(out_tiles.dtype))
    columns = column * WIDER + tl.arange(0, COLUMNS * WIDER)
    tl.store(of_row + columns, tl.sum(change, 0), mask=columns < width)


@triton.jit
def _slope(
    grad,
    kept,
    out,
    sums,
    grad_stride,
    m,
    n,
    ACTIVATION: tl.constexpr,
    KEPT_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Without a product: the gradient over an activation, and partial sums of its columns."""
    WIDER: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    narrow = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * BLOCK_N * WIDER + tl.arange(0, BLOCK_N * WIDER)
    width = n * WIDER
    total = tl.zeros((BLOCK_M, BLOCK_N * WIDER), tl.float32)
    step = tl.num_programs(1) * BLOCK_M
    for row in tl.range(tl.program_id(1) * BLOCK_M, m, step):
        rows = (row + tl.arange(0, BLOCK_M))[:, None]
        at = rows.to(tl.int64) * grad_stride + narrow[None, :]
        change = tl.load(grad + at, mask=(rows < m) & (narrow < n)[None, :], other=0.0)
        at = rows.to(tl.int64) * width + columns[None, :]
        inside = (rows < m) & (columns < width)[None, :]
        z = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
        change = differentiate(change.to(tl.float32), z, ACTIVATION, KEPT_OUTPUT, BLOCK_M, BLOCK_N)
        tl.store(out + at, change.to(out.dtype.element_ty), mask=inside)
        total += change
    of_program = sums + tl.program_id(1).to(tl.int64) * width
    tl.store(of_program + columns, tl.sum(total, 0), mask=columns < width)


def _described_rule(size: int) -> Launch:
    """By values of the result: tiles as large as leave one for each processor of an H200."""
    if size >= 132 * 128 * 256:
        return Launch(_blocks(128, 256, 64), num_warps=8, num_stages=3)
    if size >= 132 * 64 * 128:
        return Launch(_blocks(128, 128, 64), num_warps=8, num_stages=4)
    return Launch(_blocks(64, 64, 64), num_warps=8, num_stages=4)


def _backward_rule(size: int) -> Launch:
    """As forward, but narrower: GELU and SwiGLU spill registers in tiles of 128 x 256."""
    if size >= 132 * 64 * 128:
        return Launch(_blocks(128, 128, 64), num_warps=8, num_stages=4)
    return Launch(_blocks(64, 64, 64), num_warps=8, num_stages=4)


def _pointers_rule(size: int) -> Launch:
    """By values of the result: tiles as large as leave one for each processor of an A100."""
    if size >= 108 * 128 * 128:
        return Launch(_blocks(128, 128, 32), num_warps=8, num_stages=4)
    return Launch(_blocks(64, 64, 32), num_warps=8, num_stages=3)


def _backward_pointers_rule(size: int) -> Launch:
    """As forward, but narrower: SwiGLU has two more values in registers for each of the tile."""
    if size >= 108 * 128 * 64:
        return Launch(_blocks(128, 64, 32), num_warps=8, num_stages=4)
    return Launch(_blocks(64, 64, 32), num_warps=8, num_stages=3)


def _fp32_rule(size: int) -> Launch:
    """Without tensor cores: sums in registers, a small tile."""
    return Launch(_blocks(64, 64, 16), num_warps=8, num_stages=2)


def _slope_rule(width: int) -> Launch:
    """Rows of 512 bytes; a thread has two loads of 16 bytes of each tensor in flight."""
    return Launch({"BLOCK_M": 8, "BLOCK_N": 256}, num_warps=4)


def _blocks(m: int, n: int, k: int, group: int = 8) -> dict[str, int]:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group}


def _other_described(size: int) -> list[Launch]:
    tiles = ((128, 256, 8), (256, 128, 8), (128, 128, 4), (128, 128, 8))
    return [
        Launch(_blocks(m, n, 64, group), warps, stages)
        for m, n, warps in tiles
        for group in (4, 8, 16)
        for stages in (3, 4)
    ]


def _other_pointers(size: int) -> list[Launch]:
    tiles = ((128, 256, 8), (256, 128, 8), (128, 128, 4), (128, 128, 8), (128, 64, 4), (64, 64, 4))
    return [
        Launch(_blocks(m, n, k), warps, stages)
        for m, n, warps in tiles
        for k in (32, 64)
        for stages in (3, 4)
    ]


def _other_slopes(width: int) -> list[Launch]:
    return [
        Launch({"BLOCK_M": m, "BLOCK_N": n}, warps)
        for m in (4, 8, 16)
        for n in (128, 256, 512)
        for warps in (4, 8)
    ]


def _variant(activation: str, **flags: bool) -> dict[str, Any]:
    base = {"HAS_BIAS": False, "HAS_RESIDUAL": False, "SAVES": False, "WIDEN": False}
    return {"ACTIVATION": activation, **base, **flags}


def _gradient_variant(activation: str, from_output: bool, postact: bool) -> dict[str, Any]:
    return {
        "ACTIVATION": activation,
        "KEPT_OUTPUT": from_output,
        "WANTS_POSTACT": postact,
        "WIDEN": False,
    }


_SIZES = (512 * 512, 1024 * 2048, 8192 * 14336)
_FORWARD_VARIANTS = (
    _variant("none", HAS_BIAS=True),
    _variant("none", HAS_RESIDUAL=True),
    _variant("relu", HAS_BIAS=True, HAS_RESIDUAL=True, SAVES=True),
    _variant("gelu", HAS_BIAS=True, SAVES=True),
    _variant("squared_relu"),
    _variant("swiglu", SAVES=True),
)
_BY_OUTPUT_VARIANTS = (
    _gradient_variant("relu", True, False),
    _gradient_variant("squared_relu", True, False),
)
_BY_INPUT_VARIANTS = (
    _gradient_variant("gelu", False, True),
    _gradient_variant("swiglu", False, True),
)
_BACKWARD_VARIANTS = _BY_OUTPUT_VARIANTS + _BY_INPUT_VARIANTS
_FORWARD_TAKES = (
    "x weight bias residual out preact: *T; x_stride weight_stride residual_stride m n k: i32"
)
_BACKWARD_TAKES = (
    "grad weight kept out postact: *T; sums: *fp32; grad_stride weight_stride m n k: i32"
)
FORWARD_DESCRIBED = Kernel(
    "matmul.forward_described",
    _forward_described,
    _FORWARD_TAKES,
    _described_rule,
    _SIZES,
    _FORWARD_VARIANTS,
    _other_described,
    least_capability=90,
)
FORWARD_POINTERS = Kernel(
    "matmul.forward_pointers",
    _forward_pointers,
    _FORWARD_TAKES,
    _pointers_rule,
    _SIZES,
    _FORWARD_VARIANTS,
    _other_pointers,
)
FORWARD_FP32 = Kernel(
    "matmul.forward_fp32",
    _forward_pointers,
    _FORWARD_TAKES,
    _fp32_rule,
    _SIZES[:1],
    _FORWARD_VARIANTS,
    dtypes=("fp32",),
)
BACKWARD_DESCRIBED = Kernel(
    "matmul.backward_described",
    _backward_described,
    _BACKWARD_TAKES,
    _backward_rule,
    _SIZES,
    _BY_INPUT_VARIANTS,
    _other_described,
    least_capability=90,
)
BACKWARD_BY_OUTPUT = Kernel(
    "matmul.backward_by_output",
    _backward_described,
    _BACKWARD_TAKES,
    _described_rule,
    _SIZES,
    _BY_OUTPUT_VARIANTS,
    _other_described,
    least_capability=90,
)
BACKWARD_POINTERS = Kernel(
    "matmul.backward_pointers",
    _backward_pointers,
    _BACKWARD_TAKES,
    _backward_pointers_rule,
    _SIZES,
    _BACKWARD_VARIANTS,
    _other_pointers,
)
BACKWARD_FP32 = Kernel(
    "matmul.backward_fp32",
    _backward_pointers,
    _BACKWARD_TAKES,
    _fp32_rule,
    _SIZES[:1],
    _BACKWARD_VARIANTS,
    dtypes=("fp32",),
)
SLOPE = Kernel(
    "matmul.slope",
    _slope,
    "grad kept out: *T; sums: *fp32; grad_stride m n: i32",
    _slope_rule,
    (4096, 14336),
    tuple(
        {name: variant[name] for name in ("ACTIVATION", "KEPT_OUTPUT")}
        for variant in _BACKWARD_VARIANTS
    ),
    _other_slopes,
)
KERNELS = (
    FORWARD_DESCRIBED,
    FORWARD_POINTERS,
    FORWARD_FP32,
    BACKWARD_DESCRIBED,
    BACKWARD_BY_OUTPUT,
    BACKWARD_POINTERS,
    BACKWARD_FP32,
    SLOPE,
)
