"""Rules about what is paid in time to save memory that is free."""

import numpy as np

from paceline.config.job import Job
from paceline.explain.changes import changed_job
from paceline.explain.finding import Basis, Evidence, Finding
from paceline.explain.rules.busy import queued_s
from paceline.explain.subject import Subject
from paceline.explain.what_if import expected, fits, limit_bytes, peak_bytes, what_if
from paceline.render.figures import bytes_text, time_text

ALLOCATING = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree")
_NOT_ALLOCATING = ("cudaMallocHost", "cudaFreeHost", "cudaMallocAsync", "cudaFreeAsync")


def recompute_not_needed(subject: Subject) -> Finding | None:
    """Activations are computed twice although there is memory for them."""
    job = subject.job
    if subject.account is None or job is None or job.layout.recompute == "none":
        return None
    measured = subject.measured
    again = measured.term_s("recompute")
    changes = ("layout.recompute=none", 'layout.recompute_layers="all"')
    without = changed_job(job, changes)
    if without is None or not fits(without):
        return None
    # Between operators that run again the host takes its time again.
    work_s = measured.mean_s("matmul", "attention", "other_kernels", "recompute")
    gaps_s = 0.0 if subject.account.is_device else measured.mean_s("host_gap")
    again_s = measured.gain_s(again) * subject.pace * (1 + gaps_s / max(work_s, 1e-12))
    return Finding.of(
        subject,
        f"{time_text(float(again.mean()))} of a step computes activations again, and they "
        "would fit into memory.",
        again_s + _choosing_s(subject, changes),
        [
            Evidence(
                subject.worker,
                f"Operators that record for autograd within the backward pass take "
                f"{time_text(float(again.mean()))} of a step.",
            ),
            Evidence("settings", f"layout.recompute is {job.layout.recompute}."),
            _memory_evidence(without),
        ],
        changes=changes,
        advice="Keep the activations.",
        basis="measured",
    )


def sharding_not_needed(subject: Subject) -> Finding | None:
    """Parameters are sharded and gathered although every rank has room for all of them."""
    job = subject.job
    if subject.account is None or job is None or job.layout.fsdp == 1:
        return None
    changes = (
        f"layout.dp={job.layout.dp * job.layout.fsdp}",
        "layout.fsdp=1",
        "layout.zero=0",
    )
    without = changed_job(job, changes)
    if without is None or not fits(without):
        return None
    exposed_s = subject.measured.mean_s("exposed_comm.fsdp")
    hooks_s, reducing_s = _hooks_s(subject), _reducing_s(subject, without, exposed_s)
    # Shards are gathered twice and reduced once (below ZeRO-3 gathered once), an all-reduce carries
    # as much as two of these; and as much less do threads of the exchange take of the cores.
    less = 1 / 3 if job.layout.zero == 3 else 0.0
    return Finding.of(
        subject,
        f"Parameters are sharded over {job.layout.fsdp} ranks and gathered in every pass, and "
        "would fit as replicas.",
        exposed_s + hooks_s + queued_s(subject, exposed_s) * less - reducing_s,
        [
            Evidence(
                subject.worker,
                f"Exchanging shards exposes {time_text(exposed_s)} of a step, and the host "
                f"takes {time_text(hooks_s)} for it; replicas all-reduce gradients once.",
            ),
            _memory_evidence(without),
        ],
        changes=changes,
        advice="Keep a replica on every rank.",
    )


def allocator_retries(subject: Subject) -> Finding | None:
    """The allocator asks the driver for memory within steps, which stops the device."""
    if subject.account is None or len(subject.measured.rows) < 2:
        return None
    names = subject.account.names
    calls = [
        at
        for at, name in enumerate(names)
        if name.startswith(ALLOCATING) and not name.startswith(_NOT_ALLOCATING)
    ]
    count, seconds = 0, 0.0
    for table in (subject.account.syncs, subject.account.gaps):
        rows = table[np.isin(table["name"], calls)]
        if not subject.measured.recurs(rows):
            continue
        count = max(count, len(rows))
        seconds = max(seconds, subject.measured.gain_s(subject.measured.sum_s(rows)))
    # Of one or two steps nothing tells that it goes on.
    basis: Basis = "measured" if len(subject.measured.rows) > 2 else "assumed"
    return Finding.of(
        subject,
        f"The allocator goes to the driver {count / len(subject.account.steps):.1f} times a step.",
        seconds,
        [
            Evidence(
                "host",
                f"Calls of the driver for memory: {count} in {len(subject.account.steps)} steps.",
            ),
            Evidence(subject.worker, f"{time_text(seconds)} of a step nothing runs meanwhile."),
        ],
        advice="Memory is nearly full or fragmented: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, keep shapes constant, or save memory "
        "(smaller micro-batches, recompute).",
        basis=basis,
    )


def _choosing_s(subject: Subject, without: tuple[str, ...]) -> float:
    """What selective recompute costs the forward pass, by the planner: Python decides operator by
    operator what is kept. It does so again when a block is repeated, which is measured with it."""
    assert subject.job is not None
    assert subject.account is not None
    if subject.job.layout.recompute != "selective" or subject.account.is_device:
        return 0.0
    now, then = expected(subject), what_if(subject, without)
    if now is None or then is None:
        return 0.0
    both_s = now.time_s.get("host_gap", 0.0) - then.time_s.get("host_gap", 0.0)
    return max(0.0, both_s) / 2 * subject.step_s / now.step_s


def _hooks_s(subject: Subject) -> float:
    """What the host does around shards: FSDP2's hooks, in which nothing is computed."""
    account = subject.account
    assert account is not None
    is_hook = np.array([name.startswith("FSDP::") for name in (*account.names, "")])
    gaps = account.gaps[is_hook[account.gaps["name"]]]
    return float(subject.measured.sum_s(gaps).mean()) * subject.pace


def _reducing_s(subject: Subject, without: Job, exposed_s: float) -> float:
    """What replicas will wait for gradients: by the planner, else the share that isn't gathering.

    Shards are gathered twice and reduced once; an all-reduce carries as much as two of the three.
    """
    now = expected(subject)
    then = what_if(subject, _differing(without))
    if now is None or then is None:
        return exposed_s * 2 / 3
    return then.time_s.get("exposed_comm.dp", 0.0) * subject.step_s / now.step_s


def _differing(without: Job) -> tuple[str, ...]:
    layout = without.layout
    return tuple(f"layout.{name}={getattr(layout, name)}" for name in ("dp", "fsdp", "zero"))


def _memory_evidence(job: Job) -> Evidence:
    sentence = (
        f"It would take {bytes_text(peak_bytes(job))} of the {bytes_text(limit_bytes(job))} that a "
        "device may use."
    )
    return Evidence("reference", sentence)
