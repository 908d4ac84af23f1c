"""Rules about the links: slower than they were measured, of the wrong kind, or simply too slow."""

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.stack import Stack, constant
from paceline.explain.changes import runnable_changes
from paceline.explain.finding import Evidence, Finding
from paceline.explain.subject import Subject
from paceline.explain.traffic import Flow, bus_factor
from paceline.explain.what_if import what_if
from paceline.plan.collectives import collective_s, is_across
from paceline.render.figures import bytes_text, time_text

Array = npt.NDArray[Any]

# A link this many times slower than it was measured, or than sockets are, isn't the same link.
_SLOWER = 2.5
# Bytes of a collective above which it says something about the rate of a link.
_TELLING_BYTES = 1 << 16
_PRICED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# Collectives of which it is known when the last rank came.
_MEETINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# The inner axes' product is the distance between an axis' neighbours in rank order.
_INNER_FIRST = ("tp", "cp", "fsdp", "dp", "pp")
# Sockets carry a tenth of what InfiniBand does, PCIe a tenth of NVLink, or somewhat more: what is
# saved of the exposed communication where no curve says it. Assumed.
_OTHER_FABRIC = 0.8
# What replicas can be asked to send instead; int8 is a quarter of fp32.
_FORMS = ("int8", "bf16")
_SHARE_OF = {"int8": 0.26, "bf16": 0.5}
# Bytes per second of a link above which coding takes a processor longer than sending, where the
# device's own codecs were not measured.
_CODING_PAYS_BELOW = 2e8


class SlowCollective(NamedTuple):
    """A kind of collective that takes longer than it should."""

    flow: Flow
    expected_s: float
    """For what a step sends."""
    against: str


def slow_link(subject: Subject) -> Finding | None:
    """Collectives take several times as long as the link was measured to need."""
    found = slow_flow(subject)
    if found is None or _transport(subject) is not None:
        return None
    flow, should_s, against = found
    spared = 1 - should_s / flow.link_s
    exposed_s = subject.traffic.sent_exposed_s(where_of(subject, flow))
    rate = "" if flow.bus_bytes_per_s is None else f" ({bytes_text(flow.bus_bytes_per_s)}/s)"
    return Finding.of(
        subject,
        f"{_named(flow)} takes {flow.link_s / should_s:.1f} times as long as the link should "
        f"need{rate}.",
        exposed_s * spared,
        [
            Evidence(
                subject.worker,
                f"{bytes_text(flow.bytes)} in {flow.num_calls:.0f} collectives a step take "
                f"{time_text(flow.link_s)} on the link; nothing hides "
                f"{time_text(exposed_s)} of it.",
            ),
            Evidence("reference", f"By {against} they take {time_text(should_s)}."),
            *_slowest_group(subject, flow),
        ],
        advice="Run `paceline bench collectives` and look at the slow pair's cable, port, card and "
        "route; look for other traffic on it.",
        basis="measured" if "curve" in against else "predicted",
    )


def where_of(subject: Subject, flow: Flow) -> Array:
    """Which collectives make up a flow."""
    traffic = subject.traffic
    where = traffic.is_op(flow.op) & (traffic.rows["group_size"] == flow.num_ranks)
    return where & (traffic.is_axis(flow.axis) if flow.axis else traffic.rows["axis"] < 0)


def slow_flow(subject: Subject) -> SlowCollective | None:
    """The most exposed kind of collective that takes several times what it should."""
    if subject.account is None:
        return None
    for flow in subject.traffic.flows():
        if flow.op not in _MEETINGS or flow.bytes / flow.num_calls < _TELLING_BYTES:
            continue
        if not subject.all_recorded(where_of(subject, flow)):
            continue
        if (by_curve := expected_s(subject, flow)) is not None:
            is_measured = subject.job is not None and bool(subject.job.cluster.tiers)
            against = "the cluster's measured curve" if is_measured else "what such links carry"
            expected = by_curve
        elif (usual := _by_sockets_s(subject, flow)) is not None:
            expected, against = usual, "what sockets of a CPU usually carry"
        else:
            continue
        if flow.link_s > _SLOWER * expected:
            return SlowCollective(flow, expected, against)
    return None


