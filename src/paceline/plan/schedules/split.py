"""Which layers make up which pipeline stage.

All micro-batches pass all stages, so the heaviest stage sets the pace; the split makes it as light
as can be. Among those splits it takes the most even one (least sum of squared stage costs), and
among these the one with fewer layers in the early stages, which hold the most activations.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError

Costs = npt.NDArray[np.float64]


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
) -> tuple[int, ...]:
    """Layers of each stage, first to last, at least one each.

    layer_costs: of each layer, in any unit; first_extra, last_extra: what the first stage (the
    embedding) and the last (the head) do besides, in the same unit. Raises InputError where there
    are more stages than layers.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise InputError(
            f"{num_layers} layers can't be split into {num_stages} stages: use 1 to {num_layers}."
        )
    before = np.array([0.0, *accumulate(layer_costs)])
    # Of layers start to end (rows, columns) as one stage; a stage has one layer at least.
    between = np.where(np.tri(num_layers + 1, dtype=bool), np.inf, before - before[:, None])
    stages = [between] * num_stages
    stages[0] = stages[0] + first_extra
    stages[-1] = stages[-1] + last_extra

    heaviest, _ = _best(stages, np.maximum)
    # The bound leaves room for the rounding of sums taken in another order.
    bound = heaviest + 1e-9 * abs(heaviest)
    squares = [np.where(seconds <= bound, seconds * seconds, np.inf) for seconds in stages]
    return _best(squares, np.add)[1]


def _best(
    stages: Sequence[Costs], join: Callable[[Costs, Costs], Costs]
) -> tuple[float, tuple[int, ...]]:
    """The split with the least joined cost of its stages, by dynamic programming from the end.

    stages: of each, the cost (l + 1, l + 1) of layers start to end; infinite where it can't be.
    """
    *others, last = stages
    # By first layer: the least cost of the layers from there on over the stages from here on.
    best = last[:, -1]
    ends = [np.full(len(best), len(best) - 1)]
    for stage in reversed(others):
        joined = join(stage, best)
        # The first of equals: fewer layers in the earlier stage.
        ends.insert(0, joined.argmin(1))
        best = joined.min(1)
    split, start = [], 0
    for end in ends:
        split.append(int(end[start]) - start)
        start += split[-1]
    return float(best[0]), tuple(split)
