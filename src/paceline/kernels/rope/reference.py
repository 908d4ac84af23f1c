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
    return _turn(q, cos, sin, q_weight, eps), _turn(k, cos, sin, k_weight, eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is not None:
        x = rms_norm(x, weight, eps)
    rope_dim = cos.shape[-1]
    still, turned = x.split((x.shape[-1] - rope_dim, rope_dim), dim=-1)
    turned = (turned * cos + turned.roll(rope_dim // 2, dims=-1) * sin).to(x.dtype)
    return torch.cat((still, turned), dim=-1) if still.shape[-1] else turned
