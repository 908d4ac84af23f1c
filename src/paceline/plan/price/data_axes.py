"""Data axes: what gathering parameters and reducing gradients adds to a step.

How it works: parameters are gathered and reduced in units, as FSDP2 does it: each block, the
experts of each block, and the rest (embedding, last norm, head). While one unit computes, the next
one is gathered and the last one reduced, on one stream of communication; a step waits for what
takes longer than the computing beside it, for the first unit's gathering and for the last one's
reduction. Replicas add up their (shards of) gradients once a step, in the last micro-batch's
backward pass; DDP does it bucket by bucket. The zero degrees are those of `parallel.fsdp`:

| zero | gathers | reduces |
|---|---|---|
| 3 | in each forward and backward pass | in each backward pass |
| 2 | once a step | in each backward pass |
| 1 | once a step | once a step |

In a pipeline parameters stay gathered and gradients whole until the last micro-batch, whatever the
degree (torch.distributed.pipelining, ours): each is exchanged once a step. The reduction of a stage
comes behind its last backward pass, beside what other stages of the rank still do.

Overlap: https://arxiv.org/abs/2304.11277 (FSDP), https://arxiv.org/abs/2006.15704 (DDP).

Legend of shapes: n points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.config.stack import constant
from paceline.plan.points import PRECISIONS, SCHEDULES, Array, Points, Setting
from paceline.plan.price.compress import (
    bits_per_value,
    codec_s,
    gathering_s,
    scattering_s,
    sent_bytes,
    waiting_share,
    wire_ops,
)
from paceline.plan.price.parts import CollectiveRequest, NetworkPart, hidden_share
from paceline.plan.work import PartWork, autocasts, is_sharded

_DUALPIPE = SCHEDULES.index("dualpipe")
_FP8 = PRECISIONS.index("fp8")


class DataGroups(NamedTuple):
    """Ranks that share parameters of one sort, as `comm.mesh` arranges them."""

    replicas: Array
    replica_stride: Array
    shards: Array
    shard_stride: Array


class HeldParameters(NamedTuple):
    """What the busiest pipeline rank holds: (n,) each."""

    blocks: list[Array]
    """Of each kind."""
    embeddings: Array
    heads: Array


@dataclass(frozen=True, eq=False)
class DataSeconds:
    """Seconds of a step."""

    fsdp_s: Array
    """Exposed."""
    dp_s: Array
    """Exposed."""
    hidden_s: Array
    """Of communication beside computing, which is slower meanwhile."""


def dense_groups(points: Points) -> DataGroups:
    """Ranks that share a sequence (cp) hold the same parameters: they belong to the data axes, and
    shard with one sample at a time too where the software says so (Megatron's dp x cp, dp_shard x
    cp of torchtitan). Ours has shards only with fsdp above 1 (config/feasible.py).
    """
    shards = np.where(points.zero > 0, points.fsdp * points.cp, 1)
    replicas = points.dp * np.where(points.zero > 0, 1, points.cp)
    return DataGroups(replicas, points.tp * shards, shards, points.tp)


def expert_groups(setting: Setting, points: Points) -> DataGroups:
    """Ranks that hold the same experts: what ep leaves of the data ranks, outermost first."""
    folds_tp = setting.stack.expert_tp == "one"
    inner = points.fsdp * points.cp * (points.tp if folds_tp else 1)
    left = np.maximum(inner / points.ep, 1)
    outer = np.maximum(points.dp * np.minimum(inner / points.ep, 1), 1)
    shards = np.where(points.zero > 0, left, 1)
    replicas = outer * np.where(points.zero > 0, 1, left)
    stride = points.ep * (1 if folds_tp else points.tp)
    return DataGroups(replicas, stride * shards, shards, stride)


def wire_bytes(setting: Setting, points: Points) -> tuple[Array, Array]:
    """Bytes per value: of a gathered parameter, of a gradient that isn't compressed."""
    gathered = points.value_bytes
    if setting.stack.gather_dtype == "fp8":
        gathered = np.where(points.precision == _FP8, 1, points.value_bytes)
    named = {"fp32": 4, "bf16": 2}.get(setting.stack.grad_dtype)
    # FSDP2 reduces in fp32 where it computes in 16 bits (parallel.apply); DDP what it has.
    reduced = np.maximum(points.value_bytes, 4)
    reduced = (
        np.where(is_sharded(points), reduced, points.param_bytes)
        if named is None
        else (np.full(1, float(named)))
    )
    return gathered, reduced


