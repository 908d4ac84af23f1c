"""Spikes: losses far above the recent ones.

Whether a loss is one follows from the losses that all ranks agreed on, so all decide alike, on the
device and in the step. A step whose loss is one may be skipped as a step without a finite loss is,
or the newest checkpoint comes back (`train.left_out`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.elastic import Elastic

_WINDOW = 100
# Of fewer losses, and of the first ones of a run, a median says little. Assumed.
_LEAST = 10


@dataclass(frozen=True)
class Spike:
    """A loss far above the recent ones."""

    step: int
    """From 1."""
    loss: float
    median: float
    """Of the recent ones."""


class RecentLosses:
    """The last losses that the ranks agreed on, of steps that count."""

    def __init__(self, elastic: Elastic, device: torch.device) -> None:
        self._factor, self._keeps_spikes = elastic.spike, elastic.on_spike == "go_on"
        self.losses = torch.full((_WINDOW,), torch.nan, dtype=torch.float64, device=device)

    def see(self, loss: Tensor) -> Tensor:
        """The median that a loss is a spike above, 0 where it is none: () fp64, no host waits.

        Args:
            loss: the mean over all ranks, () fp64.
        """
        median = self.losses.nanmedian()
        num_known = torch.isfinite(self.losses).sum()
        is_spike = (num_known >= _LEAST) & (median > 0) & (loss > self._factor * median)
        counts = torch.isfinite(loss) & (self._keeps_spikes | ~is_spike)
        later = torch.cat([self.losses[1:], loss[None].to(self.losses)])
        self.losses = torch.where(counts, later, self.losses)
        return torch.where(is_spike & torch.isfinite(loss), median, 0.0)

    def state(self) -> list[float]:
        """What a checkpoint keeps."""
        return self.losses[torch.isfinite(self.losses)].tolist()

    def load(self, state: list[float]) -> None:
        """Go on with what `state` gave."""
        self.losses.fill_(torch.nan)
        if state:
            self.losses[-len(state) :] = torch.tensor(state, dtype=torch.float64)
