"""Rotary positions with the norm before them, the specification: plain torch.

Papers: rotary positions https://arxiv.org/abs/2104.09864, norms of queries and keys
https://arxiv.org/abs/2010.04245.
"""

from torch import Tensor

from paceline.kernels.norm.reference import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise each head (where there is a weight), then turn its pairs.

    The tables may be of higher precision than x: the product is rounded once, to x's type.
    """
    if weight is not None:
        x = rms_norm(x, weight, eps)
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
