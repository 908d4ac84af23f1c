"""Select, in Triton, without an atomic: the same bits every time.

Collecting takes two passes over the values. The first counts, per block, those that reach the
threshold; sums of the counts say where each block's are to be written, which the second pass does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch

_BLOCK = 2048


@triton.jit
def _chosen(values, threshold, where, n):
    """1 for the values that reach the threshold, or are NaN."""
    inside = where < n
    x = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
    is_below = tl.abs(x) < tl.load(threshold)
    return tl.where(inside, tl.where(is_below, 0, 1), 0)


@triton.jit
def _count(values, threshold, counts, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    where = block * BLOCK + tl.arange(0, BLOCK)
    chosen = _chosen(values, threshold, where, n)
    tl.store(counts + block, tl.sum(chosen, axis=0))


@triton.jit
def _collect(values, threshold, begins, positions, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    where = block * BLOCK + tl.arange(0, BLOCK)
    chosen = _chosen(values, threshold, where, n)
    place = tl.load(begins + block) + tl.cumsum(chosen, axis=0) - chosen
    tl.store(positions + place, where, mask=chosen != 0)


def _rule(n: int) -> Launch:
    """16 values of each thread are in flight."""
    return Launch({"BLOCK": _BLOCK}, num_warps=4)


def _others(n: int) -> list[Launch]:
    return [Launch({"BLOCK": block}, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


def _count_rule(n: int) -> Launch:
    """Its blocks are those that will be collected."""
    return Launch({}, num_warps=4)


def _other_counts(n: int) -> list[Launch]:
    return [Launch({}, warps) for warps in (2, 8)]


_SIZES = (2**24,)
_BOTH = ("bf16", "fp32")
COUNT = Kernel(
    "select.count", _count,
    "values: *T; threshold: *fp32; counts: *i32; n: i64",
    _count_rule, _SIZES, [{"BLOCK": _BLOCK}], _other_counts, dtypes=_BOTH,
)  # fmt: skip
COLLECT = Kernel(
    "select.collect", _collect,
    "values: *T; threshold: *fp32; begins positions: *i64; n: i64",
    _rule, _SIZES, others=_others, dtypes=_BOTH,
)  # fmt: skip
KERNELS = (COUNT, COLLECT)


def at_least(values: Tensor, threshold: float) -> Tensor:
    """Where magnitudes reach a threshold, or are NaN: (m,) int64, rising. The host waits for m."""
    n, limit = len(values), torch.full((), threshold, device=values.device)
    block = COLLECT.at(n, values).blocks["BLOCK"]
    num_blocks = triton.cdiv(n, block)
    # A block of nothing in front: its sums are the beginnings.
    counts = torch.zeros(1 + num_blocks, dtype=torch.int32, device=values.device)
    if n:
        COUNT((num_blocks,), n, values, values, limit, counts[1:], n, BLOCK=block)
    begins = counts.cumsum(0)
    positions = torch.empty(int(begins[-1]), dtype=torch.int64, device=values.device)
    if len(positions):
        COLLECT((num_blocks,), n, values, values, limit, begins, positions, n)
    return positions
