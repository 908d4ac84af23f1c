"""Tokens to the experts that they chose, the experts' products, and back.

How it is put together: `permute` copies each token to the rows of its experts, `grouped_linear`
multiplies each expert's rows by that expert's weights, and `unpermute` adds up what came out. How
many rows an expert has is known on the device only, and nothing waits for it.

The grouped products are for Hopper and 16-bit types; elsewhere `grouped_linear` is torch's grouped
product. Moving rows is fast everywhere.

Not here: who chooses the experts (`models/moe.py`), and the way to other ranks (`parallel/ep.py`).
"""

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.experts import reference
from paceline.kernels.experts.reference import Order


def permute(x: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Order]:
    """Copy each token once for each of its experts, and sort the copies by expert.

    Args:
        x: (tokens, width).
        expert_ids: (tokens, copies), of any type of integers, each below num_experts.
        num_experts: at most so many may be chosen.

    Returns:
        rows (tokens * copies, width), those of the first expert first, in the order of the tokens;
        counts (num_experts,) int64, how many rows each has; the order, for `unpermute`.

    Raises:
        InputError: shapes don't fit.
    """
    if x.dim() != 2 or expert_ids.dim() != 2 or len(expert_ids) != len(x):
        raise InputError(
            f"x of shape {tuple(x.shape)} and expert_ids of shape {tuple(expert_ids.shape)} were "
            "given; give (tokens, width) and (tokens, copies)."
        )
    copies = expert_ids.shape[1]
    order, counts = reference.sort(expert_ids, num_experts)
    if not switch.takes("experts", x):
        return reference.spread(x, order, copies), counts, order
    from paceline.kernels.experts import operators

    return operators.spread(x, order.rows, copies), counts, order


def unpermute(rows: Tensor, order: Order, weights: Tensor) -> Tensor:
    """The weighted sum of each token's copies; by the kernel in fp32, rounded once.

    Args:
        rows: (tokens * copies, width), sorted by expert.
        order: as `permute` returned it.
        weights: (tokens, copies), of any floating type.

    Returns:
        (tokens, width) in the type of rows

    Raises:
        InputError: shapes don't fit.
    """
    if rows.dim() != 2 or weights.dim() != 2 or not len(rows) == len(order.rows) == weights.numel():
        raise InputError(
            f"rows of shape {tuple(rows.shape)}, an order of {len(order.rows)} and weights of "
            f"shape {tuple(weights.shape)} were given; give one row and one place for each weight "
            "(tokens, copies)."
        )
    if not switch.takes("experts", rows):
        return reference.collect(rows, order, weights)
    from paceline.kernels.experts import operators

    wide = weights.float().contiguous()
    return operators.collect(rows, order.rows, wide, weights.shape[1])


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows @ weights[expert].T, where rows are sorted by expert.

    Args:
        rows: (num_rows, K).
        weights: (experts, N, K), of rows' type.
        counts: (experts,) int64, rows of each; their sum is num_rows.

    Returns:
        (num_rows, N)

    Raises:
        InputError: shapes or types don't fit.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weights = rows.to(dtype), weights.to(dtype)
    _check(rows, weights, counts)
    if switch.takes("experts", rows):
        from paceline.kernels.experts import operators

        if operators.can_multiply(rows, weights):
            return operators.grouped_linear(rows, weights, counts)
    return reference.grouped_linear(rows, weights, counts)


def _check(rows: Tensor, weights: Tensor, counts: Tensor) -> None:
    if rows.dim() != 2 or weights.dim() != 3 or rows.shape[1] != weights.shape[2]:
        raise InputError(
            f"rows of shape {tuple(rows.shape)} and weights of shape {tuple(weights.shape)} were "
            "given; give (num_rows, K) and (experts, N, K)."
        )
    if counts.shape != weights.shape[:1]:
        raise InputError(
            f"counts of shape {tuple(counts.shape)} were given for {len(weights)} experts; "
            "give one count for each."
        )
    if rows.dtype != weights.dtype:
        raise InputError(
            f"rows in {rows.dtype} and weights in {weights.dtype} were given; convert one of them."
        )
