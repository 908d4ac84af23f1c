"""Tokens to experts and back, the specification: plain torch, in any floating type.

Papers: sorted rows and grouped products https://arxiv.org/abs/2211.15841 (MegaBlocks).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Order(NamedTuple):
    """The copies of the tokens, sorted by expert: int64 (tokens * copies,) each."""

    copies: Tensor
    """Which copy each row is: copy c of token t has the number t * copies + c."""
    rows: Tensor
    """In which row each copy is."""


def sort(expert_ids: Tensor, num_experts: int) -> tuple[Order, Tensor]:
    """Where each copy of a token goes when copies are sorted by expert, and how many go to each.

    Nothing waits for the device.

    Args:
        expert_ids: (tokens, copies), of any type of integers.
        num_experts: each of them is one.

    Returns:
        the order and counts (num_experts,) int64. Copies of one expert stay in order.
    """
    ids = expert_ids.flatten().long()
    # Sorting by radix goes through the bits of the type.
    keys = ids.to(torch.int16) if num_experts <= torch.iinfo(torch.int16).max else ids
    copies = keys.argsort(stable=True)
    numbers = torch.arange(len(copies), device=copies.device)
    rows = torch.empty_like(copies).scatter_(0, copies, numbers)
    return Order(copies, rows), occurrences(ids, num_experts)


def occurrences(values: Tensor, num: int) -> Tensor:
    """How often each of 0..num-1 occurs in the last dimension: (..., num) int64.

    Unlike `bincount` it doesn't wait for the device.
    """
    return values.new_zeros((*values.shape[:-1], num)).scatter_add_(
        -1, values, torch.ones_like(values)
    )


def spread(x: Tensor, order: Order, copies: int) -> Tensor:
    """Copies of the rows of x (tokens, width), each in its place: (tokens * copies, width)."""
    return _Pick.apply(x, order.copies // copies, order.rows, copies)


def collect(rows: Tensor, order: Order, weights: Tensor) -> Tensor:
    """The weighted sum (tokens, width) of the copies of each token; weights (tokens, copies)."""
    copies = _Pick.apply(rows, order.rows, order.copies, 1).unflatten(0, weights.shape)
    return (copies * weights.to(rows.dtype).unsqueeze(-1)).sum(1)


class _Pick(torch.autograd.Function):
    """Rows of a tensor in another order, each as often as the others; the same to the bit twice.

    Indexing alone would add up gradients in an order that threads decide.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, place: Tensor, copies: int) -> Tensor:
        """Return x[index]; `place` says where the copies of each row go, (rows * copies,)."""
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Add up the gradients of the copies of each row."""
        (place,) = ctx.saved_tensors
        return grad[place].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix.

    Args:
        rows: (num_rows, inputs), sorted by group.
        weights: (num_groups, outputs, inputs).
        counts: (num_groups,) int64, rows of each group; their sum is num_rows.

    Returns:
        (num_rows, outputs)
    """
    if _has_grouped_kernel(rows, weights):
        return F.grouped_mm(rows, weights.mT, offs=counts.cumsum(0, dtype=torch.int32))
    # All groups, also empty ones: each weight has a gradient, on every rank.
    groups = zip(rows.split(counts.tolist()), weights.unbind(), strict=True)
    return torch.cat([F.linear(group, weight) for group, weight in groups])


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch multiplies groups of these rows at once (seen in its sources, 2.11 to 2.13).

    Rows of 16 bytes; bf16 on CUDA from compute capability 8 on. CPUs also take fp32 and fp16, but
    compiled code is made for bf16 only. No rows at all is not a case for a kernel.
    """
    aligned = all(n * rows.dtype.itemsize % 16 == 0 for n in weights.shape[1:])
    if not aligned or not rows.shape[0]:
        return False
    if rows.device.type == "cuda":
        return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0)
    if torch.compiler.is_compiling():
        return rows.dtype == torch.bfloat16
    return rows.device.type == "cpu" and rows.dtype != torch.float64
