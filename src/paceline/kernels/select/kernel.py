"""Select and add up, in Triton, without an atomic: the same bits every time.

Collecting takes two passes over the values. The first counts, per block, those that reach the
threshold; sums of the counts say where each block's are to be written, which the second pass does.

Sums of what several ranks sent are cut by where they belong: a program owns a stretch of the
values and adds to it what each rank has for it, rank by rank. Positions rise, so what a rank has
for a stretch stands side by side, and no position stands there twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch
from paceline.kernels.operator import Operator

_STRETCH = 4096


@triton.jit
def _chosen(values, threshold, where, n):
    """Which values reach the threshold, or are NaN; and the values."""
    inside = where < n
    x = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
    is_below = tl.abs(x) < tl.load(threshold)
    return tl.where(inside, tl.where(is_below, 0, 1), 0), x


@triton.jit
def _count(values, threshold, counts, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    where = block * BLOCK + tl.arange(0, BLOCK)
    chosen, _ = _chosen(values, threshold, where, n)
    tl.store(counts + block, tl.sum(chosen, axis=0))


@triton.jit
def _collect(values, threshold, begins, positions, found, n, most, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    where = block * BLOCK + tl.arange(0, BLOCK)
    chosen, x = _chosen(values, threshold, where, n)
    begin = tl.load(begins + block)
    place = tl.cumsum(chosen, axis=0) - chosen
    is_kept = (chosen != 0) & (place < most - begin)
    tl.store(positions + begin + place, where, mask=is_kept)
    tl.store(found + begin + place, x.to(found.dtype.element_ty), mask=is_kept)


@triton.jit
def _add(values, positions, sent, cuts, k, num_ranks, num_cuts, BLOCK: tl.constexpr):
    stretch = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    for rank in range(num_ranks):
        first = tl.load(cuts + rank * num_cuts + stretch)
        end = tl.load(cuts + rank * num_cuts + stretch + 1)
        row = tl.cast(rank, tl.int64) * k
        for begin in range(first, end, BLOCK):
            inside = begin + columns < end
            where = tl.load(positions + row + begin + columns, mask=inside, other=0)
            x = tl.load(sent + row + begin + columns, mask=inside, other=0.0).to(tl.float32)
            old = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + where, (old + x).to(values.dtype.element_ty), mask=inside)
        # The next rank may have the same positions, in other threads.
        tl.debug_barrier()


def _rule(n: int) -> Launch:
    """16 values of each thread are in flight."""
    return Launch({"BLOCK": 2048}, num_warps=4)


def _others(n: int) -> list[Launch]:
    return [Launch({"BLOCK": block}, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


def _add_rule(k: int) -> Launch:
    """Of a hundredth of all values 40 belong to a stretch."""
    return Launch({"BLOCK": 128}, num_warps=4)


def _add_others(k: int) -> list[Launch]:
    return [Launch({"BLOCK": block}, warps) for block in (32, 64, 128, 256) for warps in (1, 2, 4)]


_SIZES = (2**24,)
_BOTH = ("bf16", "fp32")
COUNT = Kernel(
    "select.count",
    _count,
    "values: *T; threshold: *fp32; counts: *i32; n: i64",
    _rule,
    _SIZES,
    others=_others,
    dtypes=_BOTH,
)
COLLECT = Kernel(
    "select.collect",
    _collect,
    "values: *T; threshold: *fp32; begins positions: *i64; found: *T; n most: i64",
    _rule,
    _SIZES,
    others=_others,
    dtypes=_BOTH,
)
ADD = Kernel(
    "select.add",
    _add,
    "values: *T; positions: *i64; sent: *bf16; cuts: *i64; k: i64; num_ranks num_cuts: i32",
    _add_rule,
    (2**17,),
    others=_add_others,
    dtypes=_BOTH,
)
KERNELS = (COUNT, COLLECT, ADD)


def _begins(values: Tensor, threshold: Tensor) -> Tensor:
    """How many are chosen before each block, and in all: (blocks + 1,) int64."""
    n = len(values)
    block = COUNT.at(n, values).blocks["BLOCK"]
    # A block of nothing in front: its sums are the beginnings.
    counts = torch.zeros(1 + triton.cdiv(n, block), dtype=torch.int32, device=values.device)
    if n:
        COUNT((len(counts) - 1,), n, values, values, threshold, counts[1:], n)
    return counts.cumsum(0)


def _write(
    values: Tensor, threshold: Tensor, begins: Tensor, positions: Tensor, found: Tensor
) -> None:
    n = len(values)
    if n and len(positions):
        # With the count's blocks: `begins` is of those.
        block = COUNT.at(n, values).blocks["BLOCK"]
        arguments = values, threshold, begins, positions, found, n, len(positions)
        COLLECT((triton.cdiv(n, block),), n, values, *arguments)


def _run_first(values: Tensor, threshold: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    begins = _begins(values, threshold)
    positions = torch.full((most,), len(values), dtype=torch.int64, device=values.device)
    found = values.new_zeros(most)
    _write(values, threshold, begins, positions, found)
    return positions, found, begins[-1].clone()


def at_least(values: Tensor, threshold: float) -> Tensor:
    """Where magnitudes reach a threshold, or are NaN: (m,) int64, rising. The host waits for m."""
    limit = torch.full((), threshold, device=values.device)
    begins = _begins(values, limit)
    count = int(begins[-1])
    positions = torch.empty(count, dtype=torch.int64, device=values.device)
    _write(values, limit, begins, positions, values.new_empty(count))
    return positions


def _run_add(values: Tensor, positions: Tensor, sent: Tensor) -> None:
    n, (ranks, k) = len(values), positions.shape
    if not n or not positions.numel():
        return
    edges = torch.arange(0, n + _STRETCH, _STRETCH, device=values.device)
    cuts = torch.searchsorted(positions.contiguous(), edges.expand(ranks, -1).contiguous())
    arguments: tuple[Any, ...] = values, positions.contiguous(), sent.contiguous(), cuts
    grid = (len(edges) - 1,)
    ADD(grid, k, values, *arguments, k, ranks, len(edges))


def _fake_first(values: Tensor, threshold: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    whole = values.new_empty(most, dtype=torch.int64)
    return whole, values.new_empty(most), values.new_empty((), dtype=torch.int64)


first_at_least = Operator("first_at_least", _run_first, _fake_first)
scatter_add_ = Operator(
    "scatter_add_", _run_add, lambda values, positions, sent: None, mutates=("values",)
)
