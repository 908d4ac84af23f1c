"""Batch normalisation, residual and ReLU of images in channels-last memory.

Training takes two launches each way, and can't take one: a channel's statistics need every image.
Forward, the first finds each program's means and sums of squares about them (put together by Chan's
formula, so a mean that is large against the deviation costs nothing); the second normalises, adds
the residual, and cuts off below zero. Backward, the first sums the gradients of weight and bias,
the second writes the gradients of x and of the residual.

Where ReLU cut off is kept as a bit per value. Backward needs it in both launches: a bit is a
sixteenth of reading the saved result (of 16 bits a value), and it is right where recomputing the
sign from x, which would need the residual too, could round to the other side.

In evaluation the normalisation is a factor and a shift per channel: `fold` puts them into the
convolution before it, and nothing is left to launch. Unfolded, evaluation is plain torch.

Source: https://arxiv.org/abs/1502.03167.
"""

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.batch_norm import reference, shared


def batch_norm_act(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
    mean_over_ranks: shared.MeanOverRanks | None = None,
) -> Tensor:
    """relu((x - mean) / sqrt(variance + eps) * weight + bias + residual), channel by channel.

    Args:
        x: (batch, channels, height, width). Channels-last memory is read where it lies, any other
            is copied.
        residual: of x's shape and type; None adds nothing.
        weight: (channels,).
        bias: (channels,), of weight's type.
        running_mean: (channels,); in training, moved towards the batch's mean by `momentum`; in
            evaluation, used in its place. None: no record is kept.
        running_var: likewise, of the variance (over n - 1).
        training: whether the batch's own statistics are used.
        momentum: share of the batch in the running statistics.
        eps: added to the variance.
        relu: whether results below zero become zero.
        mean_over_ranks: of ranks whose values count together in training; None: this rank's alone.

    Returns:
        of x's shape and type; channels-last where kernels run.

    Raises:
        InputError: shapes don't fit, training has fewer than two values a channel, or evaluation
            no running statistics.
    """
    _check(x, residual, weight, bias)
    if training and x.numel() < 2 * x.shape[1]:
        raise InputError(
            f"x is {tuple(x.shape)}: a value per channel or less; batch statistics need two: use a "
            "larger batch, or training=False."
        )
    if not training and (running_mean is None or running_var is None):
        raise InputError(
            "running_mean or running_var is None and training=False; evaluation needs both: give "
            "them, or use the batch's own statistics with training=True."
        )
    if training and mean_over_ranks is not None:
        kept = (running_mean, running_var, momentum, eps)
        out = shared.batch_norm(x, weight, bias, *kept, mean_over_ranks)
        return reference.follow(out, residual, relu)
    if not (training and switch.takes("batch_norm", x)):
        return reference.batch_norm_act(
            x, residual, weight, bias, running_mean, running_var, training, momentum, eps, relu
        )
    from paceline.kernels.batch_norm import kernel

    out, _, mean, variance, _ = kernel.batch_norm(x, residual, weight, bias, eps, relu)
    _follow(running_mean, mean, momentum)
    _follow(running_var, variance, momentum)
    return out


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor) -> None:
    if x.ndim != 4:
        raise InputError(
            f"x is {tuple(x.shape)}; batch_norm_act needs (batch, channels, height, width): view x "
            "as that, with ones where it has no such dimension."
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise InputError(
            f"x is {tuple(x.shape)} of {x.dtype} and residual {tuple(residual.shape)} of "
            f"{residual.dtype}; both must be alike: expand or cast one of them."
        )
    if weight.shape != x.shape[1:2] or bias.shape != weight.shape or bias.dtype != weight.dtype:
        raise InputError(
            f"x has {x.shape[1]} channels, weight is {tuple(weight.shape)} of {weight.dtype} and "
            f"bias {tuple(bias.shape)} of {bias.dtype}; weight and bias must be alike, with one "
            "value a channel: change what differs."
        )


def _follow(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.lerp_(batch.to(running.dtype), momentum)
