"""Dynamic loss scaling for fp16 (https://arxiv.org/abs/1710.03740), decided on the device.

fp16 gradients below 6e-8 vanish, so the loss is scaled up before the backward pass and the
gradients down again before they are clipped. The scale halves after a step that overflowed and
doubles after 2,000 that did not.

torch's GradScaler is not used: it looks at each rank's own gradients, so that with pipeline stages
on different ranks the scales would come apart. Here the one norm that all ranks agree on decides.
"""

from typing import Any

import torch
from torch import Tensor

_FIRST = 2.0**16
_GROWTH_INTERVAL = 2000


class LossScale:
    """The scale of the loss; one and constant where it isn't enabled."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = torch.tensor(_FIRST if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to start a backward pass from."""
        return loss * self.value if self.enabled else loss

    def update(self, overflowed: Tensor) -> None:
        """Learn from a step: () bool, the same on every rank."""
        if not self.enabled:
            return
        good = torch.where(overflowed, 0, self._good_steps + 1)
        grows = good >= _GROWTH_INTERVAL
        factor = torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.value = self.value * factor
        self._good_steps = torch.where(grows, 0, good)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        good_steps = self._good_steps.item()
        return {"enabled": self.enabled, "scale": self.value.item(), "good_steps": good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that was saved; a scale kept by another precision is left alone."""
        if self.enabled and state["enabled"]:
            self.value.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
