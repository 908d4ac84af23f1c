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
    logits: Tensor, targets: Tensor, first_row: int, group: dist.ProcessGroup
) -> Tensor:
    """Cross-entropy of logits of which each rank has some columns, from first_row on.

    Three numbers a token go between the ranks: the largest logit of each, its sum of exponentials,
    and the target's logit where it has that.
    """
    losses = token_losses_parallel(logits, targets, first_row, group)
    return losses.sum() / (targets != IGNORED).sum()  # NaN where nothing counts


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target (...) by logits (..., vocab); 0 where it doesn't
    count."""
    rows, flat = _wide(logits).reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    losses = F.cross_entropy(rows, flat, ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)


def token_losses_parallel(
    logits: Tensor, targets: Tensor, first_row: int, group: dist.ProcessGroup
) -> Tensor:
    """The same of logits of which each rank has some columns (see `cross_entropy_parallel`)."""
    own, is_own = own_ids(targets.long(), first_row, logits.shape[-1])
    losses = _TokenLosses.apply(logits, own, is_own, group)
    return torch.where(targets != IGNORED, losses, 0)


def own_ids(ids: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Ids counted from a rank's first row (0 where another rank has them), and which it has."""
    own = ids - first_row
    is_own = (own >= 0) & (own < num_rows)
    return torch.where(is_own, own, 0), is_own


class _TokenLosses(torch.autograd.Function):
    """log(sum of exponentials) - logit of the target, for each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, own: Tensor, is_own: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        scores = _wide(logits)
        largest = scores.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        total = (scores - largest.unsqueeze(-1)).exp().sum(-1)
        # Not times is_own: a logit of -inf that isn't the target's would make the loss NaN.
        target = torch.where(is_own, scores.gather(-1, own.unsqueeze(-1)).squeeze(-1), 0)
        sums = torch.stack([total, target])
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log() + largest
        ctx.save_for_backward(logits, log_total, own, is_own)
        return log_total - sums[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_total, own, is_own = ctx.saved_tensors
        wide = logits.to(log_total.dtype)
        change = (wide - log_total.unsqueeze(-1)).exp_()  # probabilities (..., own_vocab)
        change.scatter_add_(-1, own.unsqueeze(-1), -is_own.unsqueeze(-1).to(change.dtype))
        return change.mul_(grad.unsqueeze(-1)).to(logits.dtype), None, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
