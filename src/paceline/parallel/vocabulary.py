"""Embedding and loss over a vocabulary that the tp ranks share out.

The embedding's weight and the logits are the largest tensors of a small model; neither is ever
whole on a rank, forward or backward. An id's row is looked up by the one rank that has it. The loss
of a token needs three numbers from each rank: its largest logit, its sum of exponentials, and the
target's logit where it has that.

Why not DTensor's own rules: its embedding makes the gradient of the *whole* table on every rank and
then cuts it (seen in torch 2.13), and its `loss_parallel` must be entered around every backward
pass, a pipeline's included.

Paper: https://arxiv.org/abs/1909.08053 (sections 3 and 5).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.kernels import loss, switch

IGNORED = loss.IGNORED
"""The target that leaves a token out of the loss, as in `torch.nn.functional.cross_entropy`."""


def look_up(embedding: nn.Module, ids: Tensor) -> Tensor:
    """Return the rows that this rank has, and zeros for the ids of others.

    Args:
        embedding: its weight is a DTensor (vocab, hidden), split over rows.
        ids: (batch, seq), the same on every rank.

    Returns:
        (batch, seq, hidden); the sum over the ranks is the embedding.
    """
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local()  # (own_vocab, hidden)
    own, is_own = _own_ids(ids, weight.shape[0], weight.device_mesh)
    return F.embedding(own, local) * is_own.unsqueeze(-1)


def cross_entropy(logits: DTensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per token, computed in fp32 (in fp64 for fp64 logits).

    Args:
        logits: (batch, seq, vocab), split over the vocabulary on a one-dimensional mesh.
        targets: (batch, seq) token ids, the same on every rank; -100 leaves a token out of the
            mean.

    Returns:
        () the same on every rank.
    """
    mesh, local = logits.device_mesh, logits.to_local()
    if switch.takes("loss", local):
        first_row = mesh.get_local_rank() * local.shape[-1]
        return loss.cross_entropy_parallel(
            local, targets, first_row, mesh.get_group(), inplace=True
        )
    own, is_own = _own_ids(targets, logits.shape[-1], mesh)
    losses = _TokenLosses.apply(local, own, is_own, mesh.get_group())
    counted = targets != IGNORED
    return torch.where(counted, losses, 0).sum() / counted.sum()


class _TokenLosses(torch.autograd.Function):
    """log(sum of exponentials) - logit of the target, for each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, own: Tensor, is_own: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        scores = logits if logits.dtype == torch.float64 else logits.float()
        largest = scores.amax(-1)  # (batch, seq)
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_total, own, is_own = ctx.saved_tensors
        wide = logits.to(log_total.dtype)
        change = (wide - log_total.unsqueeze(-1)).exp_()  # probabilities (batch, seq, own_vocab)
        change.scatter_add_(-1, own.unsqueeze(-1), -is_own.unsqueeze(-1).to(change.dtype))
        return change.mul_(grad.unsqueeze(-1)).to(logits.dtype), None, None, None


def _own_ids(ids: Tensor, vocab_size: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Ids counted from this rank's first row (0 where another rank has them), and whose they are.

    Rows are split evenly: rank r has those from r x vocab / tp on.
    """
    num_own = vocab_size // mesh.size()
    own = ids - mesh.get_local_rank() * num_own
    is_own = (own >= 0) & (own < num_own)
    return torch.where(is_own, own, 0), is_own
