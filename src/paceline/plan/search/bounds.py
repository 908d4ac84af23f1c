"""Bounds: how fast and how small any completion of a partial layout can be, whatever its schedule
and memory savings.

A partial layout is a mesh with a micro-batch and an arithmetic (`plan.search.space`). Its least
seconds are those of the closed form with nothing recomputed or offloaded, less what a pipeline
waits; its least bytes those under 1F1B with everything recomputed and offloaded that may be. Both
rest on the planner's own formulas and on what holds of them: memory savings never make a step
faster, a larger micro-batch never makes a sample slower, a smaller one never holds more, and no
schedule holds much less than 1F1B.
"""

import numpy as np

from paceline.config.schedule import SCHEDULES
from paceline.plan.points import Array
from paceline.plan.search.pricing import peak_bytes, step_seconds
from paceline.plan.search.space import Space
from paceline.plan.search.tables import Columns, joined, size_of, take

SLACK = 1.05
"""What holds of the formulas holds but for tiles and uneven stages: by so much bounds may err."""
# One of the two fits each partial layout.
_PLAIN_PIPELINES = {
    "schedule": np.array([SCHEDULES.index("none"), SCHEDULES.index("1f1b")]),
    "stages_per_rank": np.array([1, 1]),
}


def bounds_of_meshes(space: Space, meshes: Array) -> tuple[Array, Array]:
    """The least seconds and bytes of any layout of these rows of the meshes; 0: not known."""
    batched = space.batched(meshes)
    smallest = np.flatnonzero(np.diff(batched["mesh"], prepend=-1))
    largest = np.flatnonzero(np.diff(batched["mesh"], append=-1))
    fast = space.computed(take(batched, largest))
    small = space.computed(take(batched, smallest))
    seconds = _least(least_seconds(space, fast), np.searchsorted(meshes, fast["mesh"]), meshes)
    # The smallest has the least activations; the largest adds up no gradients.
    both = joined([small, fast])
    least = _least(least_bytes(space, both), np.searchsorted(meshes, both["mesh"]), meshes)
    return seconds, least


def least_seconds(space: Space, partial_layouts: Columns) -> Array:
    """The least seconds of a step of any completion of each partial layout."""
    fast = _completed(space, partial_layouts, fastest(space.memory_savings))
    seconds = step_seconds(space.setting, space.points(fast)).unwaited_s
    return _least(seconds, fast["partial"], partial_layouts["mesh"])


def least_bytes(space: Space, partial_layouts: Columns) -> Array:
    """The least peak memory of a device in any completion of each partial layout."""
    lean = _completed(space, partial_layouts, leanest(space.memory_savings))
    needs = peak_bytes(space.setting, space.points(lean), space.tight)
    return _least(needs, lean["partial"], partial_layouts["mesh"])


def _completed(space: Space, partial_layouts: Columns, memory_savings: Columns) -> Columns:
    numbered = {**partial_layouts, "partial": np.arange(size_of(partial_layouts))}
    return space.completed(space.pipelined(numbered, _PLAIN_PIPELINES), memory_savings)


def _least(values: Array, groups: Array, like: Array) -> Array:
    least = np.full(len(like), np.inf)
    np.minimum.at(least, groups, values)
    return np.where(np.isfinite(least), least, 0.0)


def fastest(memory_savings: Columns) -> Columns:
    """The rows of memory savings than which none is faster: the least offloaded, then
    recomputed."""
    return take(memory_savings, np.flatnonzero(_is_fastest(memory_savings)))


def slower(memory_savings: Columns) -> Columns:
    """The other rows."""
    return take(memory_savings, np.flatnonzero(~_is_fastest(memory_savings)))


def _is_fastest(memory_savings: Columns) -> Array:
    costs = 10 * _num_offloads(memory_savings) + _num_recomputed(memory_savings)
    return costs == costs.min()


def leanest(memory_savings: Columns) -> Columns:
    """The rows of memory savings than which none holds less: all recomputed and, where it may,
    offloaded.

    Which offload may be depends on the mesh, so there are several.
    """
    recomputed = _num_recomputed(memory_savings)
    best = (recomputed == recomputed.max()) & (
        memory_savings["optimizer_8bit"] == memory_savings["optimizer_8bit"].max()
    )
    offloads = _num_offloads(memory_savings)
    return take(memory_savings, np.flatnonzero(best & (offloads == offloads[best].max())))


def _num_offloads(memory_savings: Columns) -> Array:
    """Params takes the optimizer along: no more and no less than the optimizer here."""
    names = ("offload_activations", "offload_optimizer", "offload_params")
    return np.sum([memory_savings[name] for name in names], axis=0)


def _num_recomputed(memory_savings: Columns) -> Array:
    return 5 * memory_savings["recompute"] + memory_savings["quarters"]
