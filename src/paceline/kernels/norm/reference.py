"""Normalisation of rows, the specification: plain torch, in any floating type.

Paper: RMSNorm https://arxiv.org/abs/1910.07467.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x over the root of the mean square of its row, times weight; in x's type."""
    width = x.shape[-1:]
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, width, weight, eps)
    # As torch computes it, but without its warning that it has no fused form for two types.
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), width, weight.to(wide), eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x + residual, normalised; and x + residual."""
    summed = x + residual
    return rms_norm(summed, weight, eps), summed