def coded_bytes(setting: Setting, points: Points, works: Sequence[PartWork]) -> Array:
    """Bytes per value of a gradient between replicas, as `wire_ops` carry it."""
    _, reduced = wire_bytes(setting, points)
    return bits_per_value(setting.replica_codec, works, reduced) / 8


class _UnitSeconds(NamedTuple):
    """Seconds of a unit's collectives, or of what codes them."""

    gather_s: Array
    reduce_s: Array
    replicate_s: Array


def requests(
    setting: Setting, points: Points, works: Sequence[PartWork], held: HeldParameters
) -> list[CollectiveRequest]:
    """The collectives of all units: for each part those of the dense parameters, then of the
    experts (`_num_calls` each); and those of a bucket (or fragment)."""
    across = coded_bytes(setting, points, works)
    sharded = is_sharded(points)
    asked: list[CollectiveRequest] = []
    for work in works:
        for params, groups in _halves(setting, points, work):
            replicas = np.where(sharded, groups.replicas, 1)
            asked += _among_shards(setting, points, params, groups)
            asked += [
                CollectiveRequest(
                    op, params / groups.shards * across * often, replicas, groups.replica_stride
                )
                for op, often in wire_ops(setting.replica_codec, replicas)
            ]
    groups = dense_groups(points)
    replicas = np.where(sharded, 1, groups.replicas)
    _, reduced = wire_bytes(setting, points)
    bucket = _bucket_bytes(setting, points, total_params(works, held) * reduced)
    return asked + [
        CollectiveRequest(op, bucket / reduced * across * often, replicas, groups.replica_stride)
        for op, often in wire_ops(setting.replica_codec, replicas)
    ]


def _halves(
    setting: Setting, points: Points, work: PartWork
) -> tuple[tuple[Array, DataGroups], ...]:
    """A part's dense parameters and its experts, each with the ranks that share them."""
    return (
        (np.asarray(work.params), dense_groups(points)),
        (np.asarray(work.expert_params), expert_groups(setting, points)),
    )


def _among_shards(
    setting: Setting, points: Points, params: Array, groups: DataGroups
) -> list[CollectiveRequest]:
    """The gathering of a unit's parameters, and the reduction of its gradients. Coded rows go
    straight to the rank that keeps them, by the backend's collectives; hierarchically, sums of
    nodes do, behind an exact reduction inside."""
    gathered, reduced = wire_bytes(setting, points)
    by = "" if setting.shard_algorithm == "backend" else f".{setting.shard_algorithm}"
    shards = np.where(is_sharded(points), groups.shards, 1)
    weights, gradients = setting.weight_codec, setting.shard_codec
    gather = "all_gather" + (by if weights.kind == "none" else "")
    reduce = "reduce_scatter" + by if gradients.kind == "none" else "all_to_all"
    gathered = bits_per_value(weights, (), gathered) / 8
    coded = bits_per_value(gradients, (), reduced) / 8
    stride, inside = groups.shard_stride, setting.shards_inside(shards, groups.shard_stride)
    asked = [
        CollectiveRequest(gather, params * gathered, shards, stride),
        CollectiveRequest(reduce, params * coded / inside, shards / inside, stride * inside),
    ]
    if setting.codes_between_nodes:
        within = "reduce_scatter.halving_doubling"
        asked.append(CollectiveRequest(within, params * reduced, inside, stride))
    return asked


def _num_reductions(setting: Setting) -> int:
    """Collectives that scatter a unit's gradients."""
    return 2 if setting.codes_between_nodes else 1


def _num_calls(setting: Setting) -> int:
    """Collectives of a unit's dense parameters, or of its experts."""
    return 1 + _num_reductions(setting) + len(wire_ops(setting.replica_codec, 1))


def _bucket_bytes(setting: Setting, points: Points, total_bytes: Array) -> Array:
    """What travels together: one of DDP's buckets, or a fragment of a local update."""
    if setting.updates_locally:
        return total_bytes / setting.comm.local.fragments
    if setting.stack.states == "buffers" and not setting.stack.overlaps_data_axes:
        return total_bytes  # the whole buffer in one call
    return np.minimum(np.maximum(points.bucket_bytes, 1), total_bytes)


