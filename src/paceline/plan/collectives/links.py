"""Links: what the formulas need of a cluster's tiers, worked out once per cluster.

Constants are those of NCCL's own cost model (src/graph/tuning.cc of NCCL 2.30): microseconds per
step by kind of link, algorithm and protocol. A protocol trades bandwidth for latency: LL carries 4
bytes of flag with every 4 of data, LL128 8 with 120, Simple none, but waits for whole chunks. LL128
relies on stores that arrive whole and in order, which NCCL grants NVLink and in-order networks.

The shares of a link's rate that data can fill are NCCL's link constants over the vendors' rates
where it has them (NVLink 20.6 of 25 GB/s, a 100 Gbit/s card 12 of 12.5), otherwise assumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from paceline.config.hardware import Cluster, Tier
from paceline.plan.collectives.groups import tiers_of
from paceline.plan.collectives.measured import CurveTable, table_of
from paceline.plan.points import Array

PROTOCOLS = ("ll", "ll128", "simple")


class LinkKind(NamedTuple):
    """One kind of link; times in microseconds, by PROTOCOLS."""

    ring_us: tuple[float, float, float]
    """Of a step to the neighbour in a ring."""
    tree_us: tuple[float, float, float]
    """Of a step up or down a tree."""
    peer_us: float
    """What one more partner of an all-to-all adds; assumed."""
    share: float
    """Of the tier's rate that data can fill."""
    known_latency_us: float
    """Latency of the links that the steps were measured on: what a tier has more is added."""


_NVLINK = LinkKind((0.6, 1.9, 3.4), (0.6, 1.25, 4.0), 0.5, 0.81, 1.0)
_NETWORK = LinkKind((2.7, 4.0, 14.0), (5.0, 8.5, 14.0), 1.0, 0.96, 2.0)
# Without NCCL: compilers plan these exchanges, a step costs little more than the wire. Assumed.
_PLANNED = LinkKind((0.5, 0.5, 0.5), (1.0, 1.0, 1.0), 0.5, 0.9, 1.0)
# Every message is announced and then sent: its latency counts twice, as Simple's does.
_GLOO = LinkKind((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0, 0.93, 0.0)
_KINDS: Mapping[str, LinkKind] = {
    "nvlink": _NVLINK,
    "xgmi": _NVLINK._replace(share=0.74),
    "pcie": LinkKind((1.0, 2.5, 5.7), (1.0, 1.9, 4.0), 0.5, 0.6, 2.0),
    "ici": _PLANNED,
    "neuronlink": _PLANNED,
    "gaudi": _PLANNED,
    **dict.fromkeys(("network", "infiniband", "roce", "efa", "ethernet"), _NETWORK),
}
_IN_ORDER = ("infiniband", "roce")
# By PROTOCOLS: microseconds before the first step, and the share of the bandwidth that is data.
_RING_BASE_US, _RING_SHARE = (6.6, 14.0, 8.4), (0.5, 0.92, 1.0)
_TREE_BASE_US, _TREE_SHARE = (6.8, 14.0, 8.4), (0.92 / 3.8, 0.92 * 15 / 16, 0.92)
# LL is bound by the processors that check its flags: NCCL caps it at 88, 141 and 282 GB/s in a node
# of Ampere, Hopper and Blackwell, and at 19, 35 and 70 across nodes, where their rings reach 240,
# 370 and 722. The same shares of a ring's rate every time.
_LL_INSIDE, _LL_ACROSS = 0.38, 0.097
_PASSES = (1, 1, 2)  # how often a message's latency counts: Simple also flushes


class ProtocolCosts(NamedTuple):
    """What rings, or trees, cost: p protocols, t tiers."""

    base_s: Array  # (p, 1)
    step_s: Array  # (p, t)
    share: Array  # (p, 1)


@dataclass(frozen=True, eq=False)
class Links:
    """A cluster's t tiers, innermost first."""

    domain_sizes: Array  # (t,)
    bytes_per_s: Array  # (t, 1), what data can fill, per device
    peer_s: Array  # (t,)
    protocols: list[int]
    """Indices into PROTOCOLS of those that may be used."""
    ring: ProtocolCosts
    tree: ProtocolCosts
    tables: tuple[Mapping[str, CurveTable], ...]
    adds: tuple[bool, ...]
    ll_bytes_per_s: tuple[float, float]
    """The most of LL, inside the first tier and across; without limit where nothing is known."""
    sum_s_per_byte: float
    """Of an all-reduce within the first tier, where latency no longer matters."""
    is_gloo: bool


class _ClusterKey:
    """A cluster as a key: equal only to itself, since comparing all its curves takes longer."""

    __slots__ = ("cluster",)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ClusterKey) and other.cluster is self.cluster


