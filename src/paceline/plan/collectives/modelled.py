"""Modelled: seconds of collectives by the algorithms of NCCL, over any tiers of links.

Legend of shapes: p protocols, t tiers (innermost first), n groups.

A group is cut by each tier into domains; what leaves a domain shares the links of its members. With
`width` the bytes/s out of a domain and `crossings` the steps of one round that use a tier:
- ring: base + steps x sum(crossings x step) + volume / narrowest width. An all-reduce goes round
  twice with 2 (n - 1) / n of the buffer, an all-gather or reduce-scatter once with half of that, a
  broadcast once with all of it. NCCL found rings of all-reduces across nodes 1.4 times as late.
- tree (all-reduce): base + 2 x depth x step: a chain within a node, log2 across. The bytes out of a
  node are the buffer where there are two nodes (up from one, down from the other), twice that where
  there are more (two trees, each node inner in one of them). Switches that add up (InfiniBand
  SHARP) answer at once: one step, and each node sends the buffer once.
- all-to-all: every rank sends to all at once; the tier that the bytes fill longest decides.
"""

import numpy as np

from paceline.plan.collectives.groups import GroupSpread
from paceline.plan.collectives.links import Links, ProtocolCosts
from paceline.plan.points import Array

_PLATEAU = 1.4  # NCCL, tuning.cc: latency of a Simple ring all-reduce across nodes
# NCCL, tuning.cc: the share of a tree's bandwidth that middle sizes see, in tenths, by protocol;
# from 64 B by powers of two to 128 MiB.
_DIPS = (
    (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10),
    (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 5, 6, 6, 7, 7, 8, 9, 9, 10),
    (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 5, 5, 6, 6, 7, 8, 9),
)
_TREE_DIP = np.pad(np.array(_DIPS) / 10, ((0, 0), (0, 2)), constant_values=1.0)
_LONGEST_CHAIN = 8  # ranks; beyond, domains are taken to build trees inside as well


def modelled_s(links: Links, op: str, num_bytes: Array, spread: GroupSpread) -> Array:
    """Seconds of a collective; arguments as in `collective_s`, arrays of one shape."""
    if op == "all_to_all":
        return _exchange_s(links, num_bytes, spread)
    if op == "send_recv":
        return _message_s(links, num_bytes, spread)
    if op == "all_reduce" or (op == "reduce_scatter" and links.is_gloo):
        # gloo scatters the sums of a whole all-reduce.
        widths = _widths(links, spread)
        ring = _ring_s(links, 2 * _left(spread) * num_bytes, spread, widths, rounds=2)
        return (
            ring if links.is_gloo else np.minimum(ring, _tree_s(links, num_bytes, spread, widths))
        )
    sent = num_bytes if op == "broadcast" else _left(spread) * num_bytes
    return _ring_s(links, sent, spread, _widths(links, spread), rounds=1)


def _left(spread: GroupSpread) -> Array:
    """The part of a buffer that belongs to the other ranks."""
    return 1 - 1 / spread.num_ranks


def _widths(links: Links, spread: GroupSpread) -> Array:
    """Bytes/s out of each domain below a tier, unlimited where nothing leaves it: (t, n)."""
    below, above = spread.domains[:-1], spread.domains[1:]
    return np.where(below > above, links.bytes_per_s * spread.num_ranks / below, np.inf)


def _ring_s(links: Links, sent: Array, spread: GroupSpread, widths: Array, rounds: int) -> Array:
    """Of a ring that goes round so often; `sent` are the bytes through each rank."""
    ring = links.ring
    crossings = spread.domains[:-1] - spread.domains[1:]  # (t, n)
    late = rounds * (ring.step_s @ crossings)  # (p, n)
    if rounds == 2 and not links.is_gloo:
        late[-1] *= np.where(spread.inside, 1.0, _PLATEAU)
    transfer_s = sent / np.minimum.reduce(widths) / ring.share
    return _best(ring, late, _capped(links, transfer_s, sent, spread))


def _tree_s(links: Links, num_bytes: Array, spread: GroupSpread, widths: Array) -> Array:
    below, above = spread.domains[:-1], spread.domains[1:]
    fan = below / above  # (t, n): domains of the tier below in one of this
    depth = np.log2(fan)
    depth[0] = np.minimum(fan[0] - 1, _LONGEST_CHAIN - 4 + depth[0])
    out = np.where(below > 2, 2.0, 1.0)  # (t, n): buffers that leave each domain
    for level, adds in enumerate(links.adds[1:], start=1):
        if adds:
            depth[level], out[level] = np.minimum(1.0, depth[level]), 1.0
    per_byte = out / widths
    per_byte[0] = np.where(fan[0] > 1, links.sum_s_per_byte, 0.0)
    late = 2 * (links.tree.step_s @ depth)
    transfer_s = num_bytes * np.maximum.reduce(per_byte) / links.tree.share
    transfer_s = _capped(links, transfer_s, 2 * num_bytes, spread) / _dips(links, num_bytes)
    return _best(links.tree, late, transfer_s)


def _dips(links: Links, num_bytes: Array) -> Array:
    """The share of a tree's bandwidth that messages of a size see: (p, n)."""
    place = np.minimum(np.log2(np.maximum(num_bytes, 64.0) / 64), len(_DIPS[0]))
    index = place.astype(int)
    share = _TREE_DIP[links.protocols]
    low, high = share[:, index], share[:, index + 1]
    return low + (place - index) * (high - low)


def _capped(links: Links, transfer_s: Array, sent: Array, spread: GroupSpread) -> Array:
    """Transfers (p, n) with LL, the first protocol, no faster than its processors."""
    if links.protocols[0] == 0:
        inside, across = links.ll_bytes_per_s
        cap = np.where(spread.inside, inside, across)
        transfer_s[0] = np.maximum(transfer_s[0], sent / cap)
    return transfer_s


def _best(steps: ProtocolCosts, late_s: Array, transfer_s: Array) -> Array:
    """The fastest protocol, of latencies and transfers (p, n)."""
    return np.minimum.reduce(steps.base_s + late_s + transfer_s)


def _exchange_s(links: Links, num_bytes: Array, spread: GroupSpread) -> Array:
    below, above = spread.domains[:-1], spread.domains[1:]
    partners = spread.num_ranks * (1 / above - 1 / below)  # (t, n)
    late = links.ring.base_s[-1] + links.peer_s @ partners + _farthest_s(links, spread)[-1]
    leaving = np.where(below > above, 1 - 1 / below, 0.0)
    return late + num_bytes * (leaving / links.bytes_per_s).max(axis=0)


def _message_s(links: Links, num_bytes: Array, spread: GroupSpread) -> Array:
    below, above = spread.domains[:-1], spread.domains[1:]
    per_byte = np.where(below > above, 1 / links.bytes_per_s, 0.0).max(axis=0)
    transfer_s = num_bytes * per_byte / links.ring.share
    return _best(links.ring, _farthest_s(links, spread), transfer_s)


def _farthest_s(links: Links, spread: GroupSpread) -> Array:
    """One step over the slowest tier that the group meets: (p, n)."""
    met = spread.domains[:-1] > spread.domains[1:]  # (t, n)
    return (links.ring.step_s[:, :, None] * met).max(axis=1)
