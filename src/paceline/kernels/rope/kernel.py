"""Rotary positions with the norms before them, in Triton.

A program works on a tile: some tokens by some heads, of queries or of keys. The first programs of a
launch have queries, the others keys, so one launch does both. A head's two halves are two loads,
for an element of one meets its partner in the other at the same place; the angles of a token are
read once and serve all heads of the tile. Tables and heads stay in registers.

Backward with norms, programs go through many tiles each and keep the gradients of the weights in
registers; each writes one row of partial sums, and torch adds the rows: the same bits every time.

A kernel takes what it needs of queries as one tuple and of keys as another (`side`), and the tables
as a third.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch, next_power_of_2
from paceline.kernels.operator import Differentiable, Operator
from paceline.kernels.rope import sharding


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
def _halves(start, column, half, inside):
    """Both halves of what is turned, from where it starts."""
    first = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(start + half + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _angles(tables, batch, position, column, half, inside):
    """Cosines and sines of both halves, (tokens, 1, half) each."""
    cos, sin, cos_batch, cos_seq, sin_batch, sin_seq = tables
    cos_a, cos_b = _halves(cos + batch * cos_batch + position * cos_seq, column, half, inside)
    sin_a, sin_b = _halves(sin + batch * sin_batch + position * sin_seq, column, half, inside)
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _turn(
    index,
    side,
    tables,
    tokens,
    seq_len,
    half,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    STILL: tl.constexpr,
    MOST_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One tile, forward."""
    HEADS: tl.constexpr = MOST_HEADS if MOST_HEADS < ROWS else ROWS
    x, out, weight, heads, still, x_batch, x_seq, x_head = side
    width = still + 2 * half
    batch, position, head, number, exists = _tile(index, tokens, heads, seq_len, ROWS, HEADS)
    source = x + batch * x_batch + position * x_seq + head * x_head
    goal = out + number * width
    column = tl.arange(0, HALF)[None, None, :]
    inside = exists & (column < half)
    a, b = _halves(source + still, column, half, inside)
    cos_a, cos_b, sin_a, sin_b = _angles(tables, batch, position, column, half, inside)
    squares = a * a + b * b
    total = tl.sum(squares, axis=2, keep_dims=True)
    if STILL > 0:
        ahead = tl.arange(0, STILL)[None, None, :]
        before = exists & (ahead < still)
        c = tl.load(source + ahead, mask=before, other=0.0).to(tl.float32)
        total += tl.sum(c * c, axis=2, keep_dims=True)
        if NORM:
            c_weight = tl.load(weight + ahead, mask=ahead < still, other=0.0).to(tl.float32)
            c = c * tl.rsqrt(total / width + eps) * c_weight
        tl.store(goal + ahead, c.to(out.dtype.element_ty), mask=before)
    if NORM:
        a_weight, b_weight = _halves(weight + still, column, half, column < half)
        scale = tl.rsqrt(total / width + eps)
        a, b = a * scale * a_weight, b * scale * b_weight
    turned_a, turned_b = a * cos_a + b * sin_a, b * cos_b + a * sin_b
    tl.store(goal + still + column, turned_a.to(out.dtype.element_ty), mask=inside)
    tl.store(goal + still + half + column, turned_b.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_back(
    first,
    side,
    tables,
    tokens,
    seq_len,
    half,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    STILL: tl.constexpr,
    MOST_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Tiles from the first, one for each program apart, backward; and sums for the weight."""
    HEADS: tl.constexpr = MOST_HEADS if MOST_HEADS < ROWS else ROWS
    (
        grad,
        x,
        weight,
        partial,
        grad_x,
        programs,
        tiles,
        heads,
        still,
        grad_batch,
        grad_seq,
        grad_head,
        x_batch,
        x_seq,
        x_head,
    ) = side
    width = still + 2 * half
    column = tl.arange(0, HALF)[None, None, :]
    if NORM:
        a_weight, b_weight = _halves(weight + still, column, half, column < half)
        a_sum = tl.zeros((ROWS // HEADS, HEADS, HALF), tl.float32)
        b_sum = tl.zeros((ROWS // HEADS, HEADS, HALF), tl.float32)
    if STILL > 0:
        ahead = tl.arange(0, STILL)[None, None, :]
        if NORM:
            c_weight = tl.load(weight + ahead, mask=ahead < still, other=0.0).to(tl.float32)
            c_sum = tl.zeros((ROWS // HEADS, HEADS, STILL), tl.float32)
    for index in range(first, tiles, programs):
        batch, position, head, number, exists = _tile(index, tokens, heads, seq_len, ROWS, HEADS)
        inside = exists & (column < half)
        source = grad + batch * grad_batch + position * grad_seq + head * grad_head + still
        goal = grad_x + number * width
        turned_a, turned_b = _halves(source, column, half, inside)
        cos_a, cos_b, sin_a, sin_b = _angles(tables, batch, position, column, half, inside)
        grad_a, grad_b = turned_a * cos_a + turned_b * sin_b, turned_b * cos_b + turned_a * sin_a
        if NORM:
            value = x + batch * x_batch + position * x_seq + head * x_head
            a, b = _halves(value + still, column, half, inside)
            total = tl.sum(a * a + b * b, axis=2, keep_dims=True)
            # d/dx of x * s(x) * w is s * (w g - n * mean(w g n)), with n = x * s.
            along = tl.sum(a * grad_a * a_weight + b * grad_b * b_weight, axis=2, keep_dims=True)
        if STILL > 0:
            before = exists & (ahead < still)
            grad_c = tl.load(source - still + ahead, mask=before, other=0.0).to(tl.float32)
            if NORM:
                c = tl.load(value + ahead, mask=before, other=0.0).to(tl.float32)
                total += tl.sum(c * c, axis=2, keep_dims=True)
                along += tl.sum(c * grad_c * c_weight, axis=2, keep_dims=True)
        if NORM:
            scale = tl.rsqrt(total / width + eps)
            share = along * scale * scale * scale / width
            a_sum += grad_a * a * scale
            b_sum += grad_b * b * scale
            grad_a = grad_a * a_weight * scale - a * share
            grad_b = grad_b * b_weight * scale - b * share
            if STILL > 0:
                c_sum += grad_c * c * scale
                grad_c = grad_c * c_weight * scale - c * share
        if STILL > 0:
            tl.store(goal + ahead, grad_c.to(grad_x.dtype.element_ty), mask=before)
        tl.store(goal + still + column, grad_a.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(goal + still + half + column, grad_b.to(grad_x.dtype.element_ty), mask=inside)
    if NORM:
        own = partial + first * width
        place = tl.arange(0, HALF)
        tl.store(own + still + place, tl.sum(tl.sum(a_sum, axis=0), axis=0), mask=place < half)
        own += half
        tl.store(own + still + place, tl.sum(tl.sum(b_sum, axis=0), axis=0), mask=place < half)
        if STILL > 0:
            place = tl.arange(0, STILL)
            own -= half
            tl.store(own + place, tl.sum(tl.sum(c_sum, axis=0), axis=0), mask=place < still)


@triton.jit
def _forward(
    q,
    k,
    tables,
    q_tiles,
    tokens,
    seq_len,
    half,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    Q_STILL: tl.constexpr,
    K_STILL: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0)
    if index < q_tiles:
        _turn(index, q, tables, tokens, seq_len, half, eps, NORM, HALF, Q_STILL, Q_HEADS, ROWS)
    else:
        index -= q_tiles
        _turn(index, k, tables, tokens, seq_len, half, eps, NORM, HALF, K_STILL, K_HEADS, ROWS)


@triton.jit
def _backward(
    q,
    k,
    tables,
    q_programs,
    tokens,
    seq_len,
    half,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    Q_STILL: tl.constexpr,
    K_STILL: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # the grid's size, which the launcher reads
):
    index = tl.program_id(0)
    if index < q_programs:
        _turn_back(index, q, tables, tokens, seq_len, half, eps, NORM, HALF, Q_STILL, Q_HEADS, ROWS)
    else:
        index -= q_programs
        _turn_back(index, k, tables, tokens, seq_len, half, eps, NORM, HALF, K_STILL, K_HEADS, ROWS)


def _forward_rule(width: int) -> Launch:
    """Tiles of 4096 values: of each thread 32 are in flight."""
    return Launch({"ROWS": max(4096 // next_power_of_2(width), 1)}, num_warps=4)


def _backward_rule(width: int) -> Launch:
    """Tiles of 2048 values, for gradients, values and sums share the registers; 4 programs on each
    of 132 processors."""
    return Launch({"ROWS": max(2048 // next_power_of_2(width), 1), "PROGRAMS": 528}, num_warps=4)


def _forward_others(width: int) -> list[Launch]:
    values = (2048, 4096, 8192)
    rows = [max(each // next_power_of_2(width), 1) for each in values]
    return [Launch({"ROWS": each}, warps) for each in rows for warps in (2, 4, 8)]


def _backward_others(width: int) -> list[Launch]:
    rows = [max(values // next_power_of_2(width), 1) for values in (1024, 2048, 4096)]
    return [
        Launch({"ROWS": each, "PROGRAMS": programs}, warps)
        for each in rows
        for programs in (264, 528, 1056)
        for warps in (2, 4, 8)
    ]


# Llama's heads, with and without norms; DeepSeek's, of which only a part is turned.
_LLAMA = {"HALF": 64, "Q_STILL": 0, "K_STILL": 0, "Q_HEADS": 32, "K_HEADS": 8}
_LATENT = {"HALF": 32, "Q_STILL": 128, "K_STILL": 0, "Q_HEADS": 128, "K_HEADS": 1}
_VARIANTS = ({**_LLAMA, "NORM": False}, {**_LLAMA, "NORM": True}, {**_LATENT, "NORM": True})
_SIZES = (128, 192)
_TABLES = "tables: (*fp32 *fp32 i32 i32 i32 i32); "
_SIZED = "tokens seq_len half: i32; eps: fp32"
FORWARD = Kernel(
    "rope.forward",
    _forward,
    "q k: (*T *T *T i32 i32 i32 i32 i32); " + _TABLES + "q_tiles: i32; " + _SIZED,
    _forward_rule,
    _SIZES,
    _VARIANTS,
    _forward_others,
)
BACKWARD = Kernel(
    "rope.backward",
    _backward,
    "q k: (*T *T *T *fp32 *T i32 i32 i32 i32 i32 i32 i32 i32 i32 i32); "
    + _TABLES
    + "q_programs: i32; "
    + _SIZED,
    _backward_rule,
    _SIZES,
    _VARIANTS,
    _backward_others,
)
KERNELS = (FORWARD, BACKWARD)


def _dense(x: Tensor) -> Tensor:
    """Numbers of a head side by side; copies if it must."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
    """Both, and the strides of a batch and of a position; all of a batch may share one table."""
    dense = _dense(cos), _dense(sin)
    strides = [(table.stride(0) if len(table) > 1 else 0, table.stride(1)) for table in dense]
    return *dense, *strides[0], *strides[1]


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _constants(q: Tensor, k: Tensor, rope_dim: int) -> dict[str, int]:
    """Compile-time sizes. Heads of a tile divide the heads: no lane idles, none is masked."""
    stills = q.shape[-1] - rope_dim, k.shape[-1] - rope_dim
    q_heads, k_heads = (x.shape[2] & -x.shape[2] for x in (q, k))
    q_still, k_still = (next_power_of_2(still) if still else 0 for still in stills)
    return {
        "HALF": next_power_of_2(rope_dim // 2),
        "Q_STILL": q_still,
        "K_STILL": k_still,
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
    }


def _tiles(x: Tensor, rows: int) -> int:
    """Of so many rows each, a row being a token's head; a tile has no more heads than rows."""
    tokens, heads = x.shape[0] * x.shape[1], x.shape[2]
    heads_of_tile = min(heads & -heads, rows)
    return triton.cdiv(tokens, rows // heads_of_tile) * (heads // heads_of_tile)


def _share_out(q_tiles: int, k_tiles: int, programs: int) -> tuple[int, int]:
    """Programs of queries and of keys, by their tiles."""
    if q_tiles + k_tiles <= programs:
        return q_tiles, k_tiles
    k_programs = max(programs * k_tiles // (q_tiles + k_tiles), 1)
    return programs - k_programs, k_programs


def _run(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    outs = _like(q), _like(k)
    (batch, seq_len), rope_dim, width = q.shape[:2], cos.shape[-1], q.shape[-1]
    if not batch * seq_len:
        return outs
    given = _dense(q), _dense(k)
    rows = FORWARD.at(width, q).blocks["ROWS"]
    q_tiles, k_tiles = (_tiles(x, rows) for x in given)
    sides = [
        (x, out, x if weight is None else weight, *_sizes(x, rope_dim), *x.stride()[:3])
        for x, out, weight in zip(given, outs, (q_weight, k_weight), strict=True)
    ]
    sizes = q_tiles, batch * seq_len, seq_len, rope_dim // 2
    arguments = *sides, _tables(cos, sin), *sizes, eps
    flags = {"NORM": q_weight is not None, **_constants(q, k, rope_dim)}
    FORWARD((q_tiles + k_tiles,), width, q, *arguments, **flags)
    return outs


def _sizes(x: Tensor, rope_dim: int) -> tuple[int, int]:
    """Heads, and how much of each isn't turned."""
    return x.shape[2], x.shape[-1] - rope_dim


def _run_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and of the weights; those are empty where there are none."""
    changes = _like(q_grad), _like(k_grad)
    (batch, seq_len), rope_dim, width = q_grad.shape[:2], cos.shape[-1], q_grad.shape[-1]
    if not batch * seq_len:
        q_sum, k_sum = _given(q_grad, q_weight, k_weight)
        return *changes, q_sum.zero_(), k_sum.zero_()
    grads, weights = (_dense(q_grad), _dense(k_grad)), (q_weight, k_weight)
    given = [g if x is None else _dense(x) for x, g in zip((q, k), grads, strict=True)]
    blocks = BACKWARD.at(width, q_grad).blocks
    tiles = _tiles(grads[0], blocks["ROWS"]), _tiles(grads[1], blocks["ROWS"])
    has_norm = q_weight is not None
    programs = _share_out(*tiles, blocks["PROGRAMS"]) if has_norm else tiles
    partials = [
        x.new_empty((count if has_norm else 0, x.shape[-1]), dtype=torch.float32)
        for x, count in zip(given, programs, strict=True)
    ]
    sides = [
        (
            *(grad, x, x if weight is None else weight, partial, change),
            *(count, number, *_sizes(x, rope_dim), *grad.stride()[:3], *x.stride()[:3]),
        )
        for grad, x, weight, partial, change, count, number in zip(
            grads, given, weights, partials, changes, programs, tiles, strict=True
        )
    ]
    sizes = programs[0], batch * seq_len, seq_len, rope_dim // 2
    arguments = *sides, _tables(cos, sin), *sizes, eps
    flags = {"NORM": has_norm, **_constants(q_grad, k_grad, rope_dim)}
    BACKWARD((sum(programs),), width, q_grad, *arguments, **flags)
    if q_weight is None or k_weight is None:
        return *changes, *_given(q_grad, q_weight, k_weight)
    q_sum, k_sum = (sums.sum(0) for sums in partials)
    return *changes, q_sum.to(q_weight.dtype), k_sum.to(k_weight.dtype)


def _given(like: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """New tensors as the weights; empty ones where there are none."""
    if q_weight is None or k_weight is None:
        return like.new_empty(0), like.new_empty(0)
    return _like(q_weight), _like(k_weight)


def _fake_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(q_grad), _like(k_grad), *_given(q_grad, q_weight, k_weight)


_forward_operator = Operator(
    "rotate", _run, lambda q, k, cos, sin, q_weight, k_weight, eps: (_like(q), _like(k))
)
_backward_operator = Operator("rotate_backward", _run_backward, _fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, q_weight, k_weight, ctx.eps = inputs
    if q_weight is None:  # the gradient doesn't ask for the values
        q = k = None
    ctx.save_for_backward(q, k, cos, sin, q_weight, k_weight)


def _gradient(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_q, grad_k, *sums = _backward_operator(q_grad, k_grad, *ctx.saved_tensors, ctx.eps)
    has_norm = ctx.saved_tensors[-1] is not None
    return grad_q, grad_k, None, None, *(sums if has_norm else (None, None)), None


rotate = Differentiable(_forward_operator, _save, _gradient)
sharding.register(_forward_operator, _backward_operator)
