"""Space: every layout of a cluster that can run, as a product of small tables.

A space of a hundred million layouts is never written out. It is the product of five tables:

- meshes: tp, pp, cp, fsdp, dp, zero, sequence_parallel, ulysses, ep,
- batches: the micro-batch,
- arithmetics: precision, param_dtype, compile, async_tp,
- pipeline options: the schedule of a pipeline and its stages per rank,
- memory savings: what saves memory for time: recompute, offload, 8-bit optimizer state.

`join` multiplies two tables and keeps what the rules (`config.feasible`) let run; the search
joins only what it has to look at, and `Space.count` adds up the rest without visiting it.

A setting that a person fixed has one value in its table. Settings without "auto" are what the
layout says unless they are named in `free`, for they change numerics (8-bit state, fp8) or fill the
host's memory (offload). Not here: which layout is good (`plan.search.search`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import numpy as np

from paceline.config.errors import InputError
from paceline.config.feasible import RULES
from paceline.config.frozen import nearest
from paceline.config.hardware import Cluster
from paceline.config.layout import PRECISIONS, RECOMPUTE, Layout, LayoutSpec
from paceline.config.schedule import SCHEDULES, num_stages
from paceline.plan.collectives import tiers_of
from paceline.plan.points import Array, Points, Setting
from paceline.plan.resolve import bucket_mib_of, divisors, split_of
from paceline.plan.search.tables import (
    Columns,
    allowed,
    crossing,
    distinct,
    join,
    size_of,
    take,
)

FREE = ("precision", "param_dtype", "async_tp", "optimizer_state", "offload", "recompute_layers")
"""Settings that are searched only where a person asks for it."""
BOUNDED = ("dp", "fsdp", "tp", "pp", "cp", "ep", "ulysses", "micro_batch", "stages_per_rank")
"""Settings that can be bounded."""
# The bubble shrinks with 1 / stages per rank: beyond a few, one more changes little.
_STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
_OFFLOADS = (
    (), ("activations",), ("optimizer",), ("params",), ("activations", "optimizer"),
    ("activations", "params"),
)  # fmt: skip
_QUARTERS = 4
"""Recompute is offered for quarters of the layers of a stage."""
_MESHES_AT_ONCE = 4096


@dataclass(frozen=True)
class SearchConstraints:
    """What a person fixed, freed or bounded; the rest is searched."""

    layout: LayoutSpec = field(default_factory=LayoutSpec)
    """Whatever isn't "auto" is fixed, but for the settings in `free`."""
    free: tuple[str, ...] = ()
    """Names of `FREE` to search as well."""
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Least and most of a setting of `BOUNDED`; tp is bound by the fast domain by default."""

    def __post_init__(self) -> None:
        for name in self.free:
            if name not in FREE:
                raise InputError(f"free: {name} can't be freed{nearest(name, FREE)}")
        for name, (least, most) in self.bounds.items():
            if name not in BOUNDED:
                raise InputError(f"bounds: {name} can't be bounded{nearest(name, BOUNDED)}")
            if not 1 <= least <= most:
                raise InputError(
                    f"bounds: {name} from {least} to {most} leaves nothing: give a least of 1 or "
                    "more and a most that is no smaller."
                )

    def counts(self, name: str, every: Iterable[int], most: int | None = None) -> Array:
        """The values of a count: the fixed one, or those of `every` within bounds."""
        fixed = getattr(self.layout, name)
        if fixed != "auto":
            return np.array([fixed])
        low, high = self.bounds.get(name, (1, most))
        return np.array([n for n in every if low <= n and (high is None or n <= high)], int)

    def switches(self, name: str, every: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of another setting: the fixed one, or all where it is "auto" or free."""
        fixed = getattr(self.layout, name)
        return every if fixed == "auto" or name in self.free else (fixed,)