def links_of(cluster: Cluster) -> Links | None:
    """What the formulas need of a cluster; None where there is a single device."""
    return _links_of(_ClusterKey(cluster))


@lru_cache(maxsize=64)
def _links_of(same: _ClusterKey) -> Links | None:
    device = same.cluster.device
    tiers = tiers_of(same.cluster)
    return _worked_out(tiers, is_gloo=device.kind == "cpu") if tiers else None


def _worked_out(tiers: Sequence[Tier], *, is_gloo: bool) -> Links:
    kinds = [_kind(tier, level, is_gloo) for level, tier in enumerate(tiers)]
    rates = [tier.bytes_per_s.value * kind.share for tier, kind in zip(tiers, kinds, strict=True)]
    tables = tuple(_tables(tier, is_gloo=is_gloo) for tier in tiers)
    rates[0] = _ring_rate(tables[0]) or rates[0]
    protocols = _protocols(tiers, is_gloo)
    late_us = [
        max(0.0, tier.latency_s.value * 1e6 - kind.known_latency_us)
        for tier, kind in zip(tiers, kinds, strict=True)
    ]
    return Links(
        domain_sizes=np.array([tier.num_devices for tier in tiers]),
        bytes_per_s=np.array(rates)[:, None],
        peer_s=np.array([kind.peer_us for kind in kinds]) * 1e-6,
        protocols=protocols,
        ring=_steps(protocols, _RING_BASE_US, [k.ring_us for k in kinds], late_us, _RING_SHARE),
        tree=_steps(protocols, _TREE_BASE_US, [k.tree_us for k in kinds], late_us, _TREE_SHARE),
        tables=tables,
        adds=tuple(tier.reduces_in_network for tier in tiers),
        ll_bytes_per_s=_ll_bytes_per_s(kinds[0], rates[0]),
        sum_s_per_byte=_sum_s_per_byte(tiers[0], tables[0], rates[0]),
        is_gloo=is_gloo,
    )


def _kind(tier: Tier, level: int, is_gloo: bool) -> LinkKind:
    if is_gloo:
        return _GLOO
    return _KINDS.get(tier.name, _NETWORK if level else _NVLINK)


def _protocols(tiers: Sequence[Tier], is_gloo: bool) -> list[int]:
    """Indices into PROTOCOLS of those that may be used on all the links."""
    if is_gloo:
        return [2]
    in_order = all(
        _kind(tier, level, is_gloo) is not _NETWORK or tier.name in _IN_ORDER
        for level, tier in enumerate(tiers)
    )
    return [0, 1, 2] if in_order else [0, 2]


def _steps(
    protocols: Sequence[int],
    base_us: Sequence[float],
    step_us: Sequence[Sequence[float]],
    late_us: Sequence[float],
    share: Sequence[float],
) -> ProtocolCosts:
    """Costs by protocol; `step_us` and `late_us` (added to every pass) are by tier."""
    is_gloo = len(protocols) == 1
    step = np.array(step_us).T + np.outer(_PASSES, late_us)  # (p, t)
    base = np.zeros(len(base_us)) if is_gloo else np.array(base_us)
    return ProtocolCosts(
        base_s=base[protocols, None] * 1e-6,
        step_s=step[protocols] * 1e-6,
        share=np.array(share)[protocols, None],
    )


def _ll_bytes_per_s(kind: LinkKind, rate: float) -> tuple[float, float]:
    if kind.ring_us != _NVLINK.ring_us:
        return math.inf, math.inf
    return _LL_INSIDE * rate, _LL_ACROSS * rate


def _ring_rate(tables: Mapping[str, CurveTable]) -> float | None:
    """Bytes/s through each rank of a ring, from what was measured of large messages."""
    table = tables.get("all_gather")
    if table is None:
        return None
    return float((1 - 1 / table.ranks[-1]) / np.exp(table.log_slope[-1]))


def _sum_s_per_byte(tier: Tier, tables: Mapping[str, CurveTable], rate: float) -> float:
    """Of a large all-reduce within the first tier: up and down a chain, or through its switches."""
    chain = 2 / rate
    table = tables.get("all_reduce") if tier.reduces_in_network else None
    return chain if table is None else min(chain, float(np.exp(table.log_slope[-1])))


def _tables(tier: Tier, *, is_gloo: bool) -> dict[str, CurveTable]:
    """Tables of what was measured; a collective that was not takes that of its mirror image, and
    gloo's reduce-scatter, which is a whole all-reduce, that of this."""
    tables = {
        op: table_of(op, curves)
        for op, curves in tier.collectives.items()
        if any(curve.num_ranks > 1 for curve in curves)
    }
    same = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    if is_gloo:
        same = {"reduce_scatter": "all_reduce"}
    for missing, other in same.items():
        if missing not in tables and other in tables:
            tables[missing] = tables[other]
    return tables
