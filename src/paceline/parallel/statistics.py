"""Statistics of batch norms on several data ranks.

A rank's norms see its own micro-batches. What they keep for evaluation, the running statistics, is
averaged over the ranks after every step: all ranks' samples count, and all ranks have the same.
Running means are then those of all samples; running variances lack by how much the ranks' means
differ.

With `layout.sync_batch_norm` training, too, normalises by the statistics of all ranks'
micro-batches, as one rank would that has them all: the same results, for two small sums over the
ranks per norm and pass.

Paper: https://arxiv.org/abs/1502.03167.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.rendezvous import collective_timeout
from paceline.config.errors import InputError
from paceline.kernels.batch_norm import shared
from paceline.parallel.forward import compute_with, replace_forward

RUNNING = ("running_mean", "running_var")
"""How the buffers are called that are averaged."""


class RunningStatistics:
    """The running statistics of a module's norms, of all ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [b for name, b in module.named_buffers() if name.endswith(RUNNING)]

    @torch.no_grad()
    def average(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace each rank's by the mean over a group (None: all ranks), with the same bits on
        each."""
        if not self._held or not dist.is_initialized():
            return
        # In fp32 at least: cat takes the widest type.
        values = torch.cat(
            [each.to(torch.promote_types(each.dtype, torch.float32)) for each in self._held]
        )
        dist.all_reduce(values, group=group)
        values /= dist.get_world_size(group)
        means = values.split([len(each) for each in self._held])
        torch._foreach_copy_(self._held, list(means))


def synchronise(module: nn.Module, is_alone: bool) -> None:
    """Let the batch norms of a module normalise by the statistics of all ranks, in place.

    Args:
        module: before it is sharded or replicated.
        is_alone: there is one rank, which has all samples.

    Raises:
        InputError: the module has no batch norms.
    """
    norms: list[Any] = [each for each in module.modules() if _is_norm(each)]
    if not norms:
        raise InputError(
            f"layout.sync_batch_norm = true has nothing to work on: {type(module).__name__} has no "
            "batch norms; leave it out."
        )
    if is_alone:
        return
    # A group of its own: gradients of later layers are on their way meanwhile.
    mean = _RankMean(dist.new_group(timeout=collective_timeout()))
    for norm in norms:
        if isinstance(norm, _BatchNorm):
            replace_forward(norm, _synchronised(norm, mean))
        else:
            norm.mean_over_ranks = mean


def keep_type(module: nn.Module) -> None:
    """Let torch's batch norms compute with weights of their statistics' type, in place.

    FSDP2 hands weights over in the type of the arithmetic and leaves buffers alone; torch's
    operator takes narrow values with wide weights and statistics, but not a mixture of these.
    """
    for norm in module.modules():
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            compute_with(norm, partial(Tensor.to, dtype=norm.running_mean.dtype))


def _is_norm(module: Any) -> bool:
    """One of torch's, or of a network of ours that takes whom it averages with as an argument."""
    return isinstance(module, _BatchNorm) or hasattr(module, "mean_over_ranks")


def _synchronised(norm: _BatchNorm, mean: "_RankMean") -> Callable[[Tensor], Tensor]:
    """The forward pass of one of torch's norms, which may be of 1, 2 or 3 dimensions."""
    alone = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not norm.training:
            return alone(x)
        momentum = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if momentum is None:  # then all batches count alike
                momentum = 1 / norm.num_batches_tracked.item()
        kept = (norm.running_mean, norm.running_var, momentum or 0.0, norm.eps)
        return shared.batch_norm(x, norm.weight, norm.bias, *kept, mean)

    return forward


class _RankMean:
    """A mean over the ranks of a group; so is that of its gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.num_ranks = group, group.size()

    @torch.compiler.disable
    def __call__(self, values: Tensor) -> Tensor:
        """The mean over the ranks, of values of any shape."""
        mean: Tensor = _RankMeanFunction.apply(values, self._group)
        return mean


class _RankMeanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return mean_over_ranks(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean_over_ranks(gradient, ctx.group), None


def mean_over_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over a group's ranks of values of any shape; none of their gradients."""
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total / group.size()
