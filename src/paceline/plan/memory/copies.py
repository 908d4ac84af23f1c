"""Copies: host memory that an elastic run takes for its state, beside what trains.

| copy | places | what |
|---|---|---|
| a rank's own | 2 | all that it holds; on a CPU nothing where every rank holds everything |
| another rank's | 2 | the same, where no rank of another node holds it |
| under local updates, a rank's own | 1 | all that it holds; 2 where a worker is several ranks |

With one node another rank takes the place of another node. Not counted: a mean of the weights, what
compression owes, and copies of the generation before until the first ones of this one are there.

Source: `paceline.train.checkpoint.buddies`.
"""

import numpy as np

from paceline.plan.data_groups import DataGroups, dense_groups, expert_groups
from paceline.plan.memory.peak import checkpoint_spike_bytes
from paceline.plan.points import Array, Points, Setting
from paceline.plan.stages import Holdings

_PLACES = 2


def copy_bytes(setting: Setting, points: Points, holdings: Holdings) -> Array:
    """Host memory of each rank for copies of the state; those of a node take it each.

    Args:
        setting: model, cluster and stack.
        points: n layouts.
        holdings: what each of s pipeline ranks holds; a buddy is taken to hold as much.

    Returns:
        bytes, (s, n).
    """
    held = checkpoint_spike_bytes(setting, points, holdings)  # what is copied a checkpoint stages
    if setting.updates_locally:
        return held * np.where(points.ranks_of_a_worker > 1, _PLACES, 1)
    groups = [dense_groups(points)]
    if setting.model.experts is not None:
        groups.append(expert_groups(setting, points))
    is_alone = points.num_ranks == 1
    is_everywhere = np.all([one.replicas == points.num_ranks for one in groups], axis=0)
    is_elsewhere = np.all([_is_elsewhere(setting, one) for one in groups], axis=0)
    own = ~is_alone & ~(is_everywhere & setting.device.is_cpu)
    others = ~is_alone & ~is_elsewhere
    return held * _PLACES * (own * 1 + others)


def _is_elsewhere(setting: Setting, groups: DataGroups) -> Array:
    """Whether another node holds such parameters too, or with one node another rank: (n,)."""
    node = 1 if setting.cluster.num_nodes == 1 else setting.cluster.devices_per_node
    return (groups.replicas > 1) & (groups.replicas * groups.replica_stride > node)
