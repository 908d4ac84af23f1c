"""Batch normalisation by statistics that several ranks share, in plain torch.

The mean of the ranks' means is the mean over all their values, where each has as many; so is the
mean of their squares about it. Both means are differentiable, so that gradients are those of one
rank that has all values.

Source: https://arxiv.org/abs/1502.03167, over all ranks.
"""

from typing import Protocol

import torch
from torch import Tensor


class MeanOverRanks(Protocol):
    """Averages over ranks, gradients too; all of them must call alike."""

    num_ranks: int

    def __call__(self, values: Tensor) -> Tensor:
        """The mean over the ranks of values of any shape, the same on all."""
        ...


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    mean_over_ranks: MeanOverRanks,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in training, channel by channel.

    Args:
        x: (batch, channels, ...), of one shape on all ranks.
        weight: (channels,); None is all ones.
        bias: (channels,); None is all zeros.
        running_mean: (channels,), moved towards the mean by `momentum`; None: no record is kept.
        running_var: likewise, of the variance (over n - 1).
        momentum: share of the batch in the running statistics.
        eps: added to the variance.
        mean_over_ranks: of the ranks that share the statistics.

    Returns:
        of x's shape and type; the arithmetic is in fp32 at least.
    """
    others, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = mean_over_ranks(wide.mean(others))
    centred = wide - mean.view(shape)
    variance = mean_over_ranks(centred.square().mean(others))
    number = x.numel() // x.shape[1] * mean_over_ranks.num_ranks
    with torch.no_grad():
        for running, batch in (running_mean, mean), (running_var, variance * number / (number - 1)):
            if running is not None:
                running.lerp_(batch.to(running.dtype), momentum)
    factor = torch.rsqrt(variance + eps)
    out = centred * (factor if weight is None else factor * weight).view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.dtype)
