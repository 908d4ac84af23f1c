"""Simple: which of two layouts that are as fast has less that can go wrong.

Forecasts of two layouts differ by less than the forecast's own error, or by more. Within it the
simpler one is chosen: fewer axes, no pipeline, nothing recomputed or moved away, as little of the
states sharded as fits. This file is the one place that says so; `search` puts the choice first, and
plan, train and tune take the first.
"""

from collections.abc import Sequence

import numpy as np

from paceline.config.layout import PRECISIONS
from paceline.plan.points import Array, Points, Setting
from paceline.plan.prediction import Prediction

AS_GOOD = 0.03
"""Steps that differ by no more are as good: what identical set-ups differ by between two releases
of one container, and what a fitted planner's choice costs on the mean (benchmarks/planner.md)."""


def complexity(points: Points) -> Array:
    """What each layout has to get right besides the model: (n,), in machines of one kind.

    An axis, a pipeline on top of its axis, several stages a rank, backward passes in two halves,
    recompute, each offload, 8-bit states and 8-bit products count one each. A stage of ZeRO counts
    less than any of them.
    """
    names = ("workers", "dp", "fsdp", "tp", "pp", "cp", "ep")
    axes = [getattr(points, name) > 1 for name in names]
    machines = (
        *(points.pp > 1, points.stages_per_rank > 1, points.splits_backward, points.recompute > 0),
        *(points.offload_activations, points.offload_optimizer, points.offload_params),
        *(points.optimizer_8bit, points.precision == PRECISIONS.index("fp8")),
    )
    count = sum((each * 1.0 for each in (*axes, *machines)), np.zeros(1))
    return count + 0.1 * points.zero


def simplest_first(setting: Setting, ranked: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """The simplest of those that are as good as the fastest, then the others as they were.

    Args:
        setting: that of all of them.
        ranked: predictions, the fastest first.
    """
    if not ranked:
        return ()
    near = [one for one in ranked if one.step_s <= (1 + AS_GOOD) * ranked[0].step_s]
    counts = complexity(Points.of([one.layout for one in near], setting))
    choice = near[int(np.argmin(np.broadcast_to(counts, len(near))))]  # of equals the fastest
    return (choice, *(one for one in ranked if one is not choice))
