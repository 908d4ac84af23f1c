"""Seconds: the one function that the planner asks, and what decides between curves and algebra.

Curves of the first tier are of groups inside one of its domains. Curves of an outer tier are of
groups with one rank in each of its domains below, while all groups beside them exchange as well (so
`paceline bench` measures them). A group with more ranks per domain is composed of both: scattered
inside, exchanged across by all its members at once, gathered inside. gloo knows no domains: its
sums and gatherings go around one ring of all ranks, whose steps take as long as the slowest of a
step's messages.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paceline.comm.algorithms import ALGORITHMS
from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.hardware import Cluster
from paceline.plan.collectives.counted import counted_s
from paceline.plan.collectives.groups import GroupSpread, members, spread
from paceline.plan.collectives.links import Links, links_of
from paceline.plan.collectives.measured import CurveTable
from paceline.plan.collectives.modelled import modelled_s
from paceline.plan.points import Array

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
_OURS = {f"{op}.{name}": (op, name) for op, names in ALGORITHMS.items() for name in names}
_NAMES = (*OPS, *_OURS)
_CHUNK = 1 << 14  # groups


def collective_s(
    cluster: Cluster,
    op: str,
    num_bytes: npt.ArrayLike,
    num_ranks: npt.ArrayLike,
    stride: npt.ArrayLike,
) -> Array:
    """Seconds of a collective, alone on the links but for the groups beside it.

    Args:
        cluster: concrete.
        op: one of OPS, as the backend does it; or "all_reduce.tree": by an algorithm of ours
            (`comm.algorithms`).
        num_bytes: of the whole buffer, as nccl-tests counts: what is reduced, gathered, scattered;
            of an all-to-all what one rank sends, its own part included; of send_recv the message.
        num_ranks: of the group. send_recv: from each rank to the next of so many, the slowest.
        stride: distance in rank order between neighbours of the group.

    Returns:
        seconds, of the broadcast shape; 0 for one rank or no bytes.

    Raises:
        InputError: an unknown op; or the cluster's links are not known.
    """
    if op not in _NAMES:
        raise InputError(f"collective {op!r} is not known{nearest(op, _NAMES)}")
    links = links_of(cluster)
    size, ranks = np.asarray(num_bytes, float), np.asarray(num_ranks, float)
    shape = np.broadcast(size, ranks, stride).shape
    if links is None:
        return np.zeros(shape)
    flat = [_flat(column, shape) for column in (size, ranks, np.asarray(stride))]
    is_ours = op in _OURS
    seconds = _ours_s(cluster, links, op, *flat) if is_ours else _in_chunks(links, op, *flat)
    return np.where((flat[1] > 1) & (flat[0] > 0), seconds, 0.0).reshape(shape)


def _ours_s(
    cluster: Cluster, links: Links, op: str, size: Array, ranks: Array, step: Array
) -> Array:
    """By measured curves where all groups have some, otherwise from the rounds."""
    groups = spread(links.domain_sizes, ranks, step)
    level = 0 if groups.inside.all() else 1
    covered = level == 0 or bool((groups.domains[1] == ranks).all())
    if covered and level < len(links.tables) and op in links.tables[level]:
        return links.tables[level][op].seconds(size, ranks)
    name, algorithm = _OURS[op]
    return counted_s(cluster, algorithm, name, size, ranks, step)


def _flat(column: Array, shape: tuple[int, ...]) -> Array:
    return (column if column.shape == shape else np.broadcast_to(column, shape)).ravel()


def num_domains(cluster: Cluster, num_ranks: npt.ArrayLike, stride: npt.ArrayLike) -> Array:
    """Domains of the first tier that groups are spread over; arguments as in `collective_s`."""
    links = links_of(cluster)
    held = members(links.domain_sizes[0], np.asarray(stride)) if links else np.inf
    return np.ceil(np.asarray(num_ranks) / held)


def is_across(cluster: Cluster, num_ranks: npt.ArrayLike, stride: npt.ArrayLike) -> Array:
    """Whether groups leave the first tier: bool, of the broadcast shape; arguments as above."""
    return num_domains(cluster, num_ranks, stride) > 1


def _in_chunks(links: Links, op: str, size: Array, ranks: Array, step: Array) -> Array:
    """Groups by chunks whose intermediate arrays fit in a processor's cache."""
    if len(size) <= _CHUNK:
        return _seconds(links, op, size, ranks, step)
    parts = [slice(start, start + _CHUNK) for start in range(0, len(size), _CHUNK)]
    return np.concatenate([_seconds(links, op, size[p], ranks[p], step[p]) for p in parts])


