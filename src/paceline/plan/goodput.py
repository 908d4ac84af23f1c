"""Goodput: what failures leave of a run, with and without elasticity, copies in memory and spares.

How it works. Each of N + s nodes (s spares) fails at random moments, in the mean every m seconds,
and is back after r, whatever the others do. So u of them are there with the binomial probability of
a = m / (m + r). An elastic run trains on as many of u as share out the batch; one that isn't
elastic, on N or not at all. While k nodes train, one of them fails every M = m / k, and the time
splits by Daly's formula: e^(-R/M) of it is not spent going on (R from a failure to the next step),
of which tau / (M (e^((tau + D)/M) - 1)) is kept, D in place of tau is spent saving, and the rest is
work done again. A copy in another node's memory is a checkpoint whose tau is some steps and whose D
is the copy. Nodes that come back stop the run once more (g each): u nodes become one fewer and one
more equally often, P(u) u / m.

What is left out: failures while nodes fewer by one train the interval that began with more (of the
order of R / r), two nodes lost at once (`lost_with_its_copy_s` says how often), and waiting for a
return where shrinking pays less (`plan.elastic` chooses that).

Papers: J. T. Daly 2006 (doi 10.1016/j.future.2004.11.016); the effective training time ratio, Meta
2024, https://arxiv.org/abs/2410.21680; failures of a large run, https://arxiv.org/abs/2407.21783.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paceline.config.job import JobOnCluster
from paceline.config.layout import Layout
from paceline.plan.elastic import GO_ON_S, most_replicas
from paceline.plan.points import Array
from paceline.plan.prediction import Prediction
from paceline.plan.scale import (
    COPY_BYTES_PER_S,
    HOUR_S,
    RESTART_S,
    blocking_save_s,
    daly_interval_s,
    node_return_hours,
)

# What copying "as often as it costs nothing" may take of a step (`elastic.copy_every`).
COPY_SHARE = 0.01
# Spares are looked at up to so many standard deviations beyond the nodes that are away in the mean.
_DEVIATIONS = 4


@dataclass(frozen=True)
class Exposure:
    """What a run on N nodes is exposed to."""

    num_nodes: int
    """N, that train at full strength."""
    node_mtbf_s: float
    """m, mean seconds between failures of one node."""
    return_s: float
    """r, mean seconds until it is back."""
    replicas: tuple[int, ...]
    """By the number of nodes that are there, from 0 to N: data ranks that can train."""
    nodes_used: tuple[int, ...]
    """Likewise: nodes that these take."""


@dataclass(frozen=True)
class Policy:
    """How a run meets its failures."""

    name: str
    is_elastic: bool
    interval_s: float
    """tau, seconds of work between checkpoints, or between copies in memory."""
    save_s: float
    """D, seconds that each of them blocks."""
    restart_s: float
    """R, seconds from a failure to the next step."""
    spares: int = 0
    grow_s: float = 0.0
    """g, seconds that a node which comes back stops the run."""
    min_nodes: int = 1
    """Below which an elastic run waits."""


@dataclass(frozen=True)
class Goodput:
    """What is kept, and where the rest of the time goes."""

    policy: Policy
    goodput: float
    """Part of the time of the run's starts in steps that are kept, 0 to 1: as
    `observe.generations` measures it. Between two starts there is no run."""
    ratio: float
    """Effective training time ratio: the part of all the time in steps that are kept, 0 to 1."""
    progress: float
    """Part of the steps that N nodes would make in the same time without failures."""
    per_node: float
    """The same over N / (N + s): of what is paid for, spares too."""
    saving: float
    """Part of the time that saving or copying blocks."""
    again: float
    """Part of the time in steps that are lost and done again."""
    going_on: float
    """Part of the time between a loss or a return and the next step."""
    waiting: float
    """Part of the time with too few nodes. The last four and `ratio` sum to 1."""


def goodput_of(exposure: Exposure, policy: Policy) -> Goodput:
    """The goodput of a policy, by the formula of this module."""
    total = exposure.num_nodes + policy.spares
    there = np.arange(total + 1)
    some = np.minimum(there, exposure.num_nodes)
    used, replicas = (np.array(each)[some] for each in (exposure.nodes_used, exposure.replicas))
    least = policy.min_nodes if policy.is_elastic else exposure.num_nodes
    trains = (there >= least) & (used > 0)
    used = np.where(trains, used, 0)
    speed = np.where(trains, replicas / exposure.replicas[-1], 0.0)
    chance = _binomial(total, exposure.node_mtbf_s / (exposure.node_mtbf_s + exposure.return_s))
    mtbf = exposure.node_mtbf_s / np.maximum(used, 1)
    tau, save = policy.interval_s, policy.save_s
    with np.errstate(over="ignore"):
        working = chance * trains * np.exp(-policy.restart_s / mtbf)
        kept = working / (mtbf * np.expm1((tau + save) / mtbf))
    more = (used[1:] > used[:-1]) & (used[:-1] > 0)
    grown = float(np.sum((chance * there)[1:] * more) / exposure.node_mtbf_s) * policy.grow_s
    left = 1 - grown
    ratio, saving = (float(np.sum(kept)) * each * left for each in (tau, save))
    progress = float(np.sum(kept * speed)) * tau * left
    waiting = float(np.sum(chance * ~trains))
    again = float(np.sum(working)) * left - ratio - saving
    return Goodput(
        policy=policy,
        goodput=ratio if policy.is_elastic or waiting >= 1 else ratio / (1 - waiting),
        ratio=ratio,
        progress=progress,
        per_node=progress * exposure.num_nodes / total,
        saving=saving,
        again=again,
        going_on=1 - ratio - saving - again - waiting,
        waiting=waiting,
    )


def _binomial(num: int, chance: float) -> Array:
    """Probability of 0 to num successes."""
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, num + 1)))))
    successes = np.arange(num + 1)
    ways = logs[num] - logs - logs[::-1]
    return np.exp(ways + successes * math.log(chance) + (num - successes) * math.log1p(-chance))


def best_spares(exposure: Exposure, policy: Policy) -> Goodput:
    """With the number of spares that gives most progress for what is paid; few rather than many."""
    away = exposure.return_s / (exposure.node_mtbf_s + exposure.return_s)
    mean = exposure.num_nodes * away
    most = math.ceil(mean + _DEVIATIONS * math.sqrt(mean)) + 1
    tried = [goodput_of(exposure, replace(policy, spares=num)) for num in range(most + 1)]
    return max(tried, key=lambda one: one.per_node)


def lost_with_its_copy_s(exposure: Exposure, restart_s: float) -> float:
    """Mean seconds between losses of a node and, before the run goes on, of the one that holds its
    copy: then the checkpoint on disk is the newest state."""
    return exposure.node_mtbf_s**2 / (exposure.num_nodes * restart_s)


# ---- a Job's -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoodputOutlook:
    """What failures leave of a planned run, under each policy."""

    num_nodes: int
    node_mtbf_s: float
    return_s: float
    step_s: float
    found: tuple[Goodput, ...]
    """From the plainest policy on."""
    lost_with_its_copy_s: float | None
    """See the function of this name; None: copies aren't needed, for replicas hold the state."""
    one_fewer: int
    """Nodes that train while one is lost: so many share out the batch evenly."""


