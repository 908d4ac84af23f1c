"""Cross-entropy, the specification: plain torch, in fp64 for fp64 logits, else in fp32.

Paper: vocabularies shared out https://arxiv.org/abs/1909.08053 (section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The target that leaves a token out, as in `torch.nn.functional.cross_entropy`."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of (..., vocab)."""
    rows, targets = _wide(logits).reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    return F.cross_entropy(rows, targets, ignore_index=IGNORED)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits hidden @ weight.T."""
    return cross_entropy(F.linear(hidden, weight), targets)


def cross_entropy_parallel(
    logits: Tensor,
    targets: Tensor,
    first_row: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Cross-entropy of logits of which each rank has some columns, from first_row on."""
    rows, targets = _wide(logits).reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    largest = rows.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    own = targets - first_row
    is_own = (own >= 0) & (own < rows.shape[-1]) & (targets != IGNORED)
    chosen = rows.gather(-1, torch.where(is_own, own, 0).unsqueeze(-1)).squeeze(-1)
    total = (rows - largest.unsqueeze(-1)).exp().sum(-1)
    total, chosen = _SumOverRanks.apply(torch.stack([total, torch.where(is_own, chosen, 0)]), group)
    counted = targets != IGNORED
    losses = torch.where(counted, total.log() + largest - chosen, 0)
    return losses.sum() / counted.sum()  # NaN where nothing counts


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks of which each computes the same loss: the gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
