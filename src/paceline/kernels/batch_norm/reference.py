"""Batch normalisation with residual and ReLU, the specification: torch's own operators, in a row.

Paper: https://arxiv.org/abs/1502.03167.
"""

import torch.nn.functional as F
from torch import Tensor


def batch_norm_act(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> Tensor:
    """relu(batch_norm(x) + residual); updates the running statistics in training."""
    out = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return follow(out, residual, relu)


def follow(out: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """What follows the norm: the residual sum, and ReLU."""
    if residual is not None:
        out = out + residual
    return F.relu(out) if relu else out
