"""Rules about the host: waiting for values, launching too slowly, too many threads."""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.explain.finding import Finding
from paceline.explain.rules.busy import FAIR_QUEUE
from paceline.explain.rules.memory import ALLOCATING
from paceline.explain.subject import Subject
from paceline.explain.what_if import predicted_s
from paceline.observe.ranks import mean_figure, spread_of
from paceline.observe.summary import step_time_text
from paceline.observe.tables.gaps import BETWEEN_KERNELS

Array = npt.NDArray[Any]

# All-reduces of so few bytes carry one number, not a tensor.
_NUMBER_BYTES = 64
# A step may read its loss and agree on a norm.
_FAIR_SYNCS = 3
# Python and the dispatcher pause for less than this between operators.
_LONG_GAP_NS = 1_000_000
_GC_RANGE = "paceline.gc"
# A wait for a core is told from where threads of the ranks' own can't be the cause any more.
_LEAST_QUEUE = 0.12
# What checking costs where nothing is predicted, of a step: a rule of thumb.
_ASSUMED_CHECKS = 0.1
_ONCE = (
    *("cudaDeviceGetStreamPriorityRange", "cudaGetDeviceCount", "cuModuleLoad", "cuLibraryLoad"),
    *("cudaStreamCreate", "hipModuleLoad", "hipInit", "cuInit", "cublasCreate", "cudnnCreate"),
)
_COMPILING = ("_compile.compile_inner", "TorchDynamo Compile", "compile_fx", "async_compile")


def sync_points(subject: Subject) -> Finding | None:
    """The host reads values of the device, or all ranks agree on a number, again and again."""
    if subject.account is None:
        return None
    account = subject.account
    per_step = len(account.syncs) / len(account.steps)
    numbers = _agreements(subject)
    agreed = subject.traffic.count(numbers)
    if per_step <= _FAIR_SYNCS and agreed <= _FAIR_SYNCS:
        return None
    gain_s = _idle_after_syncs_s(subject) if account.is_device else 0.0
    gain_s += subject.traffic.removed_s(numbers)
    return Finding.of(
        subject,
        "sync-points",
        f"A step reads a value of the device {per_step:.0f} times, and agrees on a number with "
        f"other ranks {agreed:.0f} times.",
        gain_s,
        _lines(subject),
        advice="Keep losses and metrics on the device (.detach()), and read them once every few "
        "steps, after the optimizer.",
        confidence="high" if account.is_device else "medium",
    )


def host_bound(subject: Subject) -> Finding | None:
    """The device has nothing to do because Python is late."""
    if subject.account is None:
        return None
    gaps = _own_gaps(subject)
    if subject.account.is_device:
        gain_s = _common_s(subject, gaps) * subject.pace
    else:
        # A CPU computes where Python runs: only long pauses are avoidable, at the same place in
        # every step. Elsewhere the system took the core away.
        gaps = gaps[gaps["duration_ns"] >= _LONG_GAP_NS]
        places = {(int(row["name"]), int(row["line"])) for row in gaps}
        gain_s = sum(
            _common_s(subject, gaps[(gaps["name"] == name) & (gaps["line"] == line)])
            for name, line in places
        )
    return Finding.of(
        subject,
        "host-bound",
        f"The {'device' if subject.account.is_device else 'step'} stands still for "
        f"{step_time_text(gain_s)} while the host does something else.",
        gain_s,
        _longest(subject, gaps),
        advice="Move Python work out of the step, use larger micro-batches, compile the model or "
        "capture CUDA graphs.",
    )


def warm_up_recorded(subject: Subject) -> Finding | None:
    """The trace holds what happens once: libraries are loaded, kernels compiled."""
    if subject.account is None:
        return None
    gaps = _gaps_named(subject, _ONCE)
    seconds = float(subject.measured.sum_s(gaps).mean())
    return Finding.of(
        subject,
        "warm-up-recorded",
        f"{step_time_text(seconds)} of a recorded step loads libraries and kernels, which later "
        "steps don't.",
        seconds,
        _longest(subject, gaps),
        advice="Record later steps (schedule(wait=10, warmup=1, active=3)), and judge those.",
        confidence="high",
    )


def recompilation(subject: Subject) -> Finding | None:
    """torch.compile compiles again within steps: shapes or settings change."""
    if subject.account is None:
        return None
    gaps = _gaps_named(subject, _COMPILING)
    gain_s = subject.measured.gain_s(subject.measured.sum_s(gaps))
    return Finding.of(
        subject,
        "recompilation",
        f"torch.compile takes {step_time_text(gain_s)} of a step.",
        gain_s,
        _longest(subject, gaps),
        advice="Look at TORCH_LOGS=recompiles,graph_breaks: mark sizes that change as dynamic, pad "
        "batches to a few lengths, and take graph breaks out of the blocks.",
        confidence="high",
    )


