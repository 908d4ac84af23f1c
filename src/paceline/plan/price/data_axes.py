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

In a pipeline it is the same, stage by stage. At 1 the reduction of a stage comes behind its last
backward pass, beside what other stages of the rank still do. At 2 and 3 each pass takes longer by
what it exchanges, and what other ranks wait for it (`step.times_of`).

Workers of local updates are priced as runs of their own, with a round in every so many steps: each
rank's share of the parameters goes to those at its place in the other workers.

Overlap: https://arxiv.org/abs/2304.11277 (FSDP), https://arxiv.org/abs/2006.15704 (DDP).

Legend of shapes: n points.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from paceline.config.layout import PRECISIONS
from paceline.config.stack import constant
from paceline.plan.data_groups import DataGroups, dense_groups, expert_groups
from paceline.plan.memory.parameter_counts import experts_apart
from paceline.plan.points import Array, Points, Setting
from paceline.plan.price.compress import (
    bits_per_value,
    codec_s,
    gathering_s,
    scattering_s,
    sent_bytes,
    wire_ops,
)
from paceline.plan.price.pace import hideable_share
from paceline.plan.price.parts import CollectiveRequest, NetworkPart, hidden_share
from paceline.plan.work import PartWork, autocasts

_FP8 = PRECISIONS.index("fp8")


class HeldParameters(NamedTuple):
    """What the busiest pipeline rank holds: (n,) each."""

    blocks: list[Array]
    """Of each kind."""
    embeddings: Array
    heads: Array

    def in_blocks(self, each: Iterable[Array | float]) -> Array:
        """The sum of something over all blocks of the rank, of those of each kind."""
        return sum((n * one for n, one in zip(self.blocks, each, strict=True)), np.zeros(1))


@dataclass(frozen=True, eq=False)
class DataSeconds:
    """Seconds of a step."""

    fsdp_s: Array
    """Exposed."""
    dp_s: Array
    """Exposed."""
    hidden_s: Array
    """Of communication beside computing, which is slower meanwhile."""


def wire_bytes(setting: Setting, points: Points) -> tuple[Array, Array]:
    """Bytes per value: of a gathered parameter, of a gradient that isn't compressed."""
    gathered = points.value_bytes
    if setting.stack.gather_dtype == "fp8":
        gathered = np.where(points.precision == _FP8, 1, points.value_bytes)
    named = {"fp32": 4, "bf16": 2}.get(setting.stack.grad_dtype)
    # FSDP2 reduces in fp32 where it computes in 16 bits (parallel.apply); DDP what it has.
    reduced = np.maximum(points.value_bytes, 4)
    reduced = (
        np.where(points.is_fsdp, reduced, points.param_bytes)
        if named is None
        else (np.full(1, float(named)))
    )
    return gathered, reduced


class _UnitSeconds(NamedTuple):
    """Seconds of a unit's collectives, or of what codes them."""

    gather_s: Array
    reduce_s: Array
    replicate_s: Array


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
        zero, batches = points.zero, points.num_micro_batches
        backward = np.where(zero >= 2, batches, 1)
        forward = np.where(zero == 3, batches, 1)
        return _CollectivePasses(forward, np.where(zero == 3, backward, 0), backward)


