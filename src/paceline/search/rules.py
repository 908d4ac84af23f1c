"""Rules: which of many trials is the answer. All objectives are to be small.

Pure functions of lists of values, one tuple of objectives a trial.
"""

import math
from collections.abc import Sequence

Values = tuple[float, ...]


def dominates(one: Values, other: Values) -> bool:
    """Whether one is nowhere worse and somewhere better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def fronts(found: Sequence[Values]) -> list[list[int]]:
    """Indices by front: the first has those that nothing dominates, the second those that only
    the first does (https://doi.org/10.1109/4235.996017); within each, those that stand alone first.
    """
    layers: list[list[int]] = []
    for at in sorted(range(len(found)), key=lambda one: found[one]):
        for layer in layers:  # only what was sorted before it can dominate it
            if not any(dominates(found[other], found[at]) for other in layer):
                layer.append(at)
                break
        else:
            layers.append([at])
    return [_spread(layer, found) for layer in layers]


def _spread(layer: Sequence[int], found: Sequence[Values]) -> list[int]:
    """By crowding distance: the ends of a front, then what is far from its neighbours."""
    distance = dict.fromkeys(layer, 0.0)
    for axis in range(len(found[layer[0]])):
        order = sorted(layer, key=lambda at: found[at][axis])
        width = found[order[-1]][axis] - found[order[0]][axis]
        distance[order[0]] += math.inf
        if len(found[layer[0]]) > 1:
            distance[order[-1]] += math.inf
        for before, at, after in zip(order, order[1:], order[2:], strict=False):
            distance[at] += (found[after][axis] - found[before][axis]) / width if width else 0.0
    return sorted(layer, key=lambda at: (-distance[at], found[at]))


def ranking(found: Sequence[Values]) -> list[int]:
    """All indices, the best first."""
    return [at for layer in fronts(found) for at in layer]


def knee(front: Sequence[Values]) -> int:
    """The trial of a front that gives up least of everything: with each objective scaled to 0..1
    over the front, the least sum. In two dimensions it is the one furthest below the line between
    the ends.
    """
    columns = list(zip(*front, strict=True))
    spans = [(min(column), (max(column) - min(column)) or 1.0) for column in columns]

    def total(at: int) -> float:
        pairs = zip(front[at], spans, strict=True)
        return sum((value - low) / span for value, (low, span) in pairs)

    return min(range(len(front)), key=lambda at: (total(at), front[at]))


def cheapest(found: Sequence[Values], judged: int, limit: float, by: int) -> int | None:
    """The least in objective `by` of those whose objective `judged` is within a limit; None: there
    is none."""
    within = [at for at, values in enumerate(found) if values[judged] <= limit]
    return min(within, key=lambda at: (found[at][by], found[at]), default=None)


def hypervolume(found: Sequence[Values], worst: Values) -> float:
    """The area that two objectives dominate, up to a reference point."""
    assert len(worst) == 2, "two objectives"
    area, edge = 0.0, worst[1]
    for one, other in sorted(values for values in found if values[0] < worst[0]):
        if other < edge:
            area += (worst[0] - one) * (edge - other)
            edge = other
    return area
