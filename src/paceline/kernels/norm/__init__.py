"""Normalisation of rows: RMSNorm, and RMSNorm of a sum with the residual stream.

Forward is one pass over memory, and so is backward: gradients of x and of the weights come from
one reading of the gradient and of x. Kept for it is one number of a row. Arithmetic is in fp32
whatever the tensors' type, and results are in x's type, also where the weights are wider. Rows of
more than 32 KiB, which registers can't hold, are left to torch.

Not here: normalisation of several dimensions at once, or of any dimension but the last.
"""

from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.norm import reference

_WIDEST_BYTES = 32 * 1024


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, row by row.

    Args:
        x: (..., width).
        weight: (width,), of x's type or a wider one; None is all ones.
        eps: added to the mean square.

    Returns:
        (..., width), contiguous, of x's type.

    Raises:
        InputError: a weight is not of x's width.

    Source: https://arxiv.org/abs/1910.07467.
    """
    _check_width(x, weight)
    if not _takes(x):
        return reference.rms_norm(x, weight, eps)
    from paceline.kernels.norm import kernel

    return kernel.norm(x, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalise the sum: (rms_norm(x + residual), x + residual).

    What is normalised is the sum as it is stored, rounded to x's type. Backward, the gradient of
    the sum is added in the pass that computes the gradient of the normalisation.

    Args:
        x: (..., width).
        residual: of x's shape and type.
        weight: (width,), of x's type or a wider one; None is all ones.
        eps: added to the mean square.

    Raises:
        InputError: the weight is not of x's width, or residual not of x's shape and type.
    """
    _check_width(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise InputError(
            f"x is {tuple(x.shape)} of {x.dtype} and residual {tuple(residual.shape)} of "
            f"{residual.dtype}; add_rms_norm needs both alike: expand or cast one of them."
        )
    if not _takes(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    from paceline.kernels.norm import kernel

    normed, summed, _ = kernel.add_norm(x, residual, weight, eps)
    return normed, summed


def _takes(x: Tensor) -> bool:
    return switch.takes("norm", x) and x.shape[-1] * x.itemsize <= _WIDEST_BYTES


def _check_width(x: Tensor, weight: Tensor | None) -> None:
    if x.ndim == 0 or (weight is not None and weight.shape != x.shape[-1:]):
        given = "none" if weight is None else tuple(weight.shape)
        raise InputError(
            f"x is {tuple(x.shape)} and weight {given}; a norm is over x's last dimension, with a "
            "weight of that length: change one of them."
        )
