"""Noise scale of gradients: how many samples a step can use before more of them help little.

The gradient of a batch of B samples is the true one plus noise of variance tr(Sigma) / B. So the
squared norm of the whole batch's gradient and the mean of those of its parts, the micro-batches of
all ranks, tell both: their expectations are |G|^2 + tr(Sigma) / B for each its own B. The two
estimates below are unbiased, and their quotient is not: so each is smoothed by itself, over the
measurements of a run, before they are divided (`observe.noise_scale`).

A part's norm is taken as autograd hands over its gradients, before they are added to those of other
parts and before ranks exchange any: one more reading of each gradient, no memory, no message.

Parts that count unlike others (tokens that the loss counts) have their own batch sizes; the mean
over parts that is weighed by how much they count has the expectation of parts that are all alike.

Paper: https://arxiv.org/abs/1812.06162, appendix A.1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.config.job import Job
from paceline.observe.noise_scale import GRADIENT, TRACE
from paceline.train.weighted_loss import WeightedLoss

_OF_PARTS = "noise.parts"
"""The figure of a step from which the estimates are made: it is in no metrics."""


class PartNorms:
    """Squared norms of the gradients of single backward passes.

    Args:
        module: as `parallel.apply` left it; every rank has whole gradients in a backward pass.
        every: steps between measurements.
    """

    def __init__(self, module: nn.Module, every: int) -> None:
        self._every, self._is_on = every, False
        self._squares: list[Tensor] = []
        self._hooked: set[nn.Parameter] = set()
        units = [each for each in module.modules() if isinstance(each, FSDPModule)]
        for unit in units:
            # What FSDP2 has gathered are other parameters, which stand in the modules from the
            # first forward pass on. Its own hook, which puts them there, comes before.
            unit.register_forward_pre_hook(self._hook_gathered)
        if not units:
            self._hook(module.parameters())

    def begin(self, index: int) -> bool:
        """Whether step `index` (from 0) is measured."""
        self._is_on = index % self._every == 0
        return self._is_on

    def of_part(self, part: WeightedLoss, scale: Tensor, num_parts: int) -> WeightedLoss:
        """A micro-batch after its backward pass, with its squared norm among its figures.

        Args:
            scale: what its loss was multiplied by, besides its weight.
            num_parts: what it was divided by.
        """
        squares = torch.stack(self._squares).sum(dtype=torch.float64)
        self._squares.clear()
        to_mean = part.weight * scale.double() / num_parts
        figures = {**part.figures, _OF_PARTS: squares / to_mean**2}
        return replace(part, figures=figures)

    @torch.compiler.disable
    def _hook_gathered(self, unit: nn.Module, _inputs: Any) -> None:
        if self._is_on:
            self._hook(unit.parameters())

    def _hook(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p.requires_grad and p not in self._hooked:
                self._hooked.add(p)
                p.register_hook(self._take)

    def _take(self, gradient: Tensor) -> None:
        if self._is_on:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._squares.append(torch.linalg.vector_norm(gradient, dtype=dtype).square())


@dataclass(frozen=True)
class NoiseEstimates:
    """Of |G|^2 and tr(Sigma), from the two norms of a step."""

    batch: int
    """Samples of a step."""
    num_parts: int
    """Micro-batches of all ranks."""

    @classmethod
    def of(cls, job: Job) -> "NoiseEstimates":
        """As a Job cuts its batch."""
        return cls(job.train.global_batch, job.train.global_batch // job.micro_batch)

    def among(self, figures: Mapping[str, float], grad_norm: float) -> dict[str, float]:
        """Figures of a step as metrics have them: with the two estimates where it was measured.

        Args:
            figures: of the step.
            grad_norm: of the whole batch's gradient.
        """
        made = dict(figures)
        of_parts = made.pop(_OF_PARTS, None)
        if of_parts is not None:
            of_whole, small = grad_norm**2, self.batch / self.num_parts
            made[GRADIENT] = (self.batch * of_whole - small * of_parts) / (self.batch - small)
            made[TRACE] = (of_parts - of_whole) / (1 / small - 1 / self.batch)
        return made
