"""Weighted loss: the loss of a micro-batch, by how much it counts, and their mean over a whole
batch.

A loss that is a mean over its own tokens counts by how many these are. How many the whole batch has
is known only when every rank has seen its last micro-batch, so backward passes begin from loss x
weight, and the gradients are divided by the sum of all weights when it is agreed on: in the step's
one exchange, before they are clipped. Where every weight is one, nothing changes, not even a bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightedLoss:
    """What came out of one micro-batch."""

    loss: Tensor
    """Mean over what it counts, a scalar."""
    weight: Tensor | float = 1.0
    """How much it counts; 0: not at all, and then its loss may be anything."""
    figures: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Other means over the same, by name: an accuracy."""

    @classmethod
    def of(cls, value: "Tensor | WeightedLoss") -> "WeightedLoss":
        """A loss that is a plain scalar counts as much as any other."""
        return value if isinstance(value, WeightedLoss) else cls(value)

    def times_weight(self, value: Tensor) -> Tensor:
        """A mean as its part of the sum."""
        if isinstance(self.weight, float):
            return value * self.weight if self.weight else torch.zeros_like(value)
        return torch.where(self.weight > 0, value, 0) * self.weight


class WeightedSums:
    """Sums over micro-batches, in fp64 on their device."""

    def __init__(self, device: torch.device, num_parts: int = 1) -> None:
        """Args:
        device: of the micro-batches.
        num_parts: what all sums are divided by: weights of one then add up to one.
        """
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._num_parts = num_parts
        self._loss, self._weight = self._zero.clone(), self._zero.clone()
        self._figures: dict[str, Tensor] = {}

    def add(self, part: WeightedLoss, loss: Tensor) -> None:
        """Count a micro-batch in.

        Args:
            part: of it.
            loss: its loss times its weight, divided already.
        """
        self._loss += loss.detach()
        self._weight += part.weight  # a float costs no copy to the device
        for name, value in part.figures.items():
            figure = torch.as_tensor(value).detach().to(self._zero)
            self._figures[name] = self._figures.get(name, self._zero) + part.times_weight(figure)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the figures, in their order in `sums`."""
        return tuple(sorted(self._figures))

    def sums(self) -> list[Tensor]:
        """Of loss, weight and figures, () each: means are quotients by the weight."""
        figures = [self._figures[name] for name in self.names]
        return [self._loss, *(each / self._num_parts for each in (self._weight, *figures))]


def means(names: Sequence[str], sums: Sequence[Tensor], weight: Tensor) -> dict[str, float]:
    """Figures from their sums over everything that counts."""
    return {name: (value / weight).item() for name, value in zip(names, sums, strict=True)}
