"""Pace: what the constants of a runtime make of a step's seconds, whatever network it trains.

Decoders (`plan.price`) and networks of convolutions (`plan.convnet`) are priced alike by them.

Legend of shapes: n points.
"""

import numpy as np
from numpy.typing import ArrayLike

from paceline.config.device import Device
from paceline.config.hardware import Cluster
from paceline.config.stack import Stack, constant
from paceline.plan.collectives import collective_s, is_across
from paceline.plan.points import Array
from paceline.plan.price.compress import waiting_share
from paceline.plan.rates import memory_s
from paceline.plan.scale import straggler_wait_s


def exchanged_s(
    cluster: Cluster,
    stack: Stack,
    op: str,
    num_bytes: ArrayLike,
    num_ranks: ArrayLike,
    stride: ArrayLike,
) -> Array:
    """Seconds of collectives, see `plan.collectives.collective_s`."""
    inside, across = constant(stack, "comm_time_inside"), constant(stack, "comm_time_across")
    alone = collective_s(cluster, op, num_bytes, num_ranks, stride)
    return alone * np.where(is_across(cluster, num_ranks, stride), across, inside)


def hideable_share(device: Device, stack: Stack, num_sent: Array, seconds: Array) -> Array:
    """Part of an exchange of gradients that is hidden where there is computing beside it: (n,).

    Arguments as of `compress.waiting_share`.
    """
    share = constant(stack, "overlap_share") * stack.overlaps_data_axes
    return share * waiting_share(device, stack, num_sent, seconds)


def slowed_s(stack: Stack, hidden_s: Array) -> Array:
    """Seconds that computing loses to the communication that is hidden beside it: (n,)."""
    return hidden_s * (constant(stack, "overlap_slowdown") - 1)


def stepped_s(device: Device, stack: Stack, num_bytes: Array) -> Array:
    """Seconds of an optimizer that moves so many bytes: (n,)."""
    return memory_s(device, np.maximum(num_bytes, 1.0)) * constant(stack, "optimizer_time")


def slowest_wait_s(stack: Stack, own_s: Array, num_ranks: ArrayLike) -> Array:
    """Seconds that a rank waits for the slowest of all at the end of its step: (n,)."""
    return straggler_wait_s(own_s * constant(stack, "rank_spread"), num_ranks)