@dataclass(frozen=True, eq=False)
class Space:
    """All layouts that can run in a setting and agree with the constraints, as a product of
    tables."""

    setting: Setting
    constraints: SearchConstraints
    meshes: Columns
    batches: Columns
    arithmetics: Columns
    pipeline_options: Columns
    memory_savings: Columns
    tight: bool = False
    """Whether of a device's memory only that counts which must be there."""

    @classmethod
    def of(cls, setting: Setting, constraints: SearchConstraints | None = None) -> "Space":
        """The space of a setting."""
        constraints = constraints or SearchConstraints()
        return cls(
            setting,
            constraints,
            _meshes(setting, constraints),
            {"micro_batch": constraints.counts("micro_batch", divisors(setting.global_batch))},
            _arithmetics(setting, constraints),
            _pipeline_options(setting, constraints),
            _memory_savings(constraints),
        )

    def partial_layouts(self, meshes: Array | None = None) -> Columns:
        """Meshes x batches x arithmetics that can run; `meshes`: rows of the meshes, or all."""
        rows = np.arange(size_of(self.meshes)) if meshes is None else meshes
        return self.computed(self.batched(rows))

    def batched(self, meshes: Array) -> Columns:
        """Meshes x batches that can run, the smallest micro-batch of each mesh first.

        The row of each mesh is kept in the column "mesh".
        """
        table: Columns = {"mesh": meshes, **take(self.meshes, meshes)}
        table = join(self.setting, table, self.batches)
        samples = table["dp"] * table["fsdp"] * table["micro_batch"]
        return {**table, "num_micro_batches": self.setting.global_batch // samples}

    def computed(self, batched: Columns) -> Columns:
        """What `batched` returned x arithmetics that can run."""
        return join(self.setting, batched, self.arithmetics)

    def pipelined(
        self, partial_layouts: Columns, pipeline_options: Columns | None = None
    ) -> Columns:
        """Partial layouts x schedules that can run, with the `stages` that each makes."""
        table = join(self.setting, partial_layouts, pipeline_options or self.pipeline_options)
        stages = num_stages(table["pp"], table["schedule"], table["stages_per_rank"])
        layers = -(-self.setting.model.num_layers // np.maximum(stages, 1))
        return {**table, "stages": stages, "layers_per_stage": layers}

    def completed(self, pipelined: Columns, memory_savings: Columns | None = None) -> Columns:
        """What `pipelined` returned x memory savings that can run: all settings of Points."""
        table = join(self.setting, pipelined, memory_savings or self.memory_savings, _is_distinct)
        return {**table, "recompute_share": self._recompute_share(table)}

    def _recompute_share(self, table: Columns) -> Array:
        """As `Points.of` finds it in the layout: the same count of layers in every stage."""
        fixed = self.constraints.layout.recompute_layers
        whole = table["quarters"] == _QUARTERS
        layers = table["quarters"] * table["layers_per_stage"] // _QUARTERS
        if fixed != "all" and "recompute_layers" not in self.constraints.free:
            whole, layers = np.array(False), np.where(table["quarters"] > 0, fixed, 0)
        share = layers * table["stages"] / self.setting.model.num_layers
        return np.where(whole, 1.0, np.minimum(1.0, share))

    def points(self, table: Columns) -> Points:
        """The columns of Points in a table that `completed` returned."""
        fixed = self.constraints.layout.bucket_mib
        mib = bucket_mib_of(self.setting.model) if fixed == "auto" else fixed
        table = {**table, "bucket_bytes": np.array([mib * 2.0**20])}
        return Points.of_table(table, self.setting)

    def count(self) -> int:
        """How many layouts the space has, without visiting them."""
        names = self._met_later()
        found: Counter[tuple[int, ...]] = Counter()
        for rows in self.chunks(_MESHES_AT_ONCE):
            partial_layouts = self.partial_layouts(rows)
            first, _, counts = distinct(partial_layouts, names)
            keys = zip(*(partial_layouts[name][first].tolist() for name in names), strict=True)
            found.update(dict(zip(keys, counts.tolist(), strict=True)))
        if not found:
            return 0
        columns = zip(*found, strict=True)
        table = {name: np.array(column) for name, column in zip(names, columns, strict=True)}
        return self._count_pipelined({**table, "weight": np.array([*found.values()])})

    def _met_later(self) -> list[str]:
        """Columns of partial layouts that rules about pipeline options and memory savings read."""
        later = {*self.pipeline_options, *self.memory_savings}
        reads = {name for rule in RULES if not later.isdisjoint(rule.reads) for name in rule.reads}
        return sorted((reads - later) & {each.name for each in fields(Points)})

    def _count_pipelined(self, partial_layouts: Columns) -> int:
        pipelined = self.pipelined(partial_layouts)
        names = [name for name in ("fsdp", "tp", "layers_per_stage") if name in pipelined]
        first, group, _ = distinct(pipelined, names)
        weight = np.bincount(group, pipelined["weight"], len(first))
        left, _ = crossing(self.setting, take(pipelined, first), self.memory_savings, _is_distinct)
        return int(weight[left].sum())

    def chunks(self, num: int) -> list[Array]:
        """The rows of the meshes, so many at a time."""
        size = size_of(self.meshes)
        return [np.arange(at, min(at + num, size)) for at in range(0, size, num)]

    def layout(self, points: Points, index: int) -> Layout:
        """The layout of one point."""
        row = {
            name: (column[index] if np.size(column) > 1 else column.flat[0]).item()
            for name, column in vars(points).items()
        }
        schedule = SCHEDULES[row["schedule"]]
        stages = int(num_stages(row["pp"], row["schedule"], row["stages_per_rank"]))
        decided = {
            **{name: row[name] for name in _SAME},
            "dp": row["workers"] * row["dp"],
            "schedule": schedule,
            "split": () if row["pp"] == 1 else self._split(stages),
            "precision": PRECISIONS[row["precision"]],
            "param_dtype": PRECISIONS[row["param_dtype"]],
            "optimizer_state": "8bit" if row["optimizer_8bit"] else "full",
            "recompute": RECOMPUTE[row["recompute"]],
            "recompute_layers": self._recompute_layers(row, stages),
            "offload": tuple(name for name in _OFFLOADABLE if row[f"offload_{name}"]),
            "bucket_mib": row["bucket_bytes"] / 2**20,
        }
        return Layout.parse({**vars(self.constraints.layout), **decided})

    def _split(self, stages: int) -> tuple[int, ...]:
        wished = self.constraints.layout.split
        if wished != "auto" and wished:
            return wished
        if stages > self.setting.model.num_layers:
            return (1,) * stages  # can't run, and the check of the layout says why
        return split_of(self.setting.model, self.setting.seq_len, stages)

    def _recompute_layers(self, row: Mapping[str, Any], stages: int) -> Any:
        if row["recompute"] == 0 or row["recompute_share"] >= 1:
            return "all"
        return round(row["recompute_share"] * self.setting.model.num_layers / stages)


_SAME = (
    *("fsdp", "zero", "tp", "sequence_parallel", "async_tp", "cp", "ulysses", "ep", "pp"),
    *("stages_per_rank", "micro_batch", "compile"),
)
_OFFLOADABLE = ("activations", "optimizer", "params")


# ---- the tables ----------------------------------------------------------------------------------


def _meshes(setting: Setting, constraints: SearchConstraints) -> Columns:
    """Row by row simpler first: a tie is won by the earlier row."""
    ranks, model = setting.cluster.num_devices, setting.model
    parts = divisors(ranks)
    experts = divisors(model.experts.num_experts) if model.experts else [1]
    table: Columns = {"tp": constraints.counts("tp", parts, fast_domain(setting.cluster))}
    table = _kept(setting, table)
    table = join(setting, table, {"pp": constraints.counts("pp", parts)})
    table = take(table, np.flatnonzero(table["pp"] <= model.num_layers))
    table = join(setting, table, {"cp": constraints.counts("cp", parts)})
    table = join(setting, table, {"fsdp": constraints.counts("fsdp", parts)})
    taken = table["tp"] * table["pp"] * table["cp"] * table["fsdp"]
    table = _kept(setting, {**table, "dp": np.maximum(1, ranks // taken)})
    asked = np.isin(table["dp"], constraints.counts("dp", parts))
    # What no micro-batch could divide.
    even = setting.global_batch % (table["dp"] * table["fsdp"]) == 0
    table = take(table, np.flatnonzero(asked & even))
    table = join(setting, table, {"zero": np.array(constraints.switches("zero", (0, 1, 2, 3)))})
    both = np.array(constraints.switches("sequence_parallel", (False, True)))
    table = join(setting, table, {"sequence_parallel": both})
    table = join(setting, table, {"ulysses": constraints.counts("ulysses", parts)})
    table = join(setting, table, {"ep": constraints.counts("ep", experts)})
    return _kept(setting, table, rebalance_every=constraints.layout.rebalance_every)


def _kept(setting: Setting, table: Columns, **fixed: Any) -> Columns:
    """The rows of a table that can run, together with settings that are the same for all rows."""
    runs = allowed(setting, {**table, **fixed}, fixed or table)
    return take(table, np.flatnonzero(np.broadcast_to(runs, size_of(table))))


def _arithmetics(setting: Setting, constraints: SearchConstraints) -> Columns:
    device = setting.device
    safest: str = device.safest_fast_precision
    if constraints.layout.param_dtype == "fp64":
        safest = "fp64"
    precisions = (constraints.layout.precision,)
    if constraints.layout.precision == "auto" or "precision" in constraints.free:
        precisions = device.precisions if "precision" in constraints.free else (safest,)  # type: ignore[assignment]
    # Eager on CPUs unless asked: it starts at once, and needs no compiler on the machine.
    compiled = (False, True) if device.kind != "cpu" else (False,)
    rows = product(
        map(PRECISIONS.index, precisions),
        map(PRECISIONS.index, constraints.switches("param_dtype", ("fp32", "bf16"))),
        constraints.switches("compile", compiled),
        constraints.switches("async_tp", (False, True)),
    )
    return _kept(setting, _table(("precision", "param_dtype", "compile", "async_tp"), rows))


def _pipeline_options(setting: Setting, constraints: SearchConstraints) -> Columns:
    per_rank = constraints.counts("stages_per_rank", _STAGES_PER_RANK)
    names = constraints.switches("schedule", SCHEDULES)
    rows = product(map(SCHEDULES.index, names), per_rank.tolist())
    table = _table(("schedule", "stages_per_rank"), rows)
    return _kept(setting, table, rebalance_every=constraints.layout.rebalance_every)


def _memory_savings(constraints: SearchConstraints) -> Columns:
    """What saves no memory comes first."""
    layers = constraints.layout.recompute == "auto" or "recompute_layers" in constraints.free
    parts = range(1, _QUARTERS + 1) if layers else (_QUARTERS,)
    recomputes = [
        (RECOMPUTE.index(name), quarters)
        for name in constraints.switches("recompute", RECOMPUTE)
        for quarters in (parts if name != "none" else (0,))
    ]
    offloads = constraints.switches("offload", _OFFLOADS)
    states = constraints.switches("optimizer_state", ("full", "8bit"))
    rows = (
        (*recompute, *(name in offload for name in _OFFLOADABLE), state == "8bit")
        for offload, recompute, state in product(offloads, recomputes, states)
    )
    names = ("recompute", "quarters", *(f"offload_{name}" for name in _OFFLOADABLE))
    return _table((*names, "optimizer_8bit"), rows)


def _table(names: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> Columns:
    columns = zip(*rows, strict=True)
    return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


def _is_distinct(table: Columns) -> Array:
    """Whether so many quarters of a stage's layers are a count of their own, 1 or more."""
    quarters, layers = table["quarters"], table["layers_per_stage"]
    fewer = (quarters - 1) * layers // _QUARTERS
    part = quarters * layers // _QUARTERS > np.maximum(fewer, 0)
    return (quarters == 0) | (quarters == _QUARTERS) | part


def fast_domain(cluster: Cluster) -> int:
    """Devices that the fastest links connect: where tensor parallelism stays unless asked."""
    try:
        return tiers_of(cluster)[0].num_devices
    except (InputError, IndexError):  # its links are not known
        return cluster.devices_per_node
