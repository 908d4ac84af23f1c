"""Bias, dropout and residual in one pass.

No mask is kept: it is a function of the seed, and backward computes it anew. The gradient of the
residual stream is the result's own, so backward is one pass too, which also sums the bias's.
"""

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.cost import Cost
from paceline.kernels.residual import reference

SHAPES = ((8192, 1024), (8192, 4096), (8192, 12288))
"""Tokens and width."""


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int | Tensor
) -> Tensor:
    """residual + dropout(x + bias).

    Args:
        x: (..., width).
        bias: (width,), of x's type or another; None is all zeros.
        residual: of x's shape and type.
        p: share of values that are dropped, rounded to a multiple of 2^-16; the others are divided
            by 1 - p. With 0 nothing is drawn.
        seed: an integer of 64 bits, or a tensor of one (int64, on x's device), which a CUDA graph
            can be replayed with. The same seed drops the same places of the same shape: take
            another for every layer and step.

    Returns:
        (..., width), contiguous, of x's type.

    Raises:
        InputError: shapes or types don't fit, or p is no share.
    """
    _check(x, bias, residual, p)
    if isinstance(seed, int):
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    if not switch.takes("residual", x):
        return reference.bias_dropout_residual(x, bias, residual, p, seed)
    from paceline.kernels.residual import kernel

    return kernel.bias_dropout_residual(x, bias, residual, p, seed)


def forward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read x and the residual stream, write the result."""
    return Cost(3 * rows * width * item_size)


def backward_cost(rows: int, width: int, item_size: int) -> Cost:
    """Read the gradient, write the gradient of x."""
    return Cost(2 * rows * width * item_size)


def _check(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise InputError(
            f"x is {tuple(x.shape)} of {x.dtype} and residual {tuple(residual.shape)} of "
            f"{residual.dtype}; both must be alike: expand or cast one of them."
        )
    if x.ndim == 0 or (bias is not None and bias.shape != x.shape[-1:]):
        given = "none" if bias is None else tuple(bias.shape)
        raise InputError(
            f"x is {tuple(x.shape)} and bias {given}; x needs a last dimension, and the bias its "
            "length: change one of them."
        )
    if not 0 <= p <= 1:
        raise InputError(f"p = {p} was given; it is the share that is dropped: from 0 to 1.")
