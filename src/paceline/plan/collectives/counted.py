"""Counted: seconds of our own algorithms, from the very rounds that a run executes.

A round takes its latency, its bytes and its additions. Of each, what the busiest rank (inside a
node) or node (across) has of it counts (`comm.algorithms.load`); rounds follow each other. Messages
of a round are started one after the other, so each one more costs a part of its latency again.
Both come from what was measured of messages (send_recv) where that is known. Between rounds the
host of a CPU rank prepares the next one, and a rank's own part is copied into what it gathers, or
out of the sums.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from paceline.comm.algorithms import MOST_RANKS, Op, load
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.plan.collectives.groups import members
from paceline.plan.collectives.links import Links, links_of
from paceline.plan.collectives.measured import CurveTable
from paceline.plan.points import Array
from paceline.plan.rates import memory_s

_ITEM_BYTES = 4
_ONE_MORE = 0.5
"""Of a message's latency, for one more in the same round; measured: a round of four ranks on two
cores takes 0.28 ms with one peer each and 0.15 ms more with each further one."""
_ROUND_S = 1.1e-4
"""Of a round on the host of a CPU rank, beside its messages; measured: a gathering of one round
takes 0.34 ms between two ranks on two cores of an EPYC, where the messages alone take 0.23. A
device's host is ahead of it."""
_GRID = 40320
"""Values per rank and block that shares are counted with: divisible by 1 to 10."""


def counted_s(
    cluster: Cluster, algorithm: str, op: Op, num_bytes: Array, num_ranks: Array, stride: Array
) -> Array:
    """Seconds of a collective by an algorithm of ours: arrays of one shape (n,).

    Args:
        cluster: concrete.
        algorithm: one of `comm.algorithms.ALGORITHMS`.
        op: of those, too.
        num_bytes: of the whole buffer.
        num_ranks: of the group.
        stride: distance in rank order between its neighbours.

    Raises:
        InputError: an algorithm that the op doesn't know or these groups can't run, or more than
            256 ranks.
    """
    links = links_of(cluster)
    seconds = np.zeros(num_bytes.shape)
    if links is None:
        return seconds
    inside = np.minimum(members(links.domain_sizes[0], stride), num_ranks)
    groups = np.stack([num_ranks, inside]).astype(int)
    for n, g in np.unique(groups, axis=1).T.tolist():
        which = (groups[0] == n) & (groups[1] == g)
        if n > 1:
            seconds[which] = _group_s(cluster, links, algorithm, op, num_bytes[which], n, g)
    return seconds


def _group_s(
    cluster: Cluster, links: Links, algorithm: str, op: Op, size: Array, n: int, g: int
) -> Array:
    if n > MOST_RANKS:
        raise InputError(
            f"{op} by {algorithm} among {n} ranks is not priced: take the backend's, or groups of "
            f"at most {MOST_RANKS} ranks."
        )
    own_s = np.zeros(1) if op == "all_reduce" else _passed_over_s(cluster, 2 * size / n)
    if algorithm == "tree":  # the number of segments depends on the size
        return np.concatenate(
            [
                _rounds_s(cluster, links, size[at : at + 1], _counts(algorithm, op, n, g, number))
                for at, number in enumerate(np.maximum(1, size // _ITEM_BYTES).astype(int).tolist())
            ]
        )
    return own_s + _rounds_s(cluster, links, size, _counts(algorithm, op, n, g, n * _GRID))


class _Counts(NamedTuple):
    """Columns of `LinkLoad` over r rounds; values as shares of the buffer."""

    inside: int
    """Ranks of the group on a node."""
    nodes: int
    messages: Array
    values: Array
    messages_across: Array
    values_across: Array
    """Of a rank's share in its node's links."""
    added: Array


@lru_cache(maxsize=4096)
def _counts(algorithm: str, op: Op, n: int, g: int, num_values: int) -> _Counts:
    found = load(algorithm, op, n, num_values, g)
    columns = np.array(
        [(r.messages, r.values, r.messages_across, r.values_across, r.added) for r in found], float
    )
    # The ranks of a node share its links, each with the rate of its tier.
    return _Counts(g, n // g, *(columns / (1, num_values, 1, num_values * g, num_values)).T)


def _rounds_s(cluster: Cluster, links: Links, size: Array, counts: _Counts) -> Array:
    """Seconds of all rounds (r,) for sizes (n,)."""
    near = _messages_s(links, 0, counts.inside, counts.messages, np.outer(size, counts.values))
    level = min(1, len(links.tables) - 1)
    leaving = np.outer(size, counts.values_across)
    far = _messages_s(links, level, counts.nodes, counts.messages_across, leaving)
    # Two reads and a write for each value that is added.
    added_s = _passed_over_s(cluster, 3 * np.outer(size, counts.added))
    host_s = _ROUND_S if links.is_gloo else 0.0
    return (np.maximum(near, far) + added_s + host_s).sum(axis=1)


def _messages_s(
    links: Links, level: int, num_ranks: int, messages: Array, num_bytes: Array
) -> Array:
    """Seconds of a round's messages over one tier: (n, r); messages (r,), bytes (n, r).

    A round of several ranks is like the shift around a ring that send_recv was measured with.
    """
    table = links.tables[level].get("send_recv")
    if table is None:
        late_s = float(links.ring.step_s[-1, level])
        once = late_s + num_bytes / links.bytes_per_s[level, 0]
    else:
        ring = float(np.clip(num_ranks, *table.ranks))
        late_s = _seconds(table, np.ones(1), ring)[0]
        once = _seconds(table, num_bytes.ravel(), ring).reshape(num_bytes.shape)
    return np.where(messages > 0, once + _ONE_MORE * np.maximum(messages - 1, 0) * late_s, 0.0)


def _seconds(table: CurveTable, num_bytes: Array, num_ranks: float) -> Array:
    return table.seconds(num_bytes, np.full(num_bytes.size, num_ranks))


def _passed_over_s(cluster: Cluster, num_bytes: Array) -> Array:
    """Seconds of an operator that moves so many bytes."""
    try:
        return np.where(num_bytes > 0, memory_s(cluster.device, num_bytes), 0.0)
    except InputError:  # the speed of memory is not known: only the links count
        return np.zeros(num_bytes.shape)