def total_params(works: Sequence[PartWork], held: HeldParameters) -> Array:
    """Parameters of a rank before sharding."""
    *blocks, embedding, head = works
    own = sum(
        (
            count * (work.params + work.expert_params)
            for count, work in zip(held.blocks, blocks, strict=True)
        ),
        np.zeros(1),
    )
    return own + held.embeddings * embedding.params + held.heads * head.params


def data_seconds(
    setting: Setting,
    points: Points,
    works: Sequence[PartWork],
    parts: Sequence[NetworkPart],
    held: HeldParameters,
    seconds: Sequence[Array],
) -> DataSeconds:
    """What the data axes add to a step; `seconds` answer `requests`."""
    num_of_units = 2 * _num_calls(setting) * len(works)
    units = _units(setting, seconds[:num_of_units])
    sharded = _sharded(setting, points, works, parts, held, units)
    bucket_s = sum(seconds[num_of_units:], np.zeros(1))
    buckets = _buckets(setting, points, works, parts, held, bucket_s)
    every = 1 / setting.comm.local.every if setting.updates_locally else 1.0
    is_ddp = ~is_sharded(points)
    return DataSeconds(
        np.where(is_ddp, 0.0, sharded.fsdp_s),
        np.where(is_ddp, buckets.dp_s, sharded.dp_s) * every,
        np.where(is_ddp, buckets.hidden_s * every, sharded.hidden_s),
    )


def _units(setting: Setting, seconds: Sequence[Array]) -> list[_UnitSeconds]:
    """Of each part, its dense parameters and its experts together."""
    count = _num_calls(setting)
    calls = [seconds[at : at + count] for at in range(0, len(seconds), count)]
    own, none = 1 + _num_reductions(setting), np.zeros(1)
    halves = [
        _UnitSeconds(call[0], sum(call[1:own], none), sum(call[own:], none)) for call in calls
    ]
    return list(map(_both, halves[::2], halves[1::2]))


def _both(one: _UnitSeconds, other: _UnitSeconds) -> _UnitSeconds:
    return _UnitSeconds(*(mine + its for mine, its in zip(one, other, strict=True)))


def _coding(setting: Setting, points: Points, works: Sequence[PartWork]) -> list[_UnitSeconds]:
    """Seconds in which a rank codes and decodes what each part exchanges."""
    if setting.is_exact:
        return [_UnitSeconds(*(np.zeros(1),) * 3)] * len(works)
    return [
        _both(*(_coding_of(setting, *half) for half in _halves(setting, points, work)))
        for work in works
    ]


def _coding_of(setting: Setting, params: Array, groups: DataGroups) -> _UnitSeconds:
    device, own = setting.device, params / groups.shards
    replicated_s = codec_s(device, setting.replica_codec, own, groups.replicas)
    inside = setting.shards_inside(groups.shards, groups.shard_stride)
    return _UnitSeconds(
        gathering_s(device, setting.weight_codec, params, groups.shards),
        scattering_s(device, setting.shard_codec, params / inside, groups.shards / inside),
        np.where(groups.replicas > 1, replicated_s, 0.0),
    )


class _CollectivePasses(NamedTuple):
    """How often FSDP2 gathers and reduces in a step."""

    forward: Array
    """Gatherings in forward passes."""
    again: Array
    """Of blocks, in backward passes."""
    backward: Array
    """Reductions."""

    @staticmethod
    def of(points: Points) -> "_CollectivePasses":
        """Of the zero degree and the micro-batches."""
        zero, batches = points.zero_of_passes, points.num_micro_batches
        backward = np.where(zero >= 2, batches, 1)
        forward = np.where(zero == 3, batches, 1)
        return _CollectivePasses(forward, np.where(zero == 3, backward, 0), backward)


def _of_blocks(held: HeldParameters, units: Sequence[_UnitSeconds]) -> _UnitSeconds:
    """One pass of all blocks of a rank."""
    columns = zip(*units[:-2], strict=True)
    return _UnitSeconds(
        *(
            sum((count * s for count, s in zip(held.blocks, column, strict=True)), np.zeros(1))
            for column in columns
        )
    )


