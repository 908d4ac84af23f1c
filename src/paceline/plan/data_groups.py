"""Data groups: which ranks hold the same parameters, and which share them out.

Legend of shapes: n points.
"""

from typing import NamedTuple

import numpy as np

from paceline.plan.points import Array, Points, Setting


class DataGroups(NamedTuple):
    """Ranks that share parameters of one sort, as `comm.mesh` arranges them."""

    replicas: Array
    replica_stride: Array
    shards: Array
    shard_stride: Array


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