def pageable_copies(subject: Subject) -> Finding | None:
    """Batches are copied from pageable memory: the host waits for each."""
    account = subject.account
    if account is None or not account.is_device:
        return None
    kernels = account.kernels
    pageable = kernels[["Pageable -> Device" in account.names[name] for name in kernels["name"]]]
    seconds = float(pageable["total_ns"].sum()) / len(account.steps) / 1e9
    return Finding.of(
        subject,
        "pageable-copies",
        f"{step_time_text(seconds)} of a step copies from pageable memory to the device.",
        min(seconds, float(subject.measured.term_s("host_gap", "data_wait").mean())),
        [f"{pageable['count'].sum() / len(account.steps):.0f} copies a step."],
        advice="Give the loader pin_memory=True, and copy with non_blocking=True.",
    )


def thread_oversubscription(subject: Subject) -> Finding | None:
    """More threads than cores: operators wait for threads that have no core."""
    cores, threads = subject.facts.get("num_cores"), subject.facts.get("threads_per_rank", 1)
    if cores is None or subject.job is None or threads < 2:
        return None
    ranks = subject.ranks_of_host
    wanted = threads * ranks
    if wanted <= cores:
        return None
    # By the Job's own Cluster: the Run's is fitted to the crowded steps.
    should_s = predicted_s(subject.job)
    gain_s = subject.step_s - should_s if should_s is not None else 0.0
    gain_s = gain_s if gain_s > 0 else subject.step_s * (1 - cores / wanted) / 2
    return Finding.of(
        subject,
        "thread-oversubscription",
        f"{ranks} ranks with {threads} threads each share {cores} cores.",
        gain_s,
        ["Threads of an operator wait for one another at its end, and the last one has no core."],
        advice=f"Give each rank {max(1, cores // ranks)} threads (OMP_NUM_THREADS, "
        "torch.set_num_threads).",
        confidence="medium" if should_s is not None else "low",
    )


def crowded_cores(subject: Subject) -> Finding | None:
    """Ranks are bound to fewer cores than they are, while the host has more."""
    cores, of_host = subject.facts.get("num_cores"), subject.facts.get("num_cores_of_host")
    threads = subject.facts.get("threads_per_rank", 1)
    if cores is None or of_host is None or subject.job is None or threads > 1:
        return None
    ranks = subject.ranks_of_host
    could = min(ranks, of_host)
    if could <= cores:
        return None
    return Finding.of(
        subject,
        "crowded-cores",
        f"{ranks} ranks share {cores} of the host's {of_host} cores.",
        _work_of_cores_s(subject) * (1 - cores / could),
        ["The ranks' affinity masks leave them no others."],
        advice="Bind each rank to cores of its own (srun --cpu-bind=cores, mpirun --map-by with "
        "--bind-to core, taskset), or to none.",
        confidence="medium",
    )


def cores_taken(subject: Subject) -> Finding | None:
    """All ranks of a step stand in queues for a core: something else computes there."""
    waits = spread_of(mean_figure(subject.steady, "core_wait_s"))
    cores = subject.facts.get("num_cores")
    if waits is None or cores is None:
        return None
    # Where ranks have more threads than cores they queue behind each other.
    if subject.threads_of_host > cores or waits.least < _LEAST_QUEUE * subject.step_s:
        return None
    return Finding.of(
        subject,
        "cores-taken",
        f"Every rank is without a core for {step_time_text(waits.least)} of a step or more.",
        # What one rank alone waits is a slow rank's.
        waits.least - FAIR_QUEUE * subject.step_s,
        [
            f"Rank {waits.at} was ready to compute and had none for {step_time_text(waits.most)}, "
            "by the kernel's count of queues and of stolen time."
        ],
        advice="Look for other programs on the hosts (top), a quota of the container (cpu.max), "
        "and what the hypervisor gives to others (st in top); stop them or take other hosts.",
        confidence="high",
    )


def checking_left_on(subject: Subject) -> Finding | None:
    """Python, torch or NCCL check themselves, as for finding an error."""
    checks = subject.facts.get("checking") or ()
    if not checks or subject.job is None:
        return None
    should_s = predicted_s(subject.job)
    gain_s = _ASSUMED_CHECKS * subject.step_s if should_s is None else subject.step_s - should_s
    return Finding.of(
        subject,
        "checking-left-on",
        f"Set for finding errors: {', '.join(checks)}.",
        gain_s,
        ["Such a setting makes every operator, collective or allocation slower."],
        advice="Unset it once the error is found.",
        confidence="low" if should_s is None else "medium",
    )