def wrong_fabric(subject: Subject) -> Finding | None:
    """NCCL took sockets where there is InfiniBand, or no direct path between devices of a node."""
    if subject.account is None:
        return None
    found = _transport(subject)
    if found is None:
        return None
    title, advice = found
    slow = slow_flow(subject)
    exposed_s = subject.traffic.sent_exposed_s(np.ones(len(subject.traffic.rows), bool))
    spared = _OTHER_FABRIC if slow is None else 1 - slow.expected_s / slow.flow.link_s
    return Finding.of(
        subject,
        title,
        exposed_s * spared,
        [
            Evidence("machine", "By the doctor, or by NCCL's own log."),
            Evidence(
                subject.worker, f"{time_text(exposed_s)} of communication is exposed in a step."
            ),
        ],
        advice=advice,
        basis="assumed" if slow is None else "predicted",
    )


def compression_missing(subject: Subject) -> Finding | None:
    """Replicas wait for gradients in full on a link so slow that coding them would pay."""
    job = subject.job
    if job is None or subject.account is None or slow_flow(subject) is not None:
        return None
    if job.layout.dp == 1 or job.comm.dp.compress != "none":
        return None
    traffic = subject.traffic
    where = traffic.is_axis("dp") & traffic.is_op("all_reduce") & (traffic.rows["bytes"] > 0)
    exposed_s = traffic.sent_exposed_s(where)
    rate = _rate(subject, where)
    if not _is_bound_by_bytes(subject, where):
        return None
    best, gain_s = None, 0.0
    for form in _FORMS:
        changes = runnable_changes(job, f"comm.dp.compress={form}")
        asked = what_if(subject, changes) if changes else None
        # No more than the bytes that are not sent.
        seconds = exposed_s * (1 - _SHARE_OF[form])
        if asked is not None:
            seconds = min(seconds, asked.gain_s)
        elif rate > _CODING_PAYS_BELOW:
            continue
        if changes and seconds > gain_s * 1.1:
            best, gain_s = changes, seconds
    if best is None:
        return None
    total = traffic.per_step(where, "bytes")
    return Finding.of(
        subject,
        f"Replicas exchange {bytes_text(total)} of gradients a step in full, and wait "
        f"{time_text(exposed_s)} for them.",
        gain_s,
        [
            Evidence(
                subject.worker,
                f"The link carries {bytes_text(rate)}/s; {best[0].split('=')[1]} sends "
                f"{_SHARE_OF[best[0].split('=')[1]]:.0%} of the bytes.",
            )
        ],
        changes=best,
        advice="Compressed gradients are lossy (error feedback keeps the loss): see "
        "docs/techniques/compression.md.",
    )


def tp_across_nodes(subject: Subject) -> Finding | None:
    """Tensor parallel ranks exchange activations several times a layer, over the network."""
    job = subject.job
    if job is None or subject.account is None or job.layout.tp == 1:
        return None
    inside = job.cluster.devices_per_node
    if job.layout.tp <= inside:
        return None
    exposed_s = subject.measured.mean_s("exposed_comm.tp")
    gain_s, changes = _without_tp(subject, job)
    return Finding.of(
        subject,
        f"Tensor parallel groups of {job.layout.tp} ranks span nodes of {inside}, and wait "
        f"{time_text(exposed_s)} a step for each other.",
        gain_s,
        [
            Evidence(
                "settings",
                "Tensor parallelism exchanges activations in every layer and pass: it belongs on "
                "the links inside a node.",
            )
        ],
        changes=changes,
        advice=f"Keep layout.tp within {inside}, and share the rest out over dp, fsdp or pp.",
    )


# ---- what is expected ----------------------------------------------------------------------------


def expected_s(subject: Subject, flow: Flow) -> float | None:
    """What a step's collectives of a kind should take by the cluster's links, beside ranks that
    compute; None: not known."""
    job = subject.job
    if job is None or not flow.axis or flow.op not in _PRICED or flow.bytes <= 0:
        return None
    ranks = flow.num_ranks or getattr(job.layout, flow.axis)
    each, stride = flow.bytes / flow.num_calls, _stride(job, flow.axis)
    try:
        alone_s = collective_s(job.cluster, flow.op, each, ranks, stride)
    except InputError:
        return None
    tier = "across" if is_across(job.cluster, ranks, stride) else "inside"
    beside = constant(job.cluster.stack or Stack(), f"comm_time_{tier}")
    return float(alone_s) * beside * flow.num_calls


def _by_sockets_s(subject: Subject, flow: Flow) -> float | None:
    """What a CPU's sockets usually take for it; None for devices."""
    if subject.account is None or subject.account.is_device or not flow.num_ranks:
        return None
    stack = (subject.job.cluster.stack if subject.job else None) or Stack()
    rate = constant(stack, "socket_gb_per_s") * 1e9
    return flow.bytes * bus_factor(flow.op, flow.num_ranks) / rate


