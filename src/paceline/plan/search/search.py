"""Search: the best layouts of a whole space, by the planner's own formulas.

How it works: branch and bound over the tables of `plan.search.space`.

1. Every mesh gets bounds on its step and its memory (`plan.search.bounds`).
2. Meshes are visited in the order of their bounds, some thousands of layouts at a time, until the
   next one's bound is slower than the hundredth best layout found. On the way, each mesh's own
   micro-batches and arithmetics are bounded too; what survives is joined with schedules, and what
   of that doesn't fit with memory savings, and priced by closed forms (`closed_times`).
3. The hundred best that fit, at most a few of each mesh, are predicted from their real action lists
   (`plan.price.step.predict`), which has the last word.

So each layout of the space is answered for: priced, or proved too large, or proved slower than what
is shown (tests compare with pricing everything). First comes the simplest of those that are as good
as the fastest (`plan.search.simple`), the others follow by speed. The result doesn't depend on
the number of threads.

A layout fits where all fits that torch would reserve. Only where nothing does, that is enough which
must be there (`plan.prediction.needed_bytes`): such a layout is tight.

It is no optimiser of continuous choices (bucket sizes, splits), and it knows decoders only.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from paceline.config.device import Device
from paceline.config.errors import InputError
from paceline.config.layout import Layout
from paceline.plan.points import Array, Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.search.bounds import (
    SLACK,
    bounds_of_meshes,
    fastest,
    least_bytes,
    least_seconds,
    slower,
)
from paceline.plan.search.pricing import networks_of, peak_bytes, step_seconds
from paceline.plan.search.simple import AS_GOOD, complexity, simplest_first
from paceline.plan.search.space import SearchConstraints, Space
from paceline.plan.search.tables import Columns, joined, size_of, take

_OF_HOST = 0.04
"""Part of a host's memory that is its own and its processes', which no prediction counts."""
NEAR = 1.25
"""Layouts that need up to so many times the memory are kept: what more memory would give."""
_PER_MESH = 3
_SIMPLEST = 12
# Meshes whose bounds are worked out together, and cores that a round of visits looks at.
_MESHES_AT_ONCE = 2048
_PARTIALS_OF_ROUND = 8_000
_MESHES_OF_FIRST_ROUND = 64
# A second thread works while the first one is in numpy: with short arrays that gives nothing.
_THREADS = 2
_POINTS_FOR_THREADS = 1_000_000
# Actions of pipelines that all predictions execute together: a second or two.
_ACTIONS = 200_000
_FRONT = 12


@dataclass(frozen=True)
class SearchCounts:
    """How much of the space was looked at, and how."""

    points: int
    """Layouts that can run and agree with what was fixed."""
    priced: int
    """Priced one by one; the others are excluded by a bound on their time or memory."""
    fitting: int
    """Of the priced ones, those whose memory is small enough."""


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found."""

    space: Space
    limit_bytes: float | None
    """What a layout may use of a device's memory; None: the memory is not known."""
    counts: SearchCounts
    ranked: tuple[Prediction, ...]
    """Those that fit, the choice and then the fastest first, at most a few of each mesh."""
    near: tuple[Prediction, ...]
    """Those that would fit into a quarter more memory, the fastest first."""
    front: tuple[Prediction, ...]
    """Than which none is both faster and leaner, the fastest first. On one cluster the price of a
    token follows from the time."""

    @property
    def is_tight(self) -> bool:
        """Whether the ranked ones only fit as torch gives back what it reserved."""
        return self.space.tight and bool(self.ranked)


def search(
    setting: Setting,
    constraints: SearchConstraints | None = None,
    num: int | None = None,
    bounded: bool = True,
) -> Found:
    """Search all layouts of a setting.

    Args:
        setting: what is trained, on what; its cluster is concrete.
        constraints: what is fixed, freed and bounded.
        num: layouts to predict exactly; by default a hundred, fewer in a small space.
        bounded: whether a layout must fit into the memory.

    Raises:
        InputError: no layout can run, or nothing is known about the device's speed.
    """
    space = Space.of(setting, constraints)
    limit = memory_limit(setting.device) if bounded else None
    found = _search(space, num, limit)
    if found.ranked or limit is None:
        return found
    tight = _search(replace(space, tight=True), num, limit)
    return tight if tight.ranked else found


