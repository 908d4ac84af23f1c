"""Sizes: a job planned on each number of nodes that a site has: whether it fits, time and price.

A node type of the site stands for the Job's cluster, and what the Job says of its cluster itself is
kept. A job on several nodes is elastic, since agents are how its nodes find each other.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.config.prices import Prices
from paceline.config.site import NodeType, Site
from paceline.launch.choose import Size
from paceline.plan.answer.options import cluster_of
from paceline.plan.prediction import Prediction
from paceline.plan.resolve import concrete_cluster
from paceline.plan.scale import bill, checkpoint_bytes, device_mtbf_hours, resilience
from paceline.plan.search.choose import plan_job

# Of the seconds between notice and end, what a checkpoint may take.
_SAVE_SHARE = 0.75


@dataclass(frozen=True)
class Planned:
    """A job at one size."""

    size: Size
    job: JobSpec
    """As it will be trained: on this cluster, elastic where it has several nodes."""
    devices_per_node: int
    num_nodes: int
    """To ask for: with the spares."""


@dataclass(frozen=True)
class _Place:
    """Nodes of one kind."""

    name: str
    cluster: Cluster
    """Of as many nodes as there are."""
    is_named: bool
    """Whether the site says what a node is, so that the Job need not find out."""
    spot_mtbp_hours: float | None = None


def planned_sizes(
    job: JobSpec,
    site: Site,
    num_nodes: int | None,
    machine: Callable[[], Cluster],
    *,
    is_spot: bool,
) -> tuple[Planned, ...]:
    """The job at every size that the site has, or at the one that is asked for.

    Args:
        job: what a person asks for, its length in steps.
        num_nodes: None: every number of nodes.
        machine: this machine's Cluster.
        is_spot: on machines that may be taken away.

    Raises:
        InputError: nothing is known of the site's machines, or it has fewer.
    """
    asked = _asked_nodes(job, num_nodes)
    places = _places(job, site, machine, is_spot=is_spot)
    most = max(place.cluster.num_nodes for place in places)
    spares = job.elastic.spares
    if asked is not None and asked + spares > most:
        also = f" and {spares} spares" if spares else ""
        raise InputError(
            f"{asked} nodes{also} were asked for and the site has {most}: ask for at most "
            f"{most - spares}, or correct num_nodes in the site's node_types."
        )
    return tuple(
        _planned(job, site, place, nodes)
        for place in places
        for nodes in _counts(place.cluster.num_nodes - spares, asked)
    )


def _asked_nodes(job: JobSpec, num_nodes: int | None) -> int | None:
    stated = None if job.cluster.num_nodes == "auto" else job.cluster.num_nodes
    if stated is not None and num_nodes is not None and stated != num_nodes:
        raise InputError(
            f"--nodes {num_nodes} was given and the Job says cluster.num_nodes = {stated}: leave "
            "one of them out."
        )
    return stated if num_nodes is None else num_nodes


def _counts(most: int, asked: int | None) -> Iterator[int]:
    """The one that is asked for, or powers of two up to all."""
    if asked is not None:
        if asked <= most:
            yield asked
        return
    count = 1
    while count < most:
        yield count
        count *= 2
    if most > 0:
        yield most


def _places(
    job: JobSpec, site: Site, machine: Callable[[], Cluster], *, is_spot: bool
) -> list[_Place]:
    if site.node_types:
        types = {
            name: kind
            for name, kind in site.node_types.items()
            if not is_spot or kind.spot_usd_per_device_hour is not None
        }
        if not types:
            raise InputError(
                "the site's node_types have no spot_usd_per_device_hour, so there are no spot "
                "machines: give it, or leave --spot out."
            )
        return [_place(name, kind, is_spot=is_spot) for name, kind in types.items()]
    if is_spot:
        raise InputError("--spot needs node_types in the site's file that say what spot costs.")
    if site.engine == "local":
        return [_Place("", machine().replace(num_nodes=1), is_named=False)]
    cluster = job.cluster
    if cluster.device == "auto" or cluster.devices_per_node == "auto":
        raise InputError(
            "what a node of the site is, is not known: write its node_types into the site's file, "
            'such as node_types.gpu = {cluster = "8xH100-SXM", num_nodes = 4}.'
        )
    most = len(site.hosts) or (1 if cluster.num_nodes == "auto" else cluster.num_nodes)
    return [_Place("", Cluster.parse({**vars(cluster), "num_nodes": most}), is_named=True)]


def _place(name: str, kind: NodeType, *, is_spot: bool) -> _Place:
    try:
        cluster = cluster_of(kind.cluster)
    except InputError as error:
        said = str(error).removeprefix("--cluster ")
        raise InputError(f"node_types.{name}.cluster: {said}") from None
    price = kind.spot_usd_per_device_hour if is_spot else kind.usd_per_device_hour
    if price is not None:
        stated = {**vars(cluster.prices), "usd_per_device_hour": price}
        cluster = cluster.replace(prices=Prices.parse(stated))
    cluster = cluster.replace(num_nodes=kind.num_nodes)
    return _Place(name, cluster, True, kind.spot_mtbp_hours if is_spot else None)


def _planned(job: JobSpec, site: Site, place: _Place, nodes: int) -> Planned:
    per_node = place.cluster.devices_per_node
    size = Size(place.name, nodes, nodes * per_node)
    total = nodes + job.elastic.spares
    try:
        on = _on(job, site, place, nodes)
        concrete = concrete_cluster(on.cluster, place.cluster.replace(num_nodes=nodes))[0]
        plan = plan_job(on, place.cluster.replace(num_nodes=nodes), explained=False)
    except InputError as error:
        return Planned(replace(size, refused=str(error)), job, per_node, total)
    per_node = concrete.devices_per_node
    devices = total * per_node
    size = replace(size, num_devices=devices, layout=plan.job.layout.summary)
    if plan.ranked:
        size = _with_prediction(size, on, concrete, place, plan.ranked[0])
    return Planned(size, on, per_node, total)


def _on(job: JobSpec, site: Site, place: _Place, nodes: int) -> JobSpec:
    """The Job on so many nodes of a kind, told how to stop in time."""
    elastic, cluster = job.elastic, job.cluster
    if nodes < elastic.min_nodes:
        raise InputError(
            f"elastic.min_nodes = {elastic.min_nodes} is more than {nodes} nodes: ask for more "
            "nodes, or lower it."
        )
    if nodes > 1 and not elastic.is_on:
        elastic = elastic.replace(min_nodes=nodes)
    if elastic.save_within_s is None:
        elastic = elastic.replace(save_within_s=max(1.0, _SAVE_SHARE * site.grace_s))
    if place.is_named:
        if cluster.device != "auto" and cluster.device != place.cluster.device:
            raise InputError(
                f"the Job is for {cluster.device.name} and {place.name or 'the site'} has "
                f'{place.cluster.device.name}: set cluster.device = "auto".'
            )
        whole, _ = concrete_cluster(cluster, place.cluster.replace(num_nodes=nodes))
        cluster = type(cluster).parse(vars(whole))
    return job.replace(cluster=cluster, elastic=elastic)


def _with_prediction(
    size: Size, job: JobSpec, cluster: Cluster, place: _Place, best: Prediction
) -> Size:
    """How long it runs and what that costs, failures and preemptions included."""
    if not job.train.steps:
        return size
    params = job.model.num_params
    kept = 1.0
    if params is not None:
        lasting = resilience(
            _with_preemptions(cluster, place.spot_mtbp_hours),
            size.num_devices,
            checkpoint_bytes(params),
        )
        kept = 1.0 if lasting is None else float(lasting.goodput)
    run_s = best.step_s * job.train.steps / kept
    cost = bill(cluster, size.num_devices, best.step_s, job.train.steps, kept).usd
    return replace(
        size,
        run_s=run_s if math.isfinite(run_s) else None,
        usd=None if cost is None or not math.isfinite(float(cost)) else float(cost),
    )


def _with_preemptions(cluster: Cluster, mtbp_hours: float | None) -> Cluster:
    """The cluster whose devices are lost to preemptions, too."""
    if mtbp_hours is None:
        return cluster
    known = device_mtbf_hours(cluster)
    rate = 1 / (mtbp_hours * cluster.devices_per_node)
    rate += 0.0 if known is None else 1 / known.value
    return cluster.replace(device_mtbf_hours=1 / rate)
