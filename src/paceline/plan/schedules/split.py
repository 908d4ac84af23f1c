"""Which layers make up which pipeline stage.

All micro-batches pass all stages, so the heaviest stage sets the pace; the split makes it as light
as can be. Among those splits it takes the most even one (least sum of squared stage costs), and
among these the one with fewer layers in the early stages, which hold the most activations.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from paceline.config.errors import InputError


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
    before = [0.0, *accumulate(layer_costs)]

    def cost(stage: int, start: int, end: int) -> float:
        extra = first_extra * (stage == 0) + last_extra * (stage == num_stages - 1)
        return before[end] - before[start] + extra

    heaviest, _ = _best(num_layers, num_stages, cost, max)
    # The bound leaves room for the rounding of sums taken in another order.
    bound = heaviest + 1e-9 * abs(heaviest)

    def evenness(stage: int, start: int, end: int) -> float:
        seconds = cost(stage, start, end)
        return seconds * seconds if seconds <= bound else float("inf")

    return _best(num_layers, num_stages, evenness, lambda one, other: one + other)[1]


def _best(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The split with the least joined cost of its stages, by dynamic programming from the end.

    cost(stage, start, end) is that of layers start to end as this stage.
    """
    last = num_stages - 1
    # By first layer: the best split of the layers from there on over the stages from here on.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        start: (cost(last, start, num_layers), (num_layers - start,))
        for start in range(last, num_layers)
    }
    for stage in range(last - 1, -1, -1):
        starts = range(stage, num_layers - (num_stages - stage) + 1)
        best = {
            start: min(
                (join(cost(stage, start, end), best[end][0]), (end - start, *best[end][1]))
                for end in range(start + 1, num_layers - (last - stage) + 1)
            )
            for start in (starts if stage else (0,))
        }
    return best[0]