def _search(space: Space, num: int | None, limit: float | None) -> Found:
    num_points = space.count()
    if not num_points:
        raise InputError(_no_layout(space))
    num = num or min(100, max(20, num_points // 2000))
    most = np.inf if limit is None else limit
    num_threads = _THREADS if num_points > _POINTS_FOR_THREADS else 1
    pool, num_priced, num_fitting = _branch_and_bound(space, most, num, num_threads)
    fits = pool["memory_bytes"] <= most
    best, near = (take(pool, np.flatnonzero(where)) for where in (fits, ~fits))
    predictor = _ExactPredictor(space)
    rows = np.union1d(_first_of_each_mesh(best, num), _simplest(space, best))
    ranked = simplest_first(space.setting, predictor.ranked(take(best, rows), most))
    predictor.left = _ACTIONS // 2
    return Found(
        space,
        limit,
        SearchCounts(num_points, num_priced, num_fitting),
        ranked,
        predictor.ranked(take(near, _first_of_each_mesh(near, _FRONT)), NEAR * most),
        predictor.ranked(_front(space, best, most), most),
    )


def memory_limit(device: Device) -> float | None:
    """Bytes of a device that a layout may use; None where its memory is not known."""
    memory, others = device.memory_bytes, _OF_HOST * device.is_cpu
    return None if memory is None else (1 - others) * memory.value


def held_bytes(space: Space, one: Prediction) -> float:
    """What a layout has to fit with: all that would be reserved, or in a tight space all that must
    be there."""
    return one.needed_bytes if space.tight else one.peak_memory_bytes


def _no_layout(space: Space) -> str:
    setting, ranks = space.setting, space.setting.cluster.num_devices
    batch = f", or use a global_batch that is a multiple of {ranks}"
    return (
        f"no layout of {ranks} devices can run with train.global_batch = {setting.global_batch}, "
        f"train.seq_len = {setting.seq_len} and the settings that are fixed: leave more of them "
        f'to "auto"{batch if setting.global_batch % ranks else ""}.'
    )


# ---- branch and bound ----------------------------------------------------------------------------


def _branch_and_bound(
    space: Space, limit: float, num: int, num_threads: int = 1
) -> tuple[Columns, int, int]:
    """Visit meshes, the most promising first.

    Returns:
        a pool of priced layouts, the best first, with `step_s` and `memory_bytes`, also of some
        that need up to NEAR times the limit; how many were priced; how many of them fit.
    """
    with ThreadPoolExecutor(num_threads) as threads:
        chunks = space.chunks(_MESHES_AT_ONCE)
        bounds = [*threads.map(lambda rows: bounds_of_meshes(space, rows), chunks)]
        seconds, least = (np.concatenate(part) for part in zip(*bounds, strict=True))
        order = np.argsort(seconds, kind="stable")
        order = order[least[order] <= NEAR * limit]
        pool = _visit(space, order[:0], limit, np.inf).table
        slowest, at, step = np.inf, 0, _MESHES_OF_FIRST_ROUND
        num_priced = num_fitting = 0
        while at < len(order) and seconds[order[at]] <= SLACK * slowest:
            rows = order[at : at + step]
            at += step
            parts = (rows[part::num_threads] for part in range(num_threads))
            visits = [*threads.map(lambda rows: _visit(space, rows, limit, slowest), parts)]  # noqa: B023
            num_priced += sum(visit.num_priced for visit in visits)
            num_fitting += sum(visit.num_fitting for visit in visits)
            tables = [pool, *(visit.table for visit in visits)]
            pool, slowest = _merged(joined(tables), limit, num)
            per_mesh = max(1, sum(visit.num_partial for visit in visits) // len(rows))
            step = min(4 * step, max(1, _PARTIALS_OF_ROUND // per_mesh))
    return pool, num_priced, num_fitting


@dataclass(frozen=True, eq=False)
class _VisitedMeshes:
    """What came of visiting some meshes."""

    table: Columns
    num_partial: int
    num_priced: int
    num_fitting: int


def _visit(space: Space, meshes: Array, limit: float, slowest: float) -> _VisitedMeshes:
    """Price what these meshes have that may be among the best."""
    partial_layouts = space.partial_layouts(np.sort(meshes))
    num_partial = size_of(partial_layouts)
    promising = np.flatnonzero(least_seconds(space, partial_layouts) <= SLACK * slowest)
    partial_layouts = take(partial_layouts, promising)
    if np.isfinite(limit):
        partial_layouts = take(
            partial_layouts, np.flatnonzero(least_bytes(space, partial_layouts) <= NEAR * limit)
        )
    pipelined = space.pipelined(partial_layouts)
    pipelined = {**pipelined, "row": np.arange(size_of(pipelined))}
    plain = _priced(space, space.completed(pipelined, fastest(space.memory_savings)))
    completed = _priced_if_small(space, _in_need(pipelined, plain, limit, slowest), limit)
    table = joined([plain, completed])
    fits = table["memory_bytes"] <= limit
    keep = (table["step_s"] <= slowest) & (table["memory_bytes"] <= NEAR * limit)
    return _VisitedMeshes(
        take(table, np.flatnonzero(keep)), num_partial, size_of(table), int(fits.sum())
    )


def _in_need(pipelined: Columns, plain: Columns, limit: float, slowest: float) -> Columns:
    """What is fast enough, but as fast as that only too large: some memory saving may be the
    best."""
    fastest_s = np.full(size_of(pipelined), np.inf)
    fitting_s = fastest_s.copy()
    fits = plain["memory_bytes"] <= limit
    np.minimum.at(fastest_s, plain["row"], plain["step_s"])
    np.minimum.at(fitting_s, plain["row"][fits], plain["step_s"][fits])
    return take(pipelined, np.flatnonzero((fastest_s <= SLACK * slowest) & (fitting_s > fastest_s)))


def _priced(space: Space, table: Columns, needs: Array | None = None) -> Columns:
    """A table of whole layouts with `step_s` and `memory_bytes` (`needs`, where it is known)."""
    points = space.points(table)
    needs = peak_bytes(space.setting, points, space.tight) if needs is None else needs
    step_s = step_seconds(space.setting, points).step_s
    return {**table, "step_s": step_s, "memory_bytes": needs}


def _priced_if_small(space: Space, pipelined: Columns, limit: float) -> Columns:
    """With the other memory savings, where small enough: memory is cheaper to work out than
    time."""
    table = space.completed(pipelined, slower(space.memory_savings))
    needs = peak_bytes(space.setting, space.points(table), space.tight)
    small = np.flatnonzero(needs <= NEAR * limit)
    return _priced(space, take(table, small), needs[small])


def _merged(table: Columns, limit: float, num: int) -> tuple[Columns, float]:
    """The rows that may still be among the best, in order, and how slow that is."""
    table = take(table, _order(table))
    fits = np.flatnonzero(table["memory_bytes"] <= limit)
    chosen = fits[_first_of_each_mesh(take(table, fits), num)]
    step_s = table["step_s"][chosen]
    slowest = max(step_s.max(), (1 + AS_GOOD) * step_s.min()) if len(chosen) == num else np.inf
    return take(table, np.flatnonzero(table["step_s"] <= slowest)), float(slowest)


def _order(table: Columns) -> Array:
    """The fastest first; where there is no difference to speak of, the simplest."""
    axes = np.sum([table[name] > 1 for name in ("dp", "fsdp", "tp", "pp", "cp", "ep")], axis=0)
    # Whole hundredths of a percent, for a later digit decides nothing.
    time = np.round(np.log(table["step_s"]) * 1e4)
    keys = (
        *(table["num_micro_batches"], table["quarters"], table["recompute"]),
        *(table["stages_per_rank"], table["schedule"], table["mesh"], axes, time),
    )
    return np.lexsort(keys)


def _first_of_each_mesh(table: Columns, num: int) -> Array:
    """Rows of an ordered table: the first, but at most a few of each mesh."""
    by_mesh = np.argsort(table["mesh"], kind="stable")
    starts = np.flatnonzero(np.diff(table["mesh"][by_mesh], prepend=-1))
    counts = np.diff(starts, append=len(by_mesh))
    place = np.empty(len(by_mesh), int)
    place[by_mesh] = np.arange(len(by_mesh)) - np.repeat(starts, counts)
    return np.flatnonzero(place < _PER_MESH)[:num]


def _simplest(space: Space, best: Columns) -> Array:
    """Of an ordered table's rows that are as good as the fastest the simplest ones."""
    near = np.flatnonzero(best["step_s"] <= (1 + AS_GOOD) * best["step_s"].min(initial=np.inf))
    if not len(near):
        return near
    counts = np.broadcast_to(complexity(space.points(take(best, near))), len(near))
    return near[np.argsort(counts, kind="stable")[:_SIMPLEST]]


def _front(space: Space, best: Columns, limit: float) -> Columns:
    """Layouts than which none is both faster and leaner, by steps of 2 % of memory: of what was
    priced, and of memory savings of the best (other ways to recompute, where one recomputes)."""
    if not size_of(best):
        return best
    some = take(best, _first_of_each_mesh(best, 4 * _FRONT))
    pipelined = {name: some[name] for name in some if name not in space.memory_savings}
    saved = space.completed({**pipelined, "recomputes": some["recompute"] > 0})
    saved = take(saved, np.flatnonzero((saved["recompute"] > 0) == saved["recomputes"]))
    table = joined([best, _priced(space, saved)])
    table = take(table, np.flatnonzero(table["memory_bytes"] <= limit))
    table = take(table, _order(table))
    chosen: list[int] = []
    for index, needs in enumerate(table["memory_bytes"].tolist()):
        if not chosen or needs < 0.98 * table["memory_bytes"][chosen[-1]]:
            chosen.append(index)
    return take(table, np.array(chosen[:_FRONT]))


# ---- the last word -------------------------------------------------------------------------------


class _ExactPredictor:
    """Predictions by real action lists, each layout once, as long as they don't take too long."""

    def __init__(self, space: Space) -> None:
        self.space, self.left = space, _ACTIONS
        self.known: dict[Layout, Prediction] = {}

    def ranked(self, table: Columns, limit: float) -> tuple[Prediction, ...]:
        """Predictions of whole layouts, of those that fit, the fastest first."""
        points = self.space.points(table)
        layouts = [self.space.layout(points, index) for index in range(size_of(table))]
        self._learn([layout for layout in dict.fromkeys(layouts) if layout not in self.known])
        found = [self.known[layout] for layout in layouts if layout in self.known]
        fits = [each for each in found if held_bytes(self.space, each) <= limit]
        return tuple(sorted(fits, key=lambda each: float(f"{each.step_s:.4g}")))

    def _learn(self, layouts: Sequence[Layout]) -> None:
        """Predict the first ones, as far as their actions may take time."""
        setting = self.space.setting
        needs = np.cumsum([_num_actions(setting, layout) for layout in layouts])
        layouts = layouts[: int((needs <= self.left).sum())]
        if layouts:
            self.left -= needs[len(layouts) - 1]
            for layout, network in zip(layouts, networks_of(setting, layouts), strict=True):
                self.known[layout] = predict(setting, layout, network)


def _num_actions(setting: Setting, layout: Layout) -> int:
    """Of all ranks together: forward, and backward in two halves."""
    batches = setting.global_batch // (layout.num_data_ranks * layout.micro_batch)
    return 3 * batches * len(layout.split)