def _of_root(held: HeldParameters, units: Sequence[_UnitSeconds]) -> _UnitSeconds:
    """One pass of what is in no block."""
    *_, embedding, head = units
    return _UnitSeconds(
        *(held.embeddings * e + held.heads * h for e, h in zip(embedding, head, strict=True))
    )


def _in_step(points: Points, held: HeldParameters, units: Sequence[_UnitSeconds]) -> _UnitSeconds:
    """All that a step has of each."""
    blocks, root, passes = (
        _of_blocks(held, units),
        _of_root(held, units),
        _CollectivePasses.of(points),
    )
    return _UnitSeconds(
        passes.forward * (root.gather_s + blocks.gather_s) + passes.again * blocks.gather_s,
        passes.backward * (root.reduce_s + blocks.reduce_s),
        root.replicate_s + blocks.replicate_s,
    )


def _sharded(
    setting: Setting,
    points: Points,
    works: Sequence[PartWork],
    parts: Sequence[NetworkPart],
    held: HeldParameters,
    units: list[_UnitSeconds],
) -> DataSeconds:
    """What FSDP2 adds. A gathering or reduction takes a CPU's time of its own; coding takes that of
    the device that computes."""
    host_s = constant(setting.stack, "unit_us") * 1e-6 if setting.device.is_cpu else 0.0
    share = hidden_share(setting) * setting.stack.overlaps_data_axes
    root, passes = _of_root(held, units), _CollectivePasses.of(points)
    num_layers = sum(held.blocks, np.zeros(1))
    # One unit is gathered, or reduced, with nothing to compute beside.
    inner = share * np.maximum(num_layers - 1, 0) / np.maximum(num_layers, 1)
    hidden_forward, hidden_backward, spare = (np.zeros(1),) * 3
    for count, unit, part in zip(held.blocks, units, parts, strict=False):
        again_s = np.where(points.zero_of_passes == 3, unit.gather_s, 0.0)
        backward_s = again_s + unit.reduce_s
        hidden_forward = hidden_forward + count * np.minimum(unit.gather_s, part.forward.beside_s)
        beside = np.minimum(backward_s, part.beside_backward_s)
        hidden_backward = hidden_backward + count * beside
        spare = spare + count * (part.beside_backward_s - beside)
    hidden_forward, hidden_backward = inner * hidden_forward, inner * hidden_backward
    hidden_backward = hidden_backward * _beside_reduction(points)
    num_units = num_layers + 1
    num_host = passes.forward * num_units + passes.again * num_layers + passes.backward * num_units
    total, coding = (
        _in_step(points, held, each) for each in (units, _coding(setting, points, works))
    )
    total_s = total.gather_s + total.reduce_s + host_s * num_host
    # The next micro-batch goes on without waiting for the last reductions of this one.
    late = np.maximum(passes.backward - 1, 0) * share * root.reduce_s
    hidden = passes.forward * hidden_forward + passes.backward * hidden_backward + late
    hidden_replicas = np.minimum(
        share * np.maximum(total.replicate_s - root.replicate_s, 0),
        spare * _beside_reduction(points),
    )
    return DataSeconds(
        total_s - hidden + coding.gather_s + coding.reduce_s,
        total.replicate_s - hidden_replicas + coding.replicate_s,
        hidden + hidden_replicas,
    )


def _beside_reduction(points: Points) -> Array:
    """Part of a rank's backward work that may run beside its reductions."""
    return np.where(points.pp > 1, 1 - 1 / np.maximum(points.stages_per_rank, 1), 1.0)


