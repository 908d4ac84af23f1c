"""Embedding and loss over a vocabulary that the tp ranks share out.

The embedding's weight and the logits are the largest tensors of a small model; neither is ever
whole on a rank, forward or backward. An id's row is looked up by the one rank that has it.

Why not DTensor's own rules: its embedding makes the gradient of the *whole* table on every rank and
then cuts it (seen in torch 2.13), and its `loss_parallel` must be entered around every backward
pass, a pipeline's included.

Paper: https://arxiv.org/abs/1909.08053 (sections 3 and 5).
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.kernels import loss
from paceline.kernels.loss.reference import own_ids, token_losses, token_losses_parallel

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
    first = weight.device_mesh.get_local_rank() * _most_rows(weight, 0)
    if not len(local):  # there are fewer rows than ranks
        return local.sum() + local.new_zeros(*ids.shape, local.shape[1])
    own, is_own = own_ids(ids, first, len(local))
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
    local = logits.to_local()
    return loss.cross_entropy_parallel(local, targets, *_place(logits), inplace=True)


def losses_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token, as `cross_entropy` takes the mean of.

    Args:
        logits: (batch, seq, vocab); a DTensor split over the vocabulary, or whole.
        targets: (batch, seq), as in `cross_entropy`.

    Returns:
        (batch, seq), the same on every rank; 0 for tokens that are left out.
    """
    if not isinstance(logits, DTensor):
        return token_losses(logits, targets)
    return token_losses_parallel(logits.to_local(), targets, *_place(logits))


@torch.no_grad()
def losses_of_samples(logits: Tensor, targets: Tensor) -> Tensor:
    """Sums of `losses_of_tokens` over each sample, without a gradient: (batch,).

    They are computed sample by sample: the logits are the largest tensor there is, and what this
    takes besides is that of one sample.
    """
    losses, local = token_losses, logits
    if isinstance(logits, DTensor):
        first_row, group = _place(logits)
        losses = partial(token_losses_parallel, first_row=first_row, group=group)
        local = logits.to_local()
    return torch.stack([losses(*pair).sum() for pair in zip(local, targets, strict=True)])


def _place(logits: DTensor) -> tuple[int, dist.ProcessGroup]:
    """The first row of the vocabulary that this rank has logits of, and who has the others."""
    mesh = logits.device_mesh
    return mesh.get_local_rank() * _most_rows(logits, -1), mesh.get_group()


def on_first_rank(logits: Tensor) -> Tensor:
    """Whole logits, on the first rank of those that share out the vocabulary.

    Args:
        logits: (batch, seq, vocab); a DTensor split over the vocabulary, or whole.

    Returns:
        the same, whole; on the other ranks their own part.
    """
    if not isinstance(logits, DTensor):
        return logits
    group, own = logits.device_mesh.get_group(), logits.to_local()
    if not own.numel():
        return own
    own = F.pad(own, (0, _most_rows(logits, -1) - own.shape[-1]))
    parts = [torch.empty_like(own) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(own, parts, group=group, group_dst=0)
    return own if parts is None else torch.cat(parts, -1)[..., : logits.shape[-1]]


def _most_rows(shared: DTensor, dim: int) -> int:
    """What each rank has of a dimension that they share out, but for the last ones."""
    return -(-shared.shape[dim] // shared.device_mesh.size())
