"""Comm state: what lossy and rare exchanges keep from step to step, in bytes.

- `comm.dp.compress`: an fp32 error for every gradient that a rank exchanges, and payloads of
  3 - 1/N times the coded size (to send to and received from the others, means, its own one), of two
  ranks 3 times (its own, and both); under FSDP2 the gradients once more, flat.
- `comm.fsdp.compress`: an fp32 error for every parameter that a rank codes (all but its own shard;
  where nodes add up exactly, its place's part), and payloads each way of the largest unit.
- `comm.fsdp.compress_weights`: payloads of the largest unit, its own one and those that come.
- `comm.local`: of what a rank holds, where the workers last agreed, the outer momentum and what is
  on its way; errors and payloads as between replicas.

Tensors too small to be compressed are counted as if they were. Not counted: PowerSGD's factors and
quinary's units, a few per cent of the errors.

Source: `paceline.comm.compress`, `paceline.elastic.local_rounds`.
"""

import numpy as np

from paceline.config.comm import Codec, coded_bits
from paceline.plan.data_groups import dense_groups
from paceline.plan.memory.parameter_counts import ParameterCounts
from paceline.plan.points import Array, Points, Setting

_FP32 = 4


def comm_state_bytes(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """What stays for the exchanges of the data axes: (s, n)."""
    if setting.is_exact and not setting.updates_locally:
        return np.zeros(1)
    replicas, _, shards, _ = dense_groups(points)
    of_replicas = _of_replicas(setting, points, counts, replicas)
    of_workers = _of_workers(setting, points, counts)
    inside = setting.shards_inside(shards, points.tp)
    of_shards = _of_shards(setting, counts, shards, inside)
    between = np.where(replicas > 1, of_replicas, 0) + np.where(points.workers > 1, of_workers, 0)
    return between + np.where(shards > 1, of_shards, 0)


def _of_replicas(
    setting: Setting, points: Points, counts: ParameterCounts, replicas: Array
) -> Array:
    codec, owned = setting.replica_codec, np.where(points.is_fsdp, counts.sharded, counts.whole)
    flat = np.where(points.is_fsdp & (codec.kind != "none"), _FP32, 0)
    return owned * (flat + _coded_bytes(codec, replicas))


def _of_workers(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    coded = _coded_bytes(setting.worker_codec, points.workers)
    return counts.sharded * (3 * points.param_bytes + coded)


def _coded_bytes(codec: Codec, num_ranks: Array) -> Array:
    """Error and payloads of a value whose mean over so many ranks is coded: (n,)."""
    errors = _FP32 if codec.kind != "none" else 0
    payloads = np.where(num_ranks == 2, 3, 3 - 1 / num_ranks)
    return errors + payloads * _payload_bytes(codec)


def _of_shards(setting: Setting, counts: ParameterCounts, shards: Array, inside: Array) -> Array:
    others = 1 / inside - 1 / shards
    unit = np.maximum(np.maximum(counts.block, counts.experts), counts.ends)
    errors = _FP32 * others * counts.whole if setting.shard_codec.kind != "none" else 0
    reducing = 2 * others * unit * _payload_bytes(setting.shard_codec)
    gathering = (1 + 1 / shards) * unit * _payload_bytes(setting.weight_codec)
    return errors + reducing + gathering


def _payload_bytes(codec: Codec) -> float:
    """Of a value; 0 where no payload is made."""
    return 0.0 if codec.kind in ("none", "powersgd") else coded_bits(codec) / 8
