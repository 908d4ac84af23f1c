"""Bounds: how fast and how small any layout of a core can be, whatever its schedule and relief.

A core is a mesh with a micro-batch and an arithmetic (`plan.search.space`). Its least seconds are
those of the closed form with nothing recomputed or offloaded, less what a pipeline waits; its least
bytes those under 1F1B with everything recomputed and offloaded that may be. Both rest on the
planner's own formulas and on what holds of them: relief never makes a step faster, a larger
micro-batch never makes a sample slower, a smaller one never holds more, and no schedule holds much
less than 1F1B.
"""

import numpy as np

from paceline.plan.points import SCHEDULES, Array
from paceline.plan.search.pricing import peak_bytes, step_seconds
from paceline.plan.search.rules import Columns
from paceline.plan.search.space import Space
from paceline.plan.search.tables import joined, size_of, take

SLACK = 1.05
"""What holds of the formulas holds but for tiles and uneven stages: by so much bounds may err."""
# One of the two fits each core.
_PLAIN_TURNS = {
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


def least_seconds(space: Space, cores: Columns) -> Array:
    """The least seconds of a step of any layout of each core."""
    fast = _relieved(space, cores, fastest(space.reliefs))
    seconds = step_seconds(space.setting, space.points(fast)).unwaited_s
    return _least(seconds, fast["core"], cores["mesh"])


def least_bytes(space: Space, cores: Columns) -> Array:
    """The least peak memory of a device in any layout of each core."""
    lean = _relieved(space, cores, leanest(space.reliefs))
    needs = peak_bytes(space.setting, space.points(lean), space.tight)
    return _least(needs, lean["core"], cores["mesh"])


def _relieved(space: Space, cores: Columns, reliefs: Columns) -> Columns:
    numbered = {**cores, "core": np.arange(size_of(cores))}
    return space.relieved(space.turned(numbered, _PLAIN_TURNS), reliefs)


def _least(values: Array, groups: Array, like: Array) -> Array:
    least = np.full(len(like), np.inf)
    np.minimum.at(least, groups, values)
    return np.where(np.isfinite(least), least, 0.0)


def fastest(reliefs: Columns) -> Columns:
    """The rows of reliefs than which none is faster: the least offloaded, then recomputed."""
    return take(reliefs, np.flatnonzero(_is_fastest(reliefs)))


def slower(reliefs: Columns) -> Columns:
    """The other rows."""
    return take(reliefs, np.flatnonzero(~_is_fastest(reliefs)))


def _is_fastest(reliefs: Columns) -> Array:
    costs = 10 * _num_offloads(reliefs) + _num_recomputed(reliefs)
    return costs == costs.min()


def leanest(reliefs: Columns) -> Columns:
    """The rows of reliefs than which none holds less: all recomputed and, where it may, offloaded.

    Which offload may be depends on the mesh, so there are several.
    """
    recomputed = _num_recomputed(reliefs)
    best = (recomputed == recomputed.max()) & (
        reliefs["optimizer_8bit"] == reliefs["optimizer_8bit"].max()
    )
    offloads = _num_offloads(reliefs)
    return take(reliefs, np.flatnonzero(best & (offloads == offloads[best].max())))


def _num_offloads(reliefs: Columns) -> Array:
    """Params takes the optimizer along: no more and no less than the optimizer here."""
    names = ("offload_activations", "offload_optimizer", "offload_params")
    return np.sum([reliefs[name] for name in names], axis=0)


def _num_recomputed(reliefs: Columns) -> Array:
    return 5 * reliefs["recompute"] + reliefs["quarters"]