@dataclass(frozen=True, eq=False)
class DataAxes:
    """What the data axes of columns of layouts exchange."""

    setting: Setting
    points: Points
    works: Sequence[PartWork]
    """Of the network's parts: blocks of each kind, the embedding, the head."""
    held: HeldParameters

    @cached_property
    def num_params(self) -> Array:
        """Parameters of a rank before sharding."""
        return sum(self._counts(), np.zeros(1))

    @cached_property
    def num_trained(self) -> Array:
        """Those of them that have gradients."""
        return self.num_params - sum(self._counts("frozen", "frozen_experts"), np.zeros(1))

    @cached_property
    def num_kept(self) -> Array:
        """Parameters in a rank's shards."""
        return self._sharded_count(*self._counts())

    @cached_property
    def num_stepped(self) -> Array:
        """Parameters whose optimizer state a rank keeps, hence steps."""
        return self.num_kept - self._sharded_count(*self._counts("frozen", "frozen_experts"))

    def _counts(self, dense: str = "params", experts: str = "expert_params") -> tuple[Array, Array]:
        """Dense parameters of a rank before sharding, and those of experts."""
        *blocks, embedding, head = self.works
        ends = self.held.embeddings * getattr(embedding, dense)
        ends = ends + self.held.heads * getattr(head, dense)
        of_blocks = self.held.in_blocks(getattr(work, dense) for work in blocks)
        return ends + of_blocks, self.held.in_blocks(getattr(work, experts) for work in blocks)

    def _sharded_count(self, dense: Array, experts: Array) -> Array:
        return dense / self._dense.shards + experts / self._experts.shards

    @cached_property
    def grad_copy_bytes(self) -> Array:
        """Bytes moved per micro-batch to cast and add up gradients, and to copy in and out of
        buckets.

        A gathered parameter is copied out of the flat buffer (read and written), its gradient into
        another (read in its type, written in that of the reduction). What stays whole is added up:
        read twice and written. Experts under ep are cut along another dimension than the first, so
        both are copied once more (`parallel.ep.fsdp_dim`).
        """
        points, zero, (gathered, reduced) = self.points, self.points.zero, self._wire
        of_params = np.where(zero == 3, 4.0, 0.0) * gathered
        reductions = np.where(zero >= 2, 1.0, 0.0)
        of_grads = reductions * (gathered + reduced)
        if self.setting.device.is_cpu:
            # Copied once a step as well; gloo sums up, so that the mean is a kernel of its own.
            once = 1 / np.maximum(points.num_micro_batches, 1)
            gathers = np.where(zero == 3, 2.0, once)
            reductions = np.where(zero >= 2, 1.0, once)
            of_params, of_grads = gathers * 2 * gathered, reductions * (gathered + 3 * reduced)
        adds = np.where((zero < 2) & (points.num_micro_batches > 1), 3 * reduced, 0.0)
        cast_bytes = points.param_bytes + points.value_bytes  # there, and of gradients back
        casts = np.where(autocasts(self.setting, points), cast_bytes, 0.0)
        of_grads = adds + np.where(points.is_fsdp, of_grads, casts)
        experts, frozen = self._counts()[1], self._counts("frozen", "frozen_experts")[1]
        turned = experts * of_params + (experts - frozen) * reductions * 2 * gathered
        is_turned = experts_apart(self.setting, points) & (self._experts.shards > 1)
        return (
            self.num_params * np.where(points.is_fsdp, of_params, casts)
            + self.num_trained * of_grads
            + np.where(is_turned, turned, 0.0)
        )

    # ---- what is asked for, and what comes of it ---------------------------------------------

    def requests(self) -> list[CollectiveRequest]:
        """The collectives of all units: for each part those of the dense parameters, then of the
        experts (`_num_calls` each); those of a bucket; and those of a fragment of a round."""
        sharded, codec = self.points.is_fsdp, self.setting.replica_codec
        asked: list[CollectiveRequest] = []
        for work in self.works:
            for params, trained, groups in self._halves(work):
                replicas = np.where(sharded, groups.replicas, 1)
                asked += self._among_shards(params, trained, groups)
                coded = trained / groups.shards * self._coded_bytes
                asked += [
                    CollectiveRequest(op, coded * often, replicas, groups.replica_stride)
                    for op, often in wire_ops(codec, replicas)
                ]
        _, reduced = self._wire
        replicas = np.where(sharded, 1, self._dense.replicas)
        bucket = self._bucket_bytes / reduced * self._coded_bytes
        asked += [
            CollectiveRequest(op, bucket * often, replicas, self._dense.replica_stride)
            for op, often in wire_ops(codec, replicas)
        ]
        workers, stride = self.points.workers, self.points.ranks_of_a_worker
        fragment = self._round_bytes / self.setting.comm.local.fragments
        return asked + [
            CollectiveRequest(op, fragment * often, workers, stride)
            for op, often in wire_ops(self.setting.worker_codec, workers)
        ]

    def seconds(self, parts: Sequence[NetworkPart], answered: Sequence[Array]) -> DataSeconds:
        """What the data axes add to a step.

        Args:
            parts: seconds of the network's parts.
            answered: seconds of `requests`.
        """
        of_units = 2 * self._num_calls * len(self.works)
        of_buckets = of_units + len(wire_ops(self.setting.replica_codec, 1))
        none = np.zeros(1)
        sharded = self._sharded(parts, self._units(answered[:of_units]))
        buckets = self._buckets(parts, sum(answered[of_units:of_buckets], none))
        rounds = self._rounds(parts, sum(answered[of_buckets:], none))
        is_ddp = ~self.points.is_fsdp
        return DataSeconds(
            np.where(is_ddp, 0.0, sharded.fsdp_s),
            np.where(is_ddp, buckets.dp_s, sharded.dp_s) + rounds.dp_s,
            np.where(is_ddp, buckets.hidden_s, sharded.hidden_s) + rounds.hidden_s,
        )

    # ---- sizes -------------------------------------------------------------------------------

    @cached_property
    def _dense(self) -> DataGroups:
        return dense_groups(self.points)

    @cached_property
    def _experts(self) -> DataGroups:
        return expert_groups(self.setting, self.points)

    @cached_property
    def _wire(self) -> tuple[Array, Array]:
        return wire_bytes(self.setting, self.points)

    @cached_property
    def _coded_bytes(self) -> Array:
        """Bytes per value of a gradient between replicas, as `wire_ops` carry it."""
        return bits_per_value(self.setting.replica_codec, self.works, self._wire[1]) / 8

    @cached_property
    def _bucket_bytes(self) -> Array:
        """One of DDP's buckets."""
        setting, total_bytes = self.setting, self.num_trained * self._wire[1]
        if setting.stack.states == "buffers" and not setting.stack.overlaps_data_axes:
            return total_bytes  # the whole buffer in one call
        return np.minimum(np.maximum(self.points.bucket_bytes, 1), total_bytes)

    @cached_property
    def _round_bytes(self) -> Array:
        """What a rank has changed, as `wire_ops` carry it."""
        codec, value_bytes = self.setting.worker_codec, self.points.param_bytes
        return self.num_stepped * bits_per_value(codec, self.works, value_bytes) / 8

    def _halves(self, work: PartWork) -> tuple[tuple[Array, Array, DataGroups], ...]:
        """A part's dense parameters and its experts, each with those that are trained and the ranks
        that share them."""
        dense, experts = np.asarray(work.params), np.asarray(work.expert_params)
        return (
            (dense, dense - work.frozen, self._dense),
            (experts, experts - work.frozen_experts, self._experts),
        )

    # ---- units -------------------------------------------------------------------------------

    def _among_shards(
        self, params: Array, trained: Array, groups: DataGroups
    ) -> list[CollectiveRequest]:
        """The gathering of a unit's parameters, and the reduction of its gradients. Coded rows go
        straight to the rank that keeps them, by the backend's collectives; hierarchically, sums of
        nodes do, behind an exact reduction inside."""
        setting, (gathered, reduced) = self.setting, self._wire
        by = "" if setting.shard_algorithm == "backend" else f".{setting.shard_algorithm}"
        shards = np.where(self.points.is_fsdp, groups.shards, 1)
        weights, gradients = setting.weight_codec, setting.shard_codec
        gather = "all_gather" + (by if weights.kind == "none" else "")
        reduce = "reduce_scatter" + by if gradients.kind == "none" else "all_to_all"
        gathered = bits_per_value(weights, (), gathered) / 8
        coded = bits_per_value(gradients, (), reduced) / 8
        stride, inside = groups.shard_stride, setting.shards_inside(shards, groups.shard_stride)
        asked = [
            CollectiveRequest(gather, params * gathered, shards, stride),
            CollectiveRequest(reduce, trained * coded / inside, shards / inside, stride * inside),
        ]
        if setting.codes_between_nodes:
            within = "reduce_scatter.halving_doubling"
            asked.append(CollectiveRequest(within, trained * reduced, inside, stride))
        return asked

    @property
    def _num_reductions(self) -> int:
        """Collectives that scatter a unit's gradients."""
        return 2 if self.setting.codes_between_nodes else 1

    @property
    def _num_calls(self) -> int:
        """Collectives of a unit's dense parameters, or of its experts."""
        return 1 + self._num_reductions + len(wire_ops(self.setting.replica_codec, 1))

    def _units(self, answered: Sequence[Array]) -> list[_UnitSeconds]:
        """Of each part, its dense parameters and its experts together."""
        count, own, none = self._num_calls, 1 + self._num_reductions, np.zeros(1)
        calls = [answered[at : at + count] for at in range(0, len(answered), count)]
        halves = [
            _UnitSeconds(call[0], sum(call[1:own], none), sum(call[own:], none)) for call in calls
        ]
        return list(map(_both, halves[::2], halves[1::2]))

    @property
    def _coding(self) -> list[_UnitSeconds]:
        """Seconds in which a rank codes and decodes what each part exchanges."""
        if self.setting.is_exact:
            return [_UnitSeconds(*(np.zeros(1),) * 3)] * len(self.works)
        return [
            _both(*(_coding_of(self.setting, *half) for half in self._halves(work)))
            for work in self.works
        ]

    def _of_blocks(self, units: Sequence[_UnitSeconds]) -> _UnitSeconds:
        """One pass of all blocks of a rank."""
        return _UnitSeconds(*map(self.held.in_blocks, zip(*units[:-2], strict=True)))

    def _of_root(self, units: Sequence[_UnitSeconds]) -> _UnitSeconds:
        """One pass of what is in no block."""
        *_, embedding, head = units
        return _UnitSeconds(
            *(
                self.held.embeddings * e + self.held.heads * h
                for e, h in zip(embedding, head, strict=True)
            )
        )

    def _in_step(self, units: Sequence[_UnitSeconds]) -> _UnitSeconds:
        """All that a step has of each."""
        blocks, root = self._of_blocks(units), self._of_root(units)
        passes = _CollectivePasses.of(self.points)
        # In a pipeline what is in no block stays for the micro-batches under way.
        of_root = np.where(self.points.pp > 1, 1, passes.forward)
        gathers = passes.forward + passes.again
        return _UnitSeconds(
            of_root * root.gather_s + gathers * blocks.gather_s,
            passes.backward * (root.reduce_s + blocks.reduce_s),
            root.replicate_s + blocks.replicate_s,
        )

    def _sharded(self, parts: Sequence[NetworkPart], units: list[_UnitSeconds]) -> DataSeconds:
        """What FSDP2 adds. A gathering or reduction takes a CPU's time of its own; coding takes
        that of the device that computes."""
        setting, points, held = self.setting, self.points, self.held
        host_s = constant(setting.stack, "unit_us") * 1e-6 if setting.device.is_cpu else 0.0
        share = hidden_share(setting) * setting.stack.overlaps_data_axes
        root, passes = self._of_root(units), _CollectivePasses.of(points)
        num_layers = sum(held.blocks, np.zeros(1))
        # One unit is gathered, or reduced, with nothing to compute beside.
        inner = share * np.maximum(num_layers - 1, 0) / np.maximum(num_layers, 1)
        hidden_forward, hidden_backward, spare = (np.zeros(1),) * 3
        for count, unit, part in zip(held.blocks, units, parts, strict=False):
            again_s = np.where(points.zero == 3, unit.gather_s, 0.0)
            backward_s = again_s + unit.reduce_s
            forward_s = np.minimum(unit.gather_s, part.forward.beside_s)
            hidden_forward = hidden_forward + count * forward_s
            beside = np.minimum(backward_s, part.beside_backward_s)
            hidden_backward = hidden_backward + count * beside
            spare = spare + count * (part.beside_backward_s - beside)
        # Of a rank's backward work, what may run beside its reductions.
        stages = np.maximum(points.stages_per_rank, 1)
        late_only = (points.pp > 1) & (points.zero < 2)
        beside_reduction = np.where(late_only, 1 - 1 / stages, 1.0)
        hidden_forward = inner * hidden_forward
        hidden_backward = inner * hidden_backward * beside_reduction
        # Under ep a block's experts are a unit of their own.
        with_experts = held.in_blocks(np.sign(work.expert_params) for work in self.works[:-2])
        num_units = num_layers + with_experts * experts_apart(setting, points)
        num_host = passes.forward * (num_units + 1) + passes.again * num_units
        num_host = num_host + passes.backward * (num_units + 1)
        total, coding = self._in_step(units), self._in_step(self._coding)
        total_s = total.gather_s + total.reduce_s + host_s * num_host
        # The next micro-batch goes on without waiting for the last reductions of this one.
        late = np.maximum(passes.backward - 1, 0) * share * root.reduce_s
        hidden = passes.forward * hidden_forward + passes.backward * hidden_backward + late
        late_replicas = share * np.maximum(total.replicate_s - root.replicate_s, 0)
        hidden_replicas = np.minimum(late_replicas, spare * beside_reduction)
        return DataSeconds(
            total_s - hidden + coding.gather_s + coding.reduce_s,
            total.replicate_s - hidden_replicas + coding.replicate_s,
            hidden + hidden_replicas,
        )

    def _buckets(self, parts: Sequence[NetworkPart], bucket_s: Array) -> DataSeconds:
        """DDP: full buckets while the last backward pass goes on; the last one comes behind it.

        Coding takes the device that computes; beside it, too, a bucket may be on its way.
        """
        setting, codec = self.setting, self.setting.replica_codec
        _, reduced = self._wire
        replicas, total_bytes = self._dense.replicas, self.num_trained * reduced
        number = np.maximum(total_bytes / np.maximum(self._bucket_bytes, 1), 1)
        all_s = number * bucket_s
        coding_s = codec_s(setting.device, codec, total_bytes / reduced, replicas)
        coding_s = np.where(replicas > 1, coding_s, 0.0)
        backward_s = self.held.in_blocks(part.beside_backward_s for part in parts[:-2])
        # Nothing is on its way before a bucket is full (DDP's first one, of 1 MiB, is soon
        # through).
        beside_s = (backward_s + coding_s) * (1 - 1 / number)
        late_s = np.maximum(all_s - bucket_s, 0)
        sent = sent_bytes(codec, self.num_trained * self._coded_bytes, replicas)
        hideable = hideable_share(setting.device, setting.stack, sent, all_s)
        hidden_s = hideable * np.minimum(late_s, beside_s)
        return DataSeconds(np.zeros(1), all_s - hidden_s + coding_s, hidden_s)

    def _rounds(self, parts: Sequence[NetworkPart], fragment_s: Array) -> DataSeconds:
        """What rounds of local updates add to a step on average. They are held when nothing else is
        done, but for fragments that may be some steps on their way."""
        setting, points, local = self.setting, self.points, self.setting.comm.local
        if not setting.updates_locally:
            return DataSeconds(*(np.zeros(1),) * 3)
        all_s, codec = local.fragments * fragment_s, setting.worker_codec
        coding_s = codec_s(setting.device, codec, self.num_stepped, points.workers)
        coding_s = np.where(points.workers > 1, coding_s, 0.0)
        # In the steps that all fragments are on their way.
        passes_s = self.held.in_blocks(
            part.forward.beside_s + part.beside_backward_s for part in parts[:-2]
        )
        num_steps = local.fragments * local.late_steps
        beside_s = num_steps * points.num_micro_batches * passes_s
        sent = sent_bytes(codec, self._round_bytes, points.workers)
        hideable = hideable_share(setting.device, setting.stack, sent, all_s)
        hidden_s = hideable * np.minimum(all_s, beside_s)
        exposed_s = all_s - hidden_s + coding_s
        return DataSeconds(np.zeros(1), exposed_s / local.round_steps, hidden_s / local.round_steps)


def _both(one: _UnitSeconds, other: _UnitSeconds) -> _UnitSeconds:
    return _UnitSeconds(*(mine + its for mine, its in zip(one, other, strict=True)))


def _coding_of(setting: Setting, params: Array, trained: Array, groups: DataGroups) -> _UnitSeconds:
    device, own = setting.device, trained / groups.shards
    replicated_s = codec_s(device, setting.replica_codec, own, groups.replicas)
    inside = setting.shards_inside(groups.shards, groups.shard_stride)
    return _UnitSeconds(
        gathering_s(device, setting.weight_codec, params, groups.shards),
        scattering_s(device, setting.shard_codec, trained / inside, groups.shards / inside),
        np.where(groups.replicas > 1, replicated_s, 0.0),
    )
