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
from paceline.kernels.cost import KernelCost
from paceline.kernels.experts import reference
from paceline.kernels.experts.reference import Order

SHAPES = ((8192, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2), (8192, 7168, 2048, 256, 8))
"""Tokens, width, inner width, experts and copies, of layers that people train."""


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


def route_forward_cost(tokens: int, width: int, copies: int, item_size: int) -> KernelCost:
    """`permute` and `unpermute`: tokens and their copies, each read and written once."""
    return KernelCost(2 * (1 + copies) * tokens * width * item_size)


def route_backward_cost(tokens: int, width: int, copies: int, item_size: int) -> KernelCost:
    """As forward, and the copies are read once more, for the gradients of their weights."""
    return KernelCost((2 + 3 * copies) * tokens * width * item_size)


def grouped_linear_forward_cost(
    rows: int, columns: int, inner: int, experts: int, item_size: int
) -> KernelCost:
    """Read rows and the weights of all experts, write the result."""
    values = rows * inner + experts * columns * inner + rows * columns
    return KernelCost(values * item_size, 2 * rows * columns * inner)


def grouped_linear_backward_cost(
    rows: int, columns: int, inner: int, experts: int, item_size: int
) -> KernelCost:
    """Two products, each of which reads two matrices and writes one."""
    values = 2 * (rows * columns + experts * columns * inner + rows * inner)
    return KernelCost(values * item_size, 4 * rows * columns * inner)


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
