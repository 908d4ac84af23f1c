"""Ema: an exponential moving average of the weights (https://arxiv.org/abs/1803.05407 averages
equally; https://doi.org/10.1137/0330046 is the idea).

After each step mean <- mean + (1 - decay) (weights - mean), as torch's `get_ema_multi_avg_fn` does,
from the weights after the first step on. Evaluations use the mean, and so does whoever gets the
trained module; training goes on from the weights themselves. Each rank averages its own shards, in
fp32 where parameters have 16 bits. Buffers, as running statistics, are those of the last step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.errors import InputError

State = dict[str, Any]
EMA_SECTION = "ema"
"""Of a checkpoint."""


class Ema:
    """The mean of the weights of one rank."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        if not 0 <= decay < 1:
            raise InputError(f"ema = {decay}: give the decay, from 0 on and below 1, as 0.999.")
        self._decay = decay
        self._parameters = dict(named)
        self._means = {
            name: p.detach().to(average_dtype(p.dtype), copy=True)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, index: int, bad: Tensor) -> None:
        """Follow step `index` (from 0), unless it was skipped: () bool."""
        share = 1.0 if index == 0 else 1 - self._decay
        weight = torch.where(bad, 0.0, torch.tensor(share, dtype=torch.float64, device=bad.device))
        for mean, parameter in self._pairs():
            mean.lerp_(parameter.to(mean.dtype), weight.to(mean))

    @torch.no_grad()
    def take(self) -> None:
        """Make the parameters the mean."""
        for mean, parameter in self._pairs():
            parameter.copy_(mean)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Parameters that are the mean, and afterwards what they were."""
        kept = [parameter.clone() for _, parameter in self._pairs()]
        self.take()
        try:
            yield
        finally:
            for (_, parameter), before in zip(self._pairs(), kept, strict=True):
                parameter.copy_(before)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and parameter, of each the part on this rank."""
        return [
            (local_part(self._means[name]), local_part(parameter.detach()))
            for name, parameter in self._parameters.items()
        ]

    def describe(self) -> str:
        """What is kept, a sentence for a person."""
        return f"A mean of the weights is kept, with decay {self._decay:g}, and evaluated."

    def state(self) -> State:
        """What a checkpoint keeps: the live tensors, by the names of their parameters."""
        return dict(self._means)

    def targets(self, saved: Iterable[str], _room: Callable[[str], Tensor]) -> State:
        """Where to load what was saved."""
        return self.state() if any(True for _ in saved) else {}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Go on with what `targets` gave, now filled; without it, from the weights as they are."""
        if not state:
            for mean, parameter in self._pairs():
                mean.copy_(parameter)


def average_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a parameter is averaged: its own, but for those of 16 bits."""
    return dtype if dtype.itemsize >= 4 else torch.float32
