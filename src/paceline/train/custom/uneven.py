"""Uneven: labels that are ignored, of some samples more than of others, under a loss that states no
weight.

Its mean over labels would count as one over samples. The weight isn't taken from the labels: a
batch doesn't say whether the model shifts them by one, nor what else the loss is a mean over. So
this says once what happens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.kernels.loss import IGNORED

Tell = Callable[[str], None]

# Each look waits for the device, so only a run's first micro-batches are looked at. Assumed.
MOST_LOOKS = 64
SENTENCE = (
    f"Samples have different numbers of labels that are ignored ({IGNORED}), and the loss states "
    "no weight: micro-batches count by their samples, not by their labels. If the loss is a mean "
    "over labels, return "
    f'{{"loss": mean, "weight": (labels != {IGNORED}).sum()}} (docs/own-models.md).'
)


class UnevenLabels:
    """Looks for them, and tells once."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._looks_left = MOST_LOOKS
        self._kept: dict[int, int] = {}

    def look(self, batch: Any) -> None:
        """At a micro-batch of a loss that states no weight; its labels are any tensors of whole
        numbers, (samples, ...)."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        for place, leaf in enumerate(tree_leaves(batch)):
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.dtype in (torch.int64, torch.int32):
                self._count(place, leaf)

    def _count(self, place: int, labels: Tensor) -> None:
        """`place` tells a batch's tensors apart; the same one holds labels in each."""
        ignored = (
            (labels == IGNORED).flatten(1) if labels.ndim > 1 else (labels == IGNORED)[:, None]
        )
        for number in ignored.sum(dim=1).unique().tolist():
            if self._looks_left and self._kept.setdefault(place, number) != number:
                self._looks_left = 0
                self._tell(SENTENCE)