def _work_of_cores_s(subject: Subject) -> float:
    """Seconds of a step that get shorter with more cores: on a CPU all but waiting for the link,
    on a device what it waits for the host."""
    if subject.account is None:
        return subject.step_s if subject.cores_are_taken else 0.0
    if subject.account.is_device:
        return float(subject.measured.term_s("host_gap", "data_wait").mean())
    return subject.step_s - float(subject.measured.term_s("exposed_comm").mean())


def _agreements(subject: Subject) -> Array:
    """Which collectives agree on a number, or on being there, but for the last of each step on each
    rank."""
    traffic = subject.traffic
    size_bytes = traffic.rows["bytes"]
    where = traffic.is_op("all_reduce", "all_gather", "broadcast") & (size_bytes >= 0)
    where &= size_bytes <= _NUMBER_BYTES
    where |= traffic.is_op("barrier") & ~traffic.is_axis("ep")  # there it is a part of dispatching
    places = np.flatnonzero(where)
    keys = np.stack([traffic.rows["rank"][places], traffic.rows["step"][places]], axis=1)
    # Rows are in order of rank and time: the last of each key is the loss and norm of the step.
    is_last = np.ones(len(places), bool)
    if len(places) > 1:
        is_last[:-1] = (keys[1:] != keys[:-1]).any(axis=1)
    where[places[is_last]] = False
    return where


def _idle_after_syncs_s(subject: Subject) -> float:
    """Seconds of a step in which a device is idle since the host waited for it."""
    account = subject.account
    assert account is not None
    waited = np.zeros(len(account.gaps), bool)
    for rank in account.ranks:
        syncs = account.syncs[account.syncs["rank"] == rank]
        mine = np.flatnonzero(account.gaps["rank"] == rank)
        if not len(syncs) or not len(mine):
            continue
        ends = np.sort(syncs["start_ns"] + syncs["duration_ns"])
        begin = account.gaps["start_ns"][mine]
        after = begin + account.gaps["duration_ns"][mine]
        # The wait ends shortly after the device ran dry, within the gap.
        first = np.searchsorted(ends, begin, "left")
        waited[mine] = (first < len(ends)) & (ends[np.minimum(first, len(ends) - 1)] <= after)
    seconds = subject.measured.sum_s(account.gaps[waited])
    return subject.measured.gain_s(seconds)


def _common_s(subject: Subject, gaps: Array) -> float:
    """Seconds of a step that all ranks spend in some gaps; what one alone does makes it late."""
    return float(np.median(subject.measured.sum_s(gaps).min(axis=1)))


def _own_gaps(subject: Subject) -> Array:
    """Gaps that no other rule speaks of, and in which the host was late."""
    account = subject.account
    assert account is not None
    named = _is_named(subject, _GC_RANGE, BETWEEN_KERNELS, *_ONCE, *_COMPILING, *ALLOCATING)
    return account.gaps[~named[account.gaps["name"]]]


def _gaps_named(subject: Subject, words: tuple[str, ...]) -> Array:
    account = subject.account
    assert account is not None
    return account.gaps[_is_named(subject, *words)[account.gaps["name"]]]


def _is_named(subject: Subject, *words: str) -> Array:
    """Which of the account's names contain one of these words; the last is for no name."""
    assert subject.account is not None
    names = (*subject.account.names, "")
    return np.array([any(word in name for word in words) for name in names])


def _lines(subject: Subject) -> list[str]:
    """Where the host waits most, as a sentence."""
    assert subject.account is not None
    return _longest(subject, subject.account.syncs)


def _longest(subject: Subject, rows: Array) -> list[str]:
    account = subject.account
    assert account is not None
    if not len(rows):
        return []
    pairs, which = np.unique(
        np.stack([rows["name"], rows["line"]], axis=1), axis=0, return_inverse=True
    )
    totals = np.bincount(which.reshape(-1), rows["duration_ns"]) / len(account.steps)
    told = []
    for at in np.argsort(-totals)[:3]:
        name, line = (account.names[i] if i >= 0 else "" for i in pairs[at])
        place = f" at {line}" if line else ""
        told.append(f"{name[:60]}{place} {step_time_text(totals[at] / 1e9)}")
    return [f"Most of it: {'; '.join(told)}."]
