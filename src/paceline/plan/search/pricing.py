"""Pricing: the closed forms over long tables.

Nothing is worked out here; `plan.price.step` and `plan.memory` hold the formulas. A block of the
network costs the same in thousands of layouts, which differ in their data axes, pipeline or
schedule only: so the parts of the network are priced once for each group of rows that they can't
tell apart, and the tables go through the formulas in pieces that stay in the processor's cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from paceline.config.layout import PRECISIONS, Layout
from paceline.plan.memory import memory_bytes
from paceline.plan.memory.holdings import bounding_holdings
from paceline.plan.points import Array, Points, Setting
from paceline.plan.prediction import needed_bytes
from paceline.plan.price.parts import NetworkPart, PartPass
from paceline.plan.price.pipelined import paired_share
from paceline.plan.price.step import NetworkParts, StepTimes, closed_times
from paceline.plan.search.tables import distinct
from paceline.plan.stages import StageWork
from paceline.plan.work import PartWork

_ROWS = 16384
"""Priced together: fewer rows cost more calls, more leave the cache; measured: half
as many take a tenth longer on two cores of an EPYC, twice as many as long."""
SEEN_BY_PARTS = (
    *("tp", "sequence_parallel", "async_tp", "cp", "ulysses", "ep", "micro_batch", "precision"),
    *("param_dtype", "compile", "recompute", "recompute_share"),
)
"""Columns that a part's seconds depend on; so they do on whether it is sharded, on whether stages
free their weights behind each pass, for fp8 on the schedule, and where exchanges of experts run
beside other passes on how many have a partner."""
_FP8 = PRECISIONS.index("fp8")


class StepSeconds(NamedTuple):
    """Columns of the time of a step."""

    step_s: Array
    unwaited_s: Array
    """Less what a pipeline waits, sends and can't share out evenly, and exchanges of experts that
    the passes of some schedules hide: whatever its schedule, a step takes as long."""


def step_seconds(setting: Setting, points: Points) -> StepSeconds:
    """The time of each layout's step, by closed forms."""

    def of(piece: Points) -> tuple[Array, ...]:
        stages, found = closed_times(setting, piece, _network(setting, piece))
        return found.step_s, _unwaited_s(setting, piece, stages, found)

    return StepSeconds(*_in_pieces(of, points, 2))


def _unwaited_s(setting: Setting, points: Points, stages: StageWork, found: StepTimes) -> Array:
    whole_s = found.passes.whole_s
    # Stages of whole layers may hold more together than there are: see `bounding_stages`.
    too_many = (stages.layers * stages.count).sum((0, 1)) / setting.model.num_layers
    ranks = points.pp * np.maximum(too_many, 1)
    even_s = (stages.count * whole_s).sum(0) * points.num_micro_batches / ranks
    waits = found.terms["bubble"] + found.terms["exposed_comm.pp"]
    if setting.stack.overlaps_ep:
        waits = waits + found.terms["exposed_comm.ep"]
    # Of more and shorter stages more of each pass' gathering is hidden.
    waits = waits + np.where(points.frees_weights, found.terms["exposed_comm.fsdp"], 0.0)
    uneven_s = np.where(points.pp > 1, found.ran.seconds_of(found.passes) - even_s, 0.0)
    own_s = found.step_s - found.terms["straggler_wait"]
    return found.step_s * (1 - (waits + uneven_s) / own_s)


def peak_bytes(setting: Setting, points: Points, needed: bool = False) -> Array:
    """The peak memory of each layout's heaviest device, by the closed form: as torch reserves it,
    or only what must be there."""

    def of(piece: Points) -> tuple[Array, ...]:
        terms = memory_bytes(setting, piece, bounding_holdings(setting, piece))
        return (np.max(needed_bytes(terms) if needed else sum(terms.values()), 0),)

    return _in_pieces(of, points, 1)[0]


def _in_pieces(
    of: Callable[[Points], tuple[Array, ...]], points: Points, num_columns: int
) -> list[Array]:
    size = np.size(points.tp)
    if not size:
        return [np.zeros(0)] * num_columns
    rows = np.arange(size)
    pieces = [of(points.take(rows[at : at + _ROWS])) for at in range(0, size, _ROWS)]
    return [np.concatenate(columns) for columns in zip(*pieces, strict=True)]


def _network(setting: Setting, points: Points) -> NetworkParts:
    """As `NetworkParts.of`, by the distinct rows."""
    table = {name: getattr(points, name) for name in SEEN_BY_PARTS}
    table["sharded"], table["frees_weights"] = points.is_fsdp, points.frees_weights
    overlaps = setting.stack.overlaps_ep
    table["schedule"] = np.where((points.precision == _FP8) | overlaps, points.schedule, 0)
    table["paired"] = paired_share(points) if overlaps else np.zeros(1)
    n = len(points)
    first, group, _ = distinct({name: np.broadcast_to(c, n) for name, c in table.items()}, table)
    return _of_rows(NetworkParts.of(setting, points.take(first)), group)


def networks_of(setting: Setting, layouts: Sequence[Layout]) -> list[NetworkParts]:
    """Each concrete layout's own, priced together."""
    whole = _network(setting, Points.of(layouts, setting))
    return [_of_rows(whole, np.array([row])) for row in range(len(layouts))]


def _of_rows(network: NetworkParts, rows: Array) -> NetworkParts:
    """Some rows, or some more than once; of the works only what the data axes ask for."""
    works = [
        PartWork(
            params=_spread(work.params, rows),
            expert_params=_spread(work.expert_params, rows),
            frozen=_spread(work.frozen, rows),
            frozen_experts=_spread(work.frozen_experts, rows),
        )
        for work in network.works
    ]
    return NetworkParts(network.kinds, works, [_spread_part(part, rows) for part in network.parts])


def _spread(column: Array | float, group: Array) -> Array:
    """From the distinct rows to all."""
    column = np.asarray(column)
    return column[group] if column.size > 1 else column


def _spread_part(part: NetworkPart, group: Array) -> NetworkPart:
    return replace(
        part, **{each.name: _spread_pass(getattr(part, each.name), group) for each in fields(part)}
    )


def _spread_pass(one: PartPass, group: Array) -> PartPass:
    terms = {term: _spread(seconds, group) for term, seconds in one.terms.items()}
    return PartPass(terms, *(_spread(column, group) for column in one[1:]))
