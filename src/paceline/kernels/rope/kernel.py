"""Rotary positions with the norm before them, in Triton.

A program works on a tile: some tokens by some heads. A head's two halves are two loads, for an
element of one meets its partner in the other at the same place; the angles of a token are read once
and serve all heads of the tile. Tables and heads stay in registers.

Backward with a norm, programs go through many tiles each and keep the gradient of the weight in
registers; each writes one row of partial sums, and torch adds the rows: the same bits every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch, like, next_power_of_2
from paceline.kernels.operator import Differentiable, Operator


@triton.jit
def _tile(index, tokens, heads, seq_len, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Batch, position and head of a tile's rows, their number from the first, and which exist.

    Each has three dimensions: (tokens, heads, 1), with 1 where it doesn't depend on one.
    """
    across = heads // HEADS
    token = (index // across).to(tl.int64) * (ROWS // HEADS) + tl.arange(0, ROWS // HEADS)
    head = (index % across) * HEADS + tl.arange(0, HEADS)
    token, head = token[:, None, None], head[None, :, None]
    batch = token // seq_len
    return batch, token - batch * seq_len, head, token * heads + head, token < tokens


@triton.jit
def _load(start, column, half, inside):
    """Both halves of heads, of table rows or of a weight."""
    first = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(start + half + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(start, column, half, inside, a, b):
    tl.store(start + column, a.to(start.dtype.element_ty), mask=inside)
    tl.store(start + half + column, b.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _forward(
    x, cos, sin, weight, out,
    x_batch, x_seq, x_head, table_batch, tokens, seq_len, heads, half, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, MOST_HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = MOST_HEADS if MOST_HEADS < ROWS else ROWS
    place = _tile(tl.program_id(0), tokens, heads, seq_len, ROWS, HEADS)
    batch, position, head, number, exists = place
    column = tl.arange(0, HALF)[None, None, :]
    inside = exists & (column < half)
    a, b = _load(x + batch * x_batch + position * x_seq + head * x_head, column, half, inside)
    angles = batch * table_batch + position * 2 * half
    cos_a, cos_b = _load(cos + angles, column, half, inside)
    sin_a, sin_b = _load(sin + angles, column, half, inside)
    if NORM:
        a_weight, b_weight = _load(weight, column, half, column < half)
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=2, keep_dims=True) / (2 * half) + eps)
        a, b = a * scale * a_weight, b * scale * b_weight
    goal = out + number * 2 * half
    _store(goal, column, half, inside, a * cos_a + b * sin_a, b * cos_b + a * sin_b)


@triton.jit
def _backward(
    grad, x, cos, sin, weight, partial, grad_x,
    grad_batch, grad_seq, grad_head, x_batch, x_seq, x_head, table_batch, tiles, tokens, seq_len,
    heads, half, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, MOST_HEADS: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # the most programs, which the launcher reads
):  # fmt: skip
    """Tiles a grid's length apart; and this program's sums of the gradient of the weight."""
    HEADS: tl.constexpr = MOST_HEADS if MOST_HEADS < ROWS else ROWS
    column = tl.arange(0, HALF)[None, None, :]
    if NORM:
        a_weight, b_weight = _load(weight, column, half, column < half)
        a_sum = tl.zeros((ROWS // HEADS, HEADS, HALF), tl.float32)
        b_sum = tl.zeros((ROWS // HEADS, HEADS, HALF), tl.float32)
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, position, head, number, exists = _tile(index, tokens, heads, seq_len, ROWS, HEADS)
        inside = exists & (column < half)
        source = grad + batch * grad_batch + position * grad_seq + head * grad_head
        turned_a, turned_b = _load(source, column, half, inside)
        angles = batch * table_batch + position * 2 * half
        cos_a, cos_b = _load(cos + angles, column, half, inside)
        sin_a, sin_b = _load(sin + angles, column, half, inside)
        grad_a, grad_b = turned_a * cos_a + turned_b * sin_b, turned_b * cos_b + turned_a * sin_a
        if NORM:
            value = x + batch * x_batch + position * x_seq + head * x_head
            a, b = _load(value, column, half, inside)
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=2, keep_dims=True) / (2 * half) + eps)
            # d/dx of x * s(x) * w is s * (w g - n * mean(w g n)), with n = x * s.
            along = tl.sum(a * grad_a * a_weight + b * grad_b * b_weight, axis=2, keep_dims=True)
            share = along * scale * scale * scale / (2 * half)
            a_sum += grad_a * a * scale
            b_sum += grad_b * b * scale
            grad_a = grad_a * a_weight * scale - a * share
            grad_b = grad_b * b_weight * scale - b * share
        _store(grad_x + number * 2 * half, column, half, inside, grad_a, grad_b)
    if NORM:
        own = partial + tl.program_id(0) * 2 * half + tl.arange(0, HALF)
        exists = tl.arange(0, HALF) < half
        tl.store(own, tl.sum(tl.sum(a_sum, axis=0), axis=0), mask=exists)
        tl.store(own + half, tl.sum(tl.sum(b_sum, axis=0), axis=0), mask=exists)


def _rows(values: int, width: int) -> int:
    return max(values // next_power_of_2(width), 1)


def _forward_rule(width: int) -> Launch:
    """Tiles of 4096 values: of each thread 32 are in flight."""
    return Launch({"ROWS": _rows(4096, width)}, num_warps=4)


def _backward_rule(width: int) -> Launch:
    """Tiles of 2048 values, for gradients, values and sums share the registers; 4 programs on each
    of 132 processors."""
    return Launch({"ROWS": _rows(2048, width), "PROGRAMS": 528}, num_warps=4)


def _forward_others(width: int) -> list[Launch]:
    rows = [_rows(values, width) for values in (2048, 4096, 8192)]
    return [Launch({"ROWS": each}, warps) for each in rows for warps in (2, 4, 8)]


def _backward_others(width: int) -> list[Launch]:
    return [
        Launch({"ROWS": _rows(values, width), "PROGRAMS": programs}, warps)
        for values in (1024, 2048, 4096)
        for programs in (264, 528, 1056)
        for warps in (2, 4, 8)
    ]


# Llama's queries and keys, with and without norms; the part of DeepSeek's that turns.
_VARIANTS = tuple(
    {"HALF": half, "MOST_HEADS": heads, "NORM": has_norm}
    for half, heads, has_norm in (
        *((64, 32, False), (64, 8, False), (64, 32, True), (64, 8, True)),
        *((32, 128, False), (32, 1, False)),
    )
)
_SIZED = "tokens seq_len heads half: i32; eps: fp32"
FORWARD = Kernel(
    "rope.forward", _forward,
    "x out weight: *T; cos sin: *fp32; x_batch x_seq x_head table_batch: i32; " + _SIZED,
    _forward_rule, (128,), _VARIANTS, _forward_others,
)  # fmt: skip
BACKWARD = Kernel(
    "rope.backward", _backward,
    "grad x weight grad_x: *T; cos sin partial: *fp32; grad_batch grad_seq grad_head "
    "x_batch x_seq x_head table_batch tiles: i32; " + _SIZED,
    _backward_rule, (128,), _VARIANTS, _backward_others,
)  # fmt: skip
KERNELS = (FORWARD, BACKWARD)


def _dense(x: Tensor) -> Tensor:
    """Numbers of a head side by side; copies if it must."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(x: Tensor, cos: Tensor) -> tuple[int, ...]:
    """From the tables' stride of a batch, which may share one, to half a head."""
    batch, seq_len, heads, width = x.shape
    return seq_len * width if len(cos) > 1 else 0, batch * seq_len, seq_len, heads, width // 2


def _constants(x: Tensor, weight: Tensor | None) -> dict[str, int]:
    """Compile-time sizes. Heads of a tile divide the heads: no lane idles, none is masked."""
    heads, half = x.shape[2], x.shape[3] // 2
    return {"NORM": weight is not None, "HALF": next_power_of_2(half), "MOST_HEADS": heads & -heads}


def _tiles(x: Tensor, rows: int) -> int:
    """Of so many rows each, a row being a token's head; a tile has no more heads than rows."""
    batch, seq_len, heads, _ = x.shape
    heads_of_tile = min(heads & -heads, rows)
    return triton.cdiv(batch * seq_len, rows // heads_of_tile) * (heads // heads_of_tile)


def _run(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = like(x)
    if out.numel():
        given, width = _dense(x), x.shape[3]
        tensors = given, cos.contiguous(), sin.contiguous(), given if weight is None else weight
        grid = (_tiles(x, FORWARD.at(width, x).blocks["ROWS"]),)
        sizes = *given.stride()[:3], *_sizes(x, cos)
        FORWARD(grid, width, x, *tensors, out, *sizes, eps, **_constants(x, weight))
    return out


def _run_backward(
    grad: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; that is empty where there is none."""
    grad_x, grad_weight = _fake_backward(grad, x, cos, sin, weight, eps)
    if not grad.numel():
        return grad_x, grad_weight.zero_()
    ours, width = _dense(grad), grad.shape[3]
    given = ours if x is None else _dense(x)
    blocks = BACKWARD.at(width, grad).blocks
    tiles = _tiles(grad, blocks["ROWS"])
    programs = tiles if weight is None else min(tiles, blocks["PROGRAMS"])
    partial = ours.new_empty((0 if weight is None else programs, width), dtype=torch.float32)
    tensors = ours, given, cos.contiguous(), sin.contiguous(), given if weight is None else weight
    strides = *ours.stride()[:3], *given.stride()[:3]
    table_batch, *sizes = _sizes(grad, cos)
    arguments = *tensors, partial, grad_x, *strides, table_batch, tiles, *sizes, eps
    BACKWARD((programs,), width, grad, *arguments, **_constants(grad, weight))
    return grad_x, grad_weight if weight is None else partial.sum(0).to(weight.dtype)


def _fake_backward(
    grad: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return like(grad), grad.new_empty(0) if weight is None else like(weight)


_forward_operator = Operator("rotate", _run, lambda x, cos, sin, weight, eps: like(x))
_backward_operator = Operator("rotate_backward", _run_backward, _fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, weight, ctx.eps = inputs
    # Without a norm the gradient doesn't ask for the values.
    ctx.save_for_backward(None if weight is None else x, cos, sin, weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight = _backward_operator(grad, *ctx.saved_tensors, ctx.eps)
    has_norm = ctx.saved_tensors[-1] is not None
    return grad_x, None, None, grad_weight if has_norm else None, None


rotate = Differentiable(_forward_operator, _save, _gradient)
