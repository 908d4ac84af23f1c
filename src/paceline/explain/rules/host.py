"""Rules about the host: waiting for values, launching too slowly, too many threads."""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.explain.finding import Basis, Evidence, Finding, Source
from paceline.explain.rules.busy import FAIR_QUEUE
from paceline.explain.rules.memory import ALLOCATING
from paceline.explain.subject import Subject
from paceline.explain.what_if import predicted_s
from paceline.observe.rank_spread import mean_figure, spread_of
from paceline.observe.tables.gaps import BETWEEN_KERNELS
from paceline.observe.terms import TERM_ID
from paceline.render.figures import time_text

Array = npt.NDArray[Any]

# All-reduces of so few bytes carry one number, not a tensor.
_NUMBER_BYTES = 64
# A step may read its loss and agree on a norm.
_FAIR_SYNCS = 3
# Python and the dispatcher pause for less than this between operators.
_LONG_GAP_NS = 1_000_000
_GC_RANGE = "paceline.gc"
# Waits that have rules of their own.
_WAITS = [TERM_ID[term] for term in ("data_wait", "checkpoint_stall")]
# A wait for a core is told from where threads of the ranks' own can't be the cause any more.
_LEAST_QUEUE = 0.12
# What checking costs where nothing is predicted, of a step: a rule of thumb.
_ASSUMED_CHECKS = 0.1
_ONCE = (
    *("cudaDeviceGetStreamPriorityRange", "cudaGetDeviceCount", "cuModuleLoad", "cuLibraryLoad"),
    *("cudaStreamCreate", "hipModuleLoad", "hipInit", "cuInit", "cublasCreate", "cudnnCreate"),
)
_GRAPHS = ("GraphLaunch",)
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "triton_poi_fused")
_COMPILING = ("_compile.compile_inner", "TorchDynamo Compile", "compile_fx", "async_compile")


def sync_points(subject: Subject) -> Finding | None:
    """The host reads values of the device, or all ranks agree on a number, again and again."""
    if subject.account is None:
        return None
    account = subject.account
    per_step = len(account.syncs) / len(account.steps)
    numbers = _agreements(subject)
    agreed = subject.traffic.count(numbers)
    read_s = _idle_after_syncs_s(subject) if account.is_device and per_step > _FAIR_SYNCS else 0.0
    # What a rank waits for others at an agreement is no cost of agreeing: all have to be there.
    is_much = agreed > _FAIR_SYNCS and subject.all_recorded(numbers)
    agreed_s = subject.traffic.removed_s(numbers) if is_much else 0.0
    told = _longest(subject, account.syncs, "host")
    if read_s:
        sentence = f"The device is idle for {time_text(read_s)} after it was waited for."
        told.append(Evidence("device", sentence))
    if agreed_s:
        sentence = f"Agreeing holds up the rank that waits least for {time_text(agreed_s)}."
        told.append(Evidence("ranks", sentence))
    return Finding.of(
        subject,
        f"A step reads a value of the device {per_step:.0f} times, and agrees on a number with "
        f"other ranks {agreed:.0f} times.",
        read_s + agreed_s,
        told,
        advice="Keep losses and metrics on the device (.detach()), and read them once every few "
        "steps, after the optimizer.",
        basis="measured" if account.is_device else "predicted",
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
        f"The {'device' if subject.account.is_device else 'step'} stands still for "
        f"{time_text(gain_s)} while the host does something else.",
        gain_s,
        _longest(subject, gaps, "host"),
        advice=f"Move Python work out of the step, {_fewer_launches(subject)}.",
    )


def _fewer_launches(subject: Subject) -> str:
    """How the host launches less, beside what it does already."""
    if uses_graphs(subject):
        return "and look at what runs between the graphs it replays"
    if _is_named(subject, *_COMPILED).any():
        return 'use larger micro-batches, and capture CUDA graphs (mode="reduce-overhead")'
    return "use larger micro-batches, compile the model or capture CUDA graphs"


def warm_up_recorded(subject: Subject) -> Finding | None:
    """The trace holds what happens once: libraries are loaded, kernels compiled."""
    if subject.account is None:
        return None
    gaps = _gaps_named(subject, (*_ONCE, *_COMPILING, *ALLOCATING))
    gaps = gaps[~_recurring(subject, gaps)]
    seconds = float(subject.measured.sum_s(gaps).mean())
    # Of one or two steps nothing tells that it doesn't go on.
    basis: Basis = "measured" if len(subject.measured.rows) > 2 else "predicted"
    return Finding.of(
        subject,
        f"{time_text(seconds)} of a recorded step loads libraries and kernels, which later "
        "steps don't.",
        seconds,
        [*_longest(subject, gaps, "host"), *_idle(subject, seconds)],
        advice="Record later steps (schedule(wait=10, warmup=1, active=3)), and judge those.",
        basis=basis,
    )


