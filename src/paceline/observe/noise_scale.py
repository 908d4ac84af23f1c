"""The noise scale of a run's gradients, from the estimates in its metrics.

In `figures` of a measured step stand unbiased estimates of |G|^2 and tr(Sigma), which scatter (the
first may even be below 0). Each is averaged over the measurements, later ones counting more; their
quotient is the noise scale, in samples: a batch of that size needs twice the steps of an unlimited
one and twice the samples of a small one (https://arxiv.org/abs/1812.06162).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

GRADIENT, TRACE = "noise.squared_gradient", "noise.trace"
"""Figures of a measured step: |G|^2, and the trace of the covariance of one sample's gradient."""

_MEMORY = 50
"""Measurements after which one counts 1/e as much. Assumed."""


def noise_scales(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, noise scale in samples) after each measurement from which one follows.

    Args:
        lines: of metrics.jsonl, in their order.
    """
    keeps = math.exp(-1 / _MEMORY)
    found, gradient, trace = [], 0.0, 0.0
    for line in lines:
        figures = line.get("figures") or {}
        values = [figures.get(name) for name in (GRADIENT, TRACE)]
        of_step = [each for each in values if isinstance(each, int | float) and math.isfinite(each)]
        if len(of_step) == len(values):
            gradient, trace = keeps * gradient + of_step[0], keeps * trace + of_step[1]
            if gradient > 0 and trace > 0:
                found.append((line["step"], trace / gradient))
    return found
