"""Groups: which links the ranks of a group meet.

A group is ranks r, r + stride, ... in rank order. A domain (node, rack) of d devices holds
d // stride of them, at least one. Groups are taken to be spread evenly over the domains that they
need, as schedulers place them: 128 ranks over racks of 72 devices are 64 and 64.
"""

from typing import NamedTuple

import numpy as np

from paceline.config.hardware import Cluster, Tier
from paceline.config.links import usual_tiers
from paceline.plan.points import Array


def tiers_of(cluster: Cluster) -> tuple[Tier, ...]:
    """The links of a concrete cluster, the fastest first: its own, or those usual of its device.

    Raises:
        InputError: it names none, and the catalogue knows none for its device.
    """
    return cluster.tiers or usual_tiers(cluster)


def members(num_devices: int, stride: Array) -> Array:
    """How many ranks of a group one domain of so many devices can hold."""
    return np.maximum(1, num_devices // stride)


class GroupSpread(NamedTuple):
    """How groups are spread over the tiers, innermost first: t tiers, n groups."""

    num_ranks: Array  # (n,)
    domains: Array  # (t + 1, n): of the tier below that a group spans; first its ranks, last 1
    inside: Array  # (n,), bool: whether it stays in one domain of the first tier

    def take(self, where: Array) -> "GroupSpread":
        """The groups where this mask holds."""
        return GroupSpread(self.num_ranks[where], self.domains[:, where], self.inside[where])

    def on_one_domain(self, num_ranks: Array) -> "GroupSpread":
        """Groups of other sizes, each within a domain of the first tier."""
        domains = np.ones_like(self.domains)
        domains[0] = num_ranks
        return GroupSpread(num_ranks, domains, np.ones(num_ranks.shape, bool))


def spread(domain_sizes: Array, num_ranks: Array, stride: Array) -> GroupSpread:
    """How groups are spread; `domain_sizes` are the devices of each tier, innermost first."""
    domains = np.ones((len(domain_sizes) + 1, *num_ranks.shape))
    domains[0] = num_ranks
    # The last tier joins everything, whatever its size says.
    for level, size in enumerate(domain_sizes[:-1], start=1):
        domains[level] = np.ceil(num_ranks / members(size, stride))
    return GroupSpread(num_ranks, domains, domains[1] <= 1)
