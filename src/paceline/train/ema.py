"""Means of the weights.

Evaluations use the mean, and so does whoever gets the trained module; training goes on from the
weights themselves. Checkpoints keep it in a section of its own, which exports prefer. Buffers, as
running statistics, are those of the last step.

`Ema` is an exponential moving average (https://arxiv.org/abs/1803.05407 averages equally;
https://doi.org/10.1137/0330046 is the idea). After each step
mean <- mean + (1 - decay) (weights - mean), as torch's `get_ema_multi_avg_fn` does, from the
weights after the first step on. Each rank averages its own shards, in fp32 where parameters have 16
bits. `ScheduleFreeMean` is the one that a schedule-free optimizer can compute from its state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.errors import InputError
from paceline.train.optimizers import RuledOptimizer
from paceline.train.sharded_state import like

State = dict[str, Any]


class WeightMean(ABC):
    """A mean of the weights of one rank."""

    @abstractmethod
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and parameter, of each the part on this rank."""

    @abstractmethod
    def update(self, index: int, bad: Tensor) -> None:
        """Follow step `index` (from 0), unless it was skipped: () bool."""

    @abstractmethod
    def describe(self) -> str:
        """What is kept, a sentence for a person."""

    @abstractmethod
    def state(self) -> State:
        """What a checkpoint keeps, by the names of the parameters."""

    @abstractmethod
    def targets(self, saved: Iterable[str], room: Callable[[str], Tensor]) -> State:
        """Where to load what was saved."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Go on with what `targets` gave, now filled."""

    @torch.no_grad()
    def take(self) -> None:
        """Make the parameters the mean."""
        for mean, parameter in self.pairs():
            parameter.copy_(mean)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Parameters that are the mean, and afterwards what they were."""
        kept = [parameter.clone() for _, parameter in self.pairs()]
        self.take()
        try:
            yield
        finally:
            for (_, parameter), before in zip(self.pairs(), kept, strict=True):
                parameter.copy_(before)


class Ema(WeightMean):
    """The moving average of the weights of one rank."""

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
        """See `WeightMean`."""
        share = 1.0 if index == 0 else 1 - self._decay
        weight = torch.where(bad, 0.0, torch.tensor(share, dtype=torch.float64, device=bad.device))
        for mean, parameter in self.pairs():
            mean.lerp_(parameter.to(mean.dtype), weight.to(mean))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """See `WeightMean`."""
        return [
            (local_part(self._means[name]), local_part(parameter.detach()))
            for name, parameter in self._parameters.items()
        ]

    def describe(self) -> str:
        """See `WeightMean`."""
        return f"A mean of the weights is kept, with decay {self._decay:g}, and evaluated."

    def state(self) -> State:
        """See `WeightMean`."""
        return dict(self._means)

    def targets(self, saved: Iterable[str], _room: Callable[[str], Tensor]) -> State:
        """See `WeightMean`."""
        return self.state() if any(True for _ in saved) else {}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Go on with what `targets` gave, now filled; without it, from the weights as they are."""
        if not state:
            for mean, parameter in self.pairs():
                mean.copy_(parameter)


class ScheduleFreeMean(WeightMean):
    """That of a schedule-free optimizer, computed from its state when it is asked for."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], optimizer: RuledOptimizer
    ) -> None:
        self._named = [(name, p) for name, p in named if p.requires_grad]
        self._optimizer = optimizer

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """See `WeightMean`."""
        means = self._optimizer.means()
        return [(means[p], local_part(p.detach())) for _, p in self._named]

    def describe(self) -> str:
        """See `WeightMean`."""
        return "The optimizer's mean of the weights is evaluated."

    def update(self, index: int, bad: Tensor) -> None:
        """Nothing: the optimizer's step does it."""

    def targets(self, saved: Iterable[str], _room: Callable[[str], Tensor]) -> State:
        """Room that nobody looks at: the mean follows from the optimizer's state."""
        if not any(True for _ in saved):
            return {}
        return {
            name: like(p, torch.empty_like(local_part(p.detach()), dtype=average_dtype(p.dtype)))
            for name, p in self._named
        }

    def load(self, state: State) -> None:
        """Nothing."""

    def state(self) -> State:
        """See `WeightMean`."""
        means = self._optimizer.means()
        return {name: like(p, means[p].to(average_dtype(p.dtype))) for name, p in self._named}


def average_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a parameter is averaged: its own, but for those of 16 bits."""
    return dtype if dtype.itemsize >= 4 else torch.float32
