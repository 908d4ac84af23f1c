"""Tokens to experts and back, the specification: plain torch, in any floating type.

Papers: sorted rows and grouped products https://arxiv.org/abs/2211.15841 (MegaBlocks).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.matmul.reference import activate


def sort(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Where each copy of a token goes when copies are sorted by expert, and how many go to each.

    Nothing waits for the device.

    Args:
        expert_ids: (tokens, copies), of any type of integers.
        num_experts: each of them is one.

    Returns:
        places (tokens * copies,) and counts (num_experts,), int64. Copies of one expert stay in
        order.
    """
    ids = expert_ids.flatten().long()
    # Sorting by radix goes through the bits of the type.
    keys = ids.to(torch.int16) if num_experts <= torch.iinfo(torch.int16).max else ids
    order = keys.argsort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    counts = ids.new_zeros(num_experts).scatter_add_(0, ids, torch.ones_like(ids))
    return places, counts


def spread(x: Tensor, places: Tensor, copies: int) -> Tensor:
    """Copies of the rows of x (tokens, width), each in its place: (tokens * copies, width)."""
    order = torch.empty_like(places).scatter_(
        0, places, torch.arange(len(places), device=places.device)
    )
    # Each row is picked once, so its gradient is the same to the bit each time.
    return x.unsqueeze(1).expand(-1, copies, -1).flatten(0, 1).index_select(0, order)


def collect(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum (tokens, width) of the copies of each token; weights (tokens, copies)."""
    copies = rows.index_select(0, places).unflatten(0, weights.shape)
    return (copies * weights.to(rows.dtype).unsqueeze(-1)).sum(1)


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor, activation: str) -> Tensor:
    """The activation of each group of rows times its own matrix."""
    return activate(grouped_product(rows, weights, counts), activation)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
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
