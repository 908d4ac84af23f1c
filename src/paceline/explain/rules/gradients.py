"""Rules about when and in what pieces gradients are exchanged.

What an exchange costs is what no kernel hides, and on a CPU also the processor's time that sockets
take from the kernels beside it: there, a hidden exchange isn't free.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.stack import Stack, constant
from paceline.explain.changes import runnable_changes
from paceline.explain.finding import Evidence, Finding
from paceline.explain.rules.busy import queued_s
from paceline.explain.subject import Subject
from paceline.explain.traffic import bus_factor
from paceline.explain.what_if import what_if
from paceline.plan.search.gradient_comm import BUCKETS_MIB
from paceline.render.figures import bytes_text, time_text

Array = npt.NDArray[Any]

# Fewer buckets than this leave most of an exchange for the end of the backward pass.
_FEW_BUCKETS = 2.5
_GOOD_NUMBER = 8
# A backward pass takes two of three parts of a pass through the network.
_BACKWARD = 2 / 3
# Exchanges of which this part is exposed don't overlap.
_EXPOSED = 0.75
_GOOD_BUCKET_BYTES = 25 * 2**20


def reduce_every_micro_batch(subject: Subject) -> Finding | None:
    """Gradients are all-reduced after each micro-batch, not once a step."""
    where = gradients(subject)
    if where is None:
        return None
    times = _reductions(subject, where)
    if times < 2:
        return None
    cost_s = cost_of_s(subject, where)
    # Ranks that meet once wait less for each other than ranks that meet often: lags that come by
    # chance add up like random steps. Who waits least waits for chance alone.
    chance_s = float(subject.measured.term_s("straggler_wait").mean(axis=0).min())
    return Finding.of(
        subject,
        f"Gradients are all-reduced {times} times in a step, after each micro-batch.",
        cost_s * (times - 1) / times + chance_s * (1 - times**-0.5),
        [
            Evidence(
                "settings",
                f"Buffers of the same sizes travel in {times} backward passes of most steps, with "
                "no optimizer between.",
            ),
            Evidence(
                subject.worker,
                f"{bytes_text(subject.traffic.per_step(where, 'bytes'))} a step in "
                f"{subject.traffic.count(where):.0f} all-reduces cost {time_text(cost_s)}; "
                "once would do.",
            ),
        ],
        advice="Wrap all but the last micro-batch in DDP's no_sync() (FSDP2: "
        "set_requires_gradient_sync(False)), around forward and backward.",
        basis="measured" if subject.all_recorded(where) else "assumed",
    )


def buckets_too_small(subject: Subject) -> Finding | None:
    """So many small all-reduces that their latency is what takes the time."""
    where = gradients(subject)
    if where is None:
        return None
    traffic = subject.traffic
    times = max(1, _reductions(subject, where))
    count, total = traffic.count(where), traffic.per_step(where, "bytes")
    wanted = times * max(_GOOD_NUMBER, total / times / _GOOD_BUCKET_BYTES)
    if count <= 1.5 * wanted:
        return None
    latency_s = _latency_s(subject, where)
    # As much of it as is exposed: several on their way at once wait for each other besides.
    felt = min(1.0, traffic.sent_exposed_s(where) / max(1e-12, count * latency_s))
    waits_s = queued_s(subject, traffic.per_step(where, "duration_ns"))
    measured_s = (count - wanted) * latency_s * felt + (1 - wanted / count) * waits_s
    changes, planned_s = best_bucket(subject)
    mib = total / times / wanted / 2**20
    return Finding.of(
        subject,
        f"{count:.0f} all-reduces of {bytes_text(total / count)} a step, each with "
        f"{time_text(latency_s)} of latency.",
        max(measured_s, min(planned_s, _cost_of_term_s(subject) + waits_s)),
        [
            Evidence(
                subject.worker,
                f"{wanted:.0f} of {mib:.3g} MiB would carry the same bytes and still overlap.",
            ),
            *_told_queued(waits_s),
        ],
        changes=changes or runnable_changes(subject.job, f"layout.bucket_mib={max(0.1, mib):.2g}"),
        advice="Larger buckets (bucket_cap_mb of DDP).",
        basis="predicted" if subject.all_recorded(where) else "assumed",
    )


def buckets_too_large(subject: Subject) -> Finding | None:
    """One or two buckets hold all gradients: the exchange begins when backward is over."""
    where = gradients(subject)
    if where is None or _number_of_buckets(subject, where) > _FEW_BUCKETS:
        return None
    if not _is_exposed(subject, where):
        return None
    gain_s = _hideable_s(subject, where)
    count = _number_of_buckets(subject, where)
    total = subject.traffic.per_step(where, "bytes")
    changes, _ = best_bucket(subject)
    mib = max(0.25, total / _GOOD_NUMBER / 2**20)
    return Finding.of(
        subject,
        f"{bytes_text(total)} of gradients travel in {count:.0f} bucket"
        f"{'s' if count > 1.5 else ''}: {_exposed_share(subject, where):.0%} of the exchange is "
        "exposed.",
        gain_s,
        [
            Evidence(
                subject.worker,
                f"{_GOOD_NUMBER} buckets would begin with the first eighth of the backward pass.",
            ),
            *_told_alone(subject, where),
        ],
        changes=changes or runnable_changes(subject.job, f"layout.bucket_mib={mib:.2g}"),
        advice="Smaller buckets (bucket_cap_mb of DDP), so that exchanging starts early.",
        basis="predicted" if subject.all_recorded(where) else "assumed",
    )


def no_overlap(subject: Subject) -> Finding | None:
    """Gradients travel in enough buckets, and still nothing is computed meanwhile."""
    where = gradients(subject)
    if where is None or _number_of_buckets(subject, where) <= _FEW_BUCKETS:
        return None
    if not _is_exposed(subject, where):
        return None
    return Finding.of(
        subject,
        f"{_exposed_share(subject, where):.0%} of the gradients' exchange is exposed: nothing is "
        "computed beside it.",
        _hideable_s(subject, where),
        [
            Evidence(
                subject.worker,
                f"{subject.traffic.count(where):.0f} collectives take "
                f"{time_text(subject.traffic.link_s(where))} of a step.",
            ),
            *_told_alone(subject, where),
        ],
        advice="Reduce each bucket as soon as its gradients are there, asynchronously and on a "
        "stream of its own, and wait once, before the optimizer.",
        basis="assumed",
    )


# ---- what exchanges cost -------------------------------------------------------------------------


def gradients(subject: Subject) -> Array | None:
    """Which collectives exchange gradients between replicas; None where there are none."""
    if subject.account is None:
        return None
    traffic = subject.traffic
    where = traffic.is_axis("dp") & traffic.is_op("all_reduce") & traffic.is_large
    return where if where.any() else None


def cost_of_s(subject: Subject, where: Array) -> float:
    """What some collectives add to a step: what is exposed, and what their threads take of the
    cores, as ranks feel it or as sockets need it. Waiting for a late rank is not their cost."""
    traffic = subject.traffic
    exposed_s, link_s = traffic.sent_exposed_s(where), traffic.link_s(where)
    if not link_s:
        return exposed_s
    hidden_s = max(0.0, link_s - exposed_s) * _processor_s(subject, where) / link_s
    return exposed_s + max(hidden_s, queued_s(subject, traffic.per_step(where, "duration_ns")))


def _cost_of_term_s(subject: Subject) -> float:
    """What a step has of exposed exchanges between replicas, collectives and calls alike."""
    return subject.measured.mean_s("exposed_comm.dp", "straggler_wait")


def _told_queued(waits_s: float) -> list[Evidence]:
    """That threads of the exchange hold ranks up, where they do."""
    if not waits_s:
        return []
    sentence = f"Threads that exchange had a rank's core for {time_text(waits_s)} of a step."
    return [Evidence("machine", sentence)]


def _told_alone(subject: Subject, where: Array) -> list[Evidence]:
    """That a late rank may be the cause, where not all ranks were recorded."""
    if subject.all_recorded(where):
        return []
    sentence = "Not all of these ranks were recorded: a part of it may be waiting for a late one."
    return [Evidence(subject.worker, sentence)]


def _processor_s(subject: Subject, where: Array) -> float:
    """Seconds that sockets take from the cores that compute; 0 where a device computes."""
    if subject.account is None or not subject.cores_are_taken:
        return 0.0
    rows = subject.traffic.rows[where]
    ranks = max(2, int(rows["group_size"].max(initial=0)))
    stack = (subject.job.cluster.stack if subject.job else None) or Stack()
    rate = constant(stack, "socket_gb_per_s") * 1e9
    total = subject.traffic.per_step(where, "bytes") * bus_factor("all_reduce", ranks)
    return min(total / rate, subject.traffic.link_s(where))


def _reductions(subject: Subject, where: Array) -> int:
    """How often the same gradients are exchanged in a step, each time in a backward pass."""
    return subject.traffic.passes(where & subject.traffic.rows["in_backward"])


def _number_of_buckets(subject: Subject, where: Array) -> float:
    return subject.traffic.count(where) / max(1, _reductions(subject, where))


def _exposed_share(subject: Subject, where: Array) -> float:
    link_s = subject.traffic.link_s(where)
    return min(1.0, subject.traffic.removed_s(where) / link_s) if link_s else 0.0


def _is_exposed(subject: Subject, where: Array) -> bool:
    return _exposed_share(subject, where) > _EXPOSED


def _latency_s(subject: Subject, where: Array) -> float:
    """What an all-reduce takes however little it carries: that of single numbers, where seen."""
    traffic = subject.traffic
    numbers = traffic.is_op("all_reduce") & ~traffic.is_large
    link = traffic.link(where | numbers)
    smallest = traffic.link_ns[numbers if numbers.any() else where] / 1e9
    latency_s = float(np.median(smallest))
    return latency_s if link is None else min(latency_s, max(link.latency_s, latency_s / 2))


def _hideable_s(subject: Subject, where: Array) -> float:
    """What smaller buckets would hide of an exchange behind the last backward pass."""
    job, traffic = subject.job, subject.traffic
    exposed_s, link_s = traffic.removed_s(where), traffic.link_s(where)
    passes = job.accumulation if job is not None else max(1, _reductions(subject, where))
    terms = ("matmul", "attention", "recompute", "other_kernels", "host_gap")
    work_s = subject.work_s(*terms)
    backward_s = work_s / passes * _BACKWARD * (1 - 1 / _GOOD_NUMBER)
    # What sockets take of the cores isn't hidden, but moved.
    idle_s = max(0.0, link_s - _processor_s(subject, where))
    return max(0.0, min(exposed_s * (1 - 1 / _GOOD_NUMBER), backward_s, idle_s))


def best_bucket(subject: Subject) -> tuple[tuple[str, ...], float]:
    """The size of buckets that the planner expects most of, and its gain in seconds."""
    job = subject.job
    if job is None or job.layout.dp == 1:
        return (), 0.0
    best: tuple[str, ...] = ()
    gain_s = 0.0
    for mib in BUCKETS_MIB:
        asked = what_if(subject, (f"layout.bucket_mib={mib}",))
        if asked is not None and asked.gain_s > gain_s:
            best, gain_s = asked.changes, asked.gain_s
    return best, gain_s
