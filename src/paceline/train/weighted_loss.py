"""Weighted loss: the loss of a micro-batch, by how much it counts, and their mean over a whole
batch.

A loss that is a mean over its own tokens counts by how many these are. How many the whole batch has
is known only when every rank has seen its last micro-batch. So backward passes begin from loss x
weight. The sum of all weights comes with the step's one exchange, and the gradients are divided by
it before they are clipped. Where every weight is one, nothing changes, not even a bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.parallel.exact_sums import exact_sums

_PART = " (part)"


@dataclass(frozen=True)
class WeightedLoss:
    """What came out of one micro-batch."""

    loss: Tensor
    """Mean over what it counts, a scalar."""
    weight: Tensor | float = 1.0
    """How much it counts; 0: not at all, and then its loss may be anything."""
    figures: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Other means over the same, by name: an accuracy."""
    parts: Tensor | None = None
    """Means over parts of what counts, times the share that each part is of it, and these shares:
    (2, parts)."""

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

    def __init__(
        self,
        device: torch.device,
        num_parts: int = 1,
        part_names: Sequence[str] = (),
        figure_names: Sequence[str] = (),
    ) -> None:
        """None are added yet.

        Args:
            num_parts: what all sums are divided by; then weights of one add up to one.
            part_names: of each loss's `parts`, also on a rank that has none.
            figure_names: the same of `figures`.
        """
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._num_parts = num_parts
        self._losses: list[Tensor] = []
        self._weights: list[Tensor | float] = []
        self._figures: dict[str, list[Tensor]] = {name: [] for name in figure_names}
        self._part_names = [*part_names, *(name + _PART for name in part_names)]
        self._parts: list[Tensor] = []

    def add(self, part: WeightedLoss, loss: Tensor) -> None:
        """Count a micro-batch in.

        Args:
            loss: its loss times its weight, divided already.
        """
        self._losses.append(loss.detach())
        self._weights.append(part.weight)
        for name, value in part.figures.items():
            figure = torch.as_tensor(value).detach().to(self._zero)
            self._figures.setdefault(name, []).append(part.times_weight(figure))
        if part.parts is not None:
            parts = part.parts.detach().to(self._zero).flatten()
            self._parts.append(part.times_weight(parts))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the figures, in their order in `sums`, and of parts (see `means`)."""
        return (*sorted(self._figures), *self._part_names)

    def sums(self) -> list[Tensor]:
        """Of loss, weight and figures, () each: means are quotients by the weight."""
        loss, *others = map(self._sum, self._numbers)
        return [loss, *(each / self._num_parts for each in others)]

    def _sum(self, numbers: Sequence[Tensor | float]) -> Tensor:
        total = self._zero.clone()  # fp64, whatever the losses are
        for number in numbers:
            total += number
        return total

    def digits(self) -> Tensor:
        """The same as exact sums: (2 + figures, `exact_sums.WIDTH`)."""
        count, rows = len(self._losses), self._numbers
        filled = [[*row, *[0.0] * (count - len(row))] for row in rows]
        numbers = [self._zero + number for row in filled for number in row]
        values = torch.stack(numbers or [self._zero] * len(rows)).view(len(rows), -1)
        values[1:] /= self._num_parts
        return exact_sums(values)

    @property
    def _numbers(self) -> list[Sequence[Tensor | float]]:
        figures = [self._figures[name] for name in sorted(self._figures)]
        parts: list[list[Tensor]] = [[] for _ in self._part_names]
        if self._parts:
            parts = [list(row) for row in torch.stack(self._parts, 1)]
        return [self._losses, self._weights, *figures, *parts]


def means(names: Sequence[str], sums: Sequence[float], weight: float) -> dict[str, float]:
    """Figures from their sums over everything that counts, but those of parts that are empty."""
    totals = dict(zip(names, sums, strict=True))
    shares = {name: value for name, value in totals.items() if name.endswith(_PART)}
    return {
        name: quotient(totals[name], shares.get(name + _PART, weight))
        for name in totals
        if name not in shares and shares.get(name + _PART) != 0
    }


def quotient(total: float, weight: float) -> float:
    """A mean; NaN where nothing counts."""
    return total / weight if weight else math.nan
