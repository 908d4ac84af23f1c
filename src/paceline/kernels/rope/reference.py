"""Norms of queries and keys and their rotary positions, the specification: plain torch.

Papers: rotary positions https://arxiv.org/abs/2104.09864, norms of queries and keys
https://arxiv.org/abs/2010.04245.
"""

import torch
from torch import Tensor

from paceline.kernels.norm.reference import rms_norm


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalise each head (where there are weights), then turn its last numbers."""
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + rope_dim/2) of each head's last rope_dim numbers.

    Args:
        x: (batch, seq, heads, head_dim).
        cos: (1 or batch, seq, 1, rope_dim).
        sin: of that shape, the first half negated. Both may be of higher precision than x: the
            product is rounded once, to x's type.
    """
    rope_dim = cos.shape[-1]
    still, turned = x.split((x.shape[-1] - rope_dim, rope_dim), dim=-1)
    turned = (turned * cos + turned.roll(rope_dim // 2, dims=-1) * sin).to(x.dtype)
    return torch.cat((still, turned), dim=-1) if still.shape[-1] else turned