def _buckets(
    setting: Setting,
    points: Points,
    works: Sequence[PartWork],
    parts: Sequence[NetworkPart],
    held: HeldParameters,
    bucket_s: Array,
) -> DataSeconds:
    """DDP: full buckets while the last backward pass goes on; the last one comes behind it.

    Coding takes the device that computes; beside it, too, a bucket may be on its way. Local updates
    are exchanged when nothing else is done, but for fragments that may be some steps on their way.
    """
    _, reduced = wire_bytes(setting, points)
    total_bytes = total_params(works, held) * reduced
    bucket_bytes = _bucket_bytes(setting, points, total_bytes)
    number = np.maximum(total_bytes / np.maximum(bucket_bytes, 1), 1)
    all_s = number * bucket_s
    replicas = dense_groups(points).replicas
    coding_s = codec_s(setting.device, setting.replica_codec, total_bytes / reduced, replicas)
    coding_s = np.where(replicas > 1, coding_s, 0.0)
    backward_s = sum(
        (count * part.beside_backward_s for count, part in zip(held.blocks, parts, strict=False)),
        np.zeros(1),
    )
    # Nothing is on its way before a bucket is full (DDP's first one, of 1 MiB, is soon through).
    beside_s = (backward_s + coding_s) * (1 - 1 / number)
    late_s = np.maximum(all_s - bucket_s, 0)
    if setting.updates_locally:
        beside_s, late_s = _steps_beside_s(setting, points, parts, held, backward_s), all_s
    share = constant(setting.stack, "overlap_share") * setting.stack.overlaps_data_axes
    hideable = share * _waiting_share(setting, points, works, held, all_s)
    hidden_s = hideable * np.minimum(late_s, beside_s)
    none = np.zeros(1)
    return DataSeconds(none, all_s - hidden_s + coding_s, hidden_s)


def _steps_beside_s(
    setting: Setting,
    points: Points,
    parts: Sequence[NetworkPart],
    held: HeldParameters,
    backward_s: Array,
) -> Array:
    """Seconds of the blocks' passes in the steps that all fragments are on their way."""
    forward_s = sum(
        (count * part.forward.beside_s for count, part in zip(held.blocks, parts, strict=False)),
        np.zeros(1),
    )
    num_steps = setting.comm.local.fragments * setting.comm.local.overlap_steps
    return num_steps * points.num_micro_batches * (forward_s + backward_s)


def _waiting_share(
    setting: Setting, points: Points, works: Sequence[PartWork], held: HeldParameters, all_s: Array
) -> Array:
    """Part of the buckets' seconds in which the device could compute."""
    coded = total_params(works, held) * coded_bytes(setting, points, works)
    sent = sent_bytes(setting.replica_codec, coded, dense_groups(points).replicas)
    return waiting_share(setting.device, setting.stack, sent, all_s)


def shard_of_params(
    setting: Setting, points: Points, works: Sequence[PartWork], held: HeldParameters
) -> Array:
    """Parameters whose optimizer state a rank keeps, hence steps."""
    *blocks, embedding, head = works
    dense, experts = dense_groups(points), expert_groups(setting, points)
    whole = held.embeddings * embedding.params + held.heads * head.params
    of_experts: Array = np.zeros(1)
    for count, work in zip(held.blocks, blocks, strict=True):
        whole = whole + count * work.params
        of_experts = of_experts + count * work.expert_params
    return whole / dense.shards + of_experts / experts.shards


def grad_copy_bytes(
    setting: Setting, points: Points, works: Sequence[PartWork], held: HeldParameters
) -> Array:
    """Bytes moved per micro-batch to cast and add up gradients, and to copy in and out of buckets.

    A gathered parameter is copied out of the flat buffer (read and written), its gradient into
    another (read in its type, written in that of the reduction). What stays whole is added up: read
    twice and written.
    """
    params, zero = total_params(works, held), points.zero_of_passes
    gathered, reduced = wire_bytes(setting, points)
    per_pass = np.where(zero == 3, 4.0, 0.0) * gathered
    per_pass = per_pass + np.where(zero >= 2, gathered + reduced, 0.0)
    if setting.device.is_cpu:
        # Copied once a step as well; and gloo sums up, so that the mean is a kernel of its own.
        once = 1 / np.maximum(points.num_micro_batches, 1)
        gathers = np.where(zero == 3, 2.0, once)
        reductions = np.where(zero >= 2, 1.0, once)
        per_pass = gathers * 2 * gathered + reductions * (gathered + 3 * reduced)
    whole = zero < 2
    adds = np.where(whole & (points.num_micro_batches > 1), 3 * reduced, 0.0)
    casts = np.where(autocasts(setting, points), 2 * (points.param_bytes + points.value_bytes), 0.0)
    return params * np.where(is_sharded(points), per_pass + adds, adds + casts)