def goodput_outlook(job: JobOnCluster, best: Prediction, saved: float) -> GoodputOutlook | None:
    """What failures leave of a Job's run; None: the cluster says no `device_mtbf_hours`.

    Args:
        job: on its cluster.
        best: its layout.
        saved: bytes of a checkpoint.
    """
    hours, cluster = job.cluster.device_mtbf_hours, job.cluster
    if hours is None:
        return None
    counts = [
        most_replicas(job, best.layout, num * cluster.devices_per_node)
        for num in range(cluster.num_nodes + 1)
    ]
    of_a_replica = best.layout.num_ranks // best.layout.num_data_ranks
    exposure = Exposure(
        num_nodes=cluster.num_nodes,
        node_mtbf_s=hours.value * HOUR_S / cluster.devices_per_node,
        return_s=node_return_hours(cluster).value * HOUR_S,
        replicas=tuple(counts),
        nodes_used=tuple(-(-each * of_a_replica // cluster.devices_per_node) for each in counts),
    )
    holds = _replicas_hold_state(best.layout, cluster.devices_per_node)
    found = tuple(
        one
        for policy in _policies(job, best, saved, exposure, holds)
        for one in _with_spares(exposure, policy, job.elastic.spares)
    )
    lost_s = None if holds else lost_with_its_copy_s(exposure, found[-1].policy.restart_s)
    nodes, mtbf_s = exposure.num_nodes, exposure.node_mtbf_s
    left = exposure.nodes_used[-2]
    return GoodputOutlook(nodes, mtbf_s, exposure.return_s, best.step_s, found, lost_s, left)


def _replicas_hold_state(layout: Layout, devices_per_node: int) -> bool:
    """Whether each shard is on two nodes at least: replicas lie outside of shards, cp and tp."""
    of_replicas = layout.num_ranks // layout.pp
    return layout.dp > 1 and of_replicas > devices_per_node


def _policies(
    job: JobOnCluster, best: Prediction, saved: float, exposure: Exposure, holds: bool
) -> Iterator[Policy]:
    """Started again from disk; elastic from disk; elastic from memory."""
    ranks, elastic = best.layout.num_ranks, job.elastic
    mtbf = exposure.node_mtbf_s / exposure.num_nodes
    save_s = float(blocking_save_s(saved, ranks))
    interval_s = float(daly_interval_s(save_s, mtbf))
    yield Policy("started again", False, interval_s, save_s, RESTART_S.value)
    from_disk = Policy(
        "elastic, from disk",
        True,
        interval_s,
        save_s,
        elastic.heartbeat_s + GO_ON_S["shrink"],
        grow_s=GO_ON_S["grow"],
        min_nodes=max(1, elastic.min_nodes),
    )
    if holds:
        yield replace(from_disk, name="elastic, replicas", interval_s=best.step_s, save_s=0.0)
        return
    yield from_disk
    copy_s = saved / ranks / COPY_BYTES_PER_S.value
    every = elastic.copy_every
    steps = math.ceil(copy_s / (COPY_SHARE * best.step_s)) if every == "auto" else every
    in_memory = replace(from_disk, interval_s=max(1, steps) * best.step_s, save_s=copy_s)
    yield replace(in_memory, name="elastic, copies")


def _with_spares(exposure: Exposure, policy: Policy, asked: int) -> Iterator[Goodput]:
    """Without spares, with those asked for, with as many as pay."""
    best = best_spares(exposure, policy)
    for num in sorted({0, asked, best.policy.spares}):
        yield goodput_of(exposure, replace(policy, spares=num))
