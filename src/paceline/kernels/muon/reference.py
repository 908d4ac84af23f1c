"""Muon, the specification: plain torch, matrix by matrix, in any floating type.

How it works: a momentum's singular values are all made about one before it becomes the step. No
decomposition is needed: an odd polynomial of the matrix, applied a few times over, moves every
singular value between about 0.01 and 1 to near one (Newton-Schulz).

Sources: https://kellerjordan.github.io/posts/muon/ (the method, and the coefficients, which give up
exactness for speed: values end between 0.68 and 1.14, most of them), https://arxiv.org/abs/2502.16982
(weight decay, and steps of AdamW's size).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]
"""Of x, x³ and x⁵, for each application of the polynomial."""

FAST: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
_TINY = torch.finfo(torch.float32).tiny


def orthogonalize(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """(..., rows, columns) with singular values near one and the same singular vectors."""
    rows, columns = matrices.shape[-2:]
    x = normalized(matrices.mT if rows > columns else matrices)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if rows > columns else x


def normalized(matrices: Tensor) -> Tensor:
    """Divided by their norm, so that no singular value is above one; nothing stays nothing."""
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    return matrices / norms.clamp(min=_TINY)


def symmetric_product(x: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    """alpha x xᵀ + beta plus: (batch, rows, columns) and (batch, rows, rows), symmetric."""
    product = alpha * (x @ x.mT)
    return product if plus is None else product + beta * plus


def step_(
    param: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    keep: float,
    weight_decay: float,
    scale: float,
    nesterov: bool,
    coefficients: Coefficients,
) -> None:
    """Step one matrix, or a stack of them, in place.

    Args:
        keep: how much of the momentum stays.
        scale: what the step is multiplied with besides the learning rate.
    """
    momentum.lerp_(grad, 1 - keep)
    direction = grad.lerp(momentum, keep) if nesterov else momentum
    param.mul_(1 - lr * weight_decay)
    param.sub_(orthogonalize(direction, coefficients), alpha=lr * scale)