def recompilation(subject: Subject) -> Finding | None:
    """torch.compile compiles again within steps: shapes or settings change."""
    if subject.account is None:
        return None
    gaps = _gaps_named(subject, _COMPILING)
    if len(subject.measured.rows) < 2 or not subject.measured.recurs(gaps):
        return None
    gain_s = subject.measured.gain_s(subject.measured.sum_s(gaps))
    return Finding.of(
        subject,
        f"torch.compile takes {time_text(gain_s)} of a step.",
        gain_s,
        [*_longest(subject, gaps, "host"), *_idle(subject, gain_s)],
        advice="Look at TORCH_LOGS=recompiles,graph_breaks: mark sizes that change as dynamic, pad "
        "batches to a few lengths, and take graph breaks out of the blocks.",
        basis="measured",
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
        f"{time_text(seconds)} of a step copies from pageable memory to the device.",
        min(seconds, subject.measured.mean_s("host_gap", "data_wait")),
        [Evidence("device", f"{pageable['count'].sum() / len(account.steps):.0f} copies a step.")],
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
        f"{ranks} ranks with {threads} threads each share {cores} cores.",
        gain_s,
        [
            Evidence(
                "settings",
                "Threads of an operator wait for one another at its end, and the last one has no "
                "core.",
            )
        ],
        advice=f"Give each rank {max(1, cores // ranks)} threads (OMP_NUM_THREADS, "
        "torch.set_num_threads).",
        basis="predicted" if should_s is not None else "assumed",
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
        f"{ranks} ranks share {cores} of the host's {of_host} cores.",
        _work_of_cores_s(subject) * (1 - cores / could),
        [Evidence("settings", "The ranks' affinity masks leave them no others.")],
        advice="Bind each rank to cores of its own (srun --cpu-bind=cores, mpirun --map-by with "
        "--bind-to core, taskset), or to none.",
    )


def cores_taken(subject: Subject) -> Finding | None:
    """All ranks of a step stand in queues for a core: something else computes there."""
    waits = spread_of(mean_figure(subject.steady, "core_wait_s"))
    cores = subject.facts.get("num_cores")
    if waits is None or cores is None:
        return None
    # Waits are means, so they are held against the mean step; no rank waits longer than it takes.
    step_s = subject.mean_step_s
    least_s = min(waits.least, step_s)
    # Where ranks have more threads than cores they queue behind each other.
    if subject.threads_of_host > cores or least_s < _LEAST_QUEUE * step_s:
        return None
    return Finding.of(
        subject,
        f"Every rank is without a core for {time_text(least_s)} of a step or more.",
        # What one rank alone waits is a slow rank's.
        least_s - FAIR_QUEUE * step_s,
        [
            Evidence(
                "machine",
                f"Rank {waits.at} was ready to compute and had none for "
                f"{time_text(min(waits.most, step_s))}, by the kernel's count of queues and "
                "of stolen time.",
            ),
            *_slower_than_known(subject),
        ],
        advice="Look for other programs on the hosts (top), a quota of the container (cpu.max), "
        "and what the hypervisor gives to others (st in top); stop them or take other hosts.",
        basis="measured",
        of_s=step_s,
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
        f"Set for finding errors: {', '.join(checks)}.",
        gain_s,
        [
            Evidence(
                "settings", "Such a setting makes every operator, collective or allocation slower."
            )
        ],
        advice="Unset it once the error is found.",
        basis="assumed" if should_s is None else "predicted",
    )


def uses_graphs(subject: Subject) -> bool:
    """Whether the host replays graphs."""
    return bool(_is_named(subject, *_GRAPHS).any())


def _slower_than_known(subject: Subject) -> list[Evidence]:
    """That steps are longer than this machine was known to need, where it was."""
    should_s = None if subject.job is None else predicted_s(subject.job)
    if should_s is None or should_s > subject.step_s:
        return []
    sentence = (
        f"A step takes {time_text(subject.step_s)}, and {time_text(should_s)} by what "
        "was measured of this machine."
    )
    return [Evidence("reference", sentence)]


def _idle(subject: Subject, seconds: float) -> list[Evidence]:
    """That the device has nothing to do meanwhile."""
    if subject.account is None or not subject.account.is_device:
        return []
    return [Evidence("device", f"It is idle for {time_text(seconds)} of a step meanwhile.")]


def _recurring(subject: Subject, gaps: Array) -> Array:
    """Which gaps have a name that is found in half of the steps or more, if there are some."""
    if len(subject.measured.rows) < 3:
        return np.zeros(len(gaps), bool)
    names = np.unique(gaps["name"]).tolist()
    often = [name for name in names if subject.measured.recurs(gaps[gaps["name"] == name])]
    return np.isin(gaps["name"], often)


def _work_of_cores_s(subject: Subject) -> float:
    """Seconds of a step that get shorter with more cores: on a CPU all but waiting for the link,
    on a device what it waits for the host."""
    if subject.account is None:
        return subject.step_s if subject.cores_are_taken else 0.0
    if subject.account.is_device:
        return subject.measured.mean_s("host_gap", "data_wait")
    return subject.step_s - subject.measured.mean_s("exposed_comm")


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
    named = _is_named(subject, _GC_RANGE, BETWEEN_KERNELS, *_COMPILING, *ALLOCATING)
    waits = np.isin(account.gaps["term"], _WAITS)
    gaps = account.gaps[~named[account.gaps["name"]] & ~waits]
    once = _is_named(subject, *_ONCE)[gaps["name"]]
    return gaps[~once | _recurring(subject, gaps)]


def _gaps_named(subject: Subject, words: tuple[str, ...]) -> Array:
    account = subject.account
    assert account is not None
    return account.gaps[_is_named(subject, *words)[account.gaps["name"]]]


def _is_named(subject: Subject, *words: str) -> Array:
    """Which of the account's names contain one of these words; the last is for no name."""
    assert subject.account is not None
    names = (*subject.account.names, "")
    return np.array([any(word in name for word in words) for name in names])


def _longest(subject: Subject, rows: Array, source: Source) -> list[Evidence]:
    """Where most of some rows is, as a sentence."""
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
        told.append(f"{name[:60]}{place} {time_text(totals[at] / 1e9)}")
    return [Evidence(source, f"Most of it: {'; '.join(told)}.")]