def _seconds(links: Links, op: str, size: Array, ranks: Array, step: Array) -> Array:
    groups = spread(links.domain_sizes, ranks, step)
    if groups.inside.all():
        return _inside_s(links, op, size, groups)
    if not groups.inside.any():
        return _across_s(links, op, size, groups)
    inside, across = groups.inside, ~groups.inside
    seconds = np.empty(size.shape)
    seconds[inside] = _inside_s(links, op, size[inside], groups.take(inside))
    seconds[across] = _across_s(links, op, size[across], groups.take(across))
    return seconds


def _inside_s(links: Links, op: str, size: Array, groups: GroupSpread) -> Array:
    seconds = _table_s(links.tables[0], op, size, groups.num_ranks)
    return modelled_s(links, op, size, groups) if seconds is None else seconds


def _table_s(tables: Mapping[str, CurveTable], op: str, size: Array, ranks: Array) -> Array | None:
    """Seconds by measured curves, or by those of a collective that moves the same bytes."""
    if op == "send_recv" and op in tables:
        # A shift around a ring has one step, however many ranks there are beyond those measured.
        return tables[op].seconds(size, np.clip(ranks, *tables[op].ranks))
    if op in tables:
        return tables[op].seconds(size, ranks)
    if op == "send_recv" and "all_to_all" in tables:
        # Two ranks exchange halves of a buffer, both ways at once.
        return tables["all_to_all"].seconds(2 * size, np.full_like(ranks, 2.0))
    if op == "broadcast" and "all_gather" in tables:
        # All of it passes each rank of a ring; of a gathered buffer what the others bring.
        return tables["all_gather"].seconds(size * ranks / np.maximum(ranks - 1, 1), ranks)
    return None


def _across_s(links: Links, op: str, size: Array, groups: GroupSpread) -> Array:
    composed = _composed_s(links, op, size, groups) if any(links.tables[1:]) else None
    return modelled_s(links, op, size, groups) if composed is None else composed


_PARTS_INSIDE = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "send_recv": (),
    **{op: (op,) for op in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")},
}


_GLOO_ROUNDS = {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1}
"""How often a ring is gone round; gloo scatters the sums of a whole all-reduce."""


def _composed_s(links: Links, op: str, size: Array, groups: GroupSpread) -> Array | None:
    """Seconds by curves of the outer tier, where it was measured and is the only one."""
    nodes = groups.domains[1]
    local = groups.num_ranks / nodes
    if len(links.tables) != 2:
        return None
    shared = op in _GLOO_ROUNDS
    across = _table_s(links.tables[1], op, size / local if shared else size, nodes)
    if across is None:
        return None
    if links.is_gloo and shared and all("send_recv" in tables for tables in links.tables):
        return np.where(local > 1, _gloo_ring_s(links, op, size, groups), across)
    within = groups.on_one_domain(local)
    for part in _PARTS_INSIDE[op]:
        across = across + np.where(local > 1, _inside_s(links, part, size, within), 0.0)
    return across


def _gloo_ring_s(links: Links, op: str, size: Array, groups: GroupSpread) -> Array:
    """Seconds of a ring of all ranks in their order: one message leaves each node at a time."""
    nodes = groups.domains[1]
    local = groups.num_ranks / nodes
    message = size / groups.num_ranks
    inside = _table_s(links.tables[0], "send_recv", message, local)
    # That curve is of messages by all ranks of a node at once.
    across = _table_s(links.tables[1], "send_recv", message / local, nodes)
    assert inside is not None
    assert across is not None
    return _GLOO_ROUNDS[op] * (groups.num_ranks - 1) * np.maximum(inside, across)