def _stride(job: Job, axis: str) -> int:
    stride = 1
    for inner in _INNER_FIRST:
        if inner == axis:
            break
        stride *= getattr(job.layout, inner)
    return stride


def _slowest_group(subject: Subject, flow: Flow) -> list[Evidence]:
    """Which of several groups of an axis is the slow one, where one is."""
    traffic = subject.traffic
    where = where_of(subject, flow) & traffic.is_large
    medians: dict[int, float] = {}
    for rank in subject.account.ranks if subject.account else ():
        mine = where & (traffic.rows["rank"] == rank)
        if mine.any():
            medians[rank] = float(np.median(traffic.link_ns[mine]))
    if len(medians) < 3:
        return []
    slowest = max(medians, key=medians.__getitem__)
    usual = float(np.median([value for rank, value in medians.items() if rank != slowest]))
    if medians[slowest] < 2 * usual:
        return []
    ratio = medians[slowest] / usual
    return [Evidence("ranks", f"Rank {slowest}'s group takes {ratio:.1f} times as long as others.")]


def _transport(subject: Subject) -> tuple[str, str] | None:
    """What is wrong with NCCL's way, and what to do: by the doctor, else by NCCL's own log."""
    for name in ("nccl-network", "nccl-peers"):
        check = (subject.doctor.get("checks") or {}).get(name) or {}
        if check.get("status") == "problem":
            return f"NCCL takes the wrong way: {check['seen']}.", str(check["fix"])
    log = "\n".join(subject.logs.values())
    if re.search(r"via NET/Socket|Using network Socket", log) and _has_infiniband(subject.job, log):
        return (
            "NCCL sends over sockets although there are InfiniBand cards.",
            "Unset NCCL_IB_DISABLE, give the container the RDMA devices and libibverbs, and look "
            "for NET/IB with NCCL_DEBUG=INFO.",
        )
    host = subject.job.cluster.host if subject.job is not None else None
    if host is not None and host.device_links in ("nvlink", "nvswitch") and "via SHM" in log:
        return (
            "NCCL goes through the host's memory although NVLink joins the devices.",
            "Unset NCCL_P2P_DISABLE, and let each process see all devices of its node.",
        )
    return None


def _has_infiniband(job: Job | None, log: str) -> bool:
    if re.search(r"mlx5_\d", log):
        return True
    host = job.cluster.host if job is not None else None
    return host is not None and any(card.kind in ("infiniband", "roce") for card in host.cards)


def _is_bound_by_bytes(subject: Subject, where: Array) -> bool:
    """Whether exchanges take their time by their bytes, not by their latency."""
    link = subject.traffic.link(where | ~subject.traffic.is_large)
    if link is None:
        return True
    count = max(1.0, subject.traffic.count(where))
    return link.latency_s * count < 0.5 * subject.traffic.link_s(where)


def _rate(subject: Subject, where: Array) -> float:
    seconds = subject.traffic.link_s(where)
    return subject.traffic.per_step(where, "bytes") / seconds if seconds else 0.0


def _without_tp(subject: Subject, job: Job) -> tuple[float, tuple[str, ...]]:
    """The gain of replicas or shards in place of tensor parallelism, and its settings."""
    layout, gain_s = job.layout, 0.0
    best: tuple[str, ...] = ()
    off = ("layout.tp=1", "layout.sequence_parallel=false")
    more_dp = (*off, f"layout.dp={layout.dp * layout.tp}")
    more_fsdp = (*off, f"layout.fsdp={layout.fsdp * layout.tp}", "layout.zero=2")
    for changes in (more_dp, more_fsdp):
        if not runnable_changes(job, *changes):
            continue
        asked = what_if(subject, changes)
        seconds = _exchange_instead(subject, job) if asked is None else asked.gain_s
        if seconds > gain_s:
            best, gain_s = changes, seconds
    return gain_s, best


def _exchange_instead(subject: Subject, job: Job) -> float:
    """What tensor parallelism exposes, less what gradients would take on the same link."""
    traffic, where = subject.traffic, subject.traffic.is_axis("tp") & subject.traffic.is_large
    rate = _rate(subject, where)
    if not rate or not job.model.num_params:
        return 0.0
    return traffic.per_step(where, "exposed_ns") - 4 * job.model.num_params / rate


def _named(flow: Flow) -> str:
    return f"{flow.op} over {flow.axis}" if flow.axis else flow.op
