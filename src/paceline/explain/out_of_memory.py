"""After an out-of-memory: what was asked for and held, which term was too large, what would fit.

A run that ran out of memory leaves torch's message in its log. It says what was allocated; the
planner says what each term should have taken. Where more was held than predicted, the planner's
memory is wrong by that much for this Job, and what it proposes has to leave as much more room.

Proposed is the change that costs least time among those that fit: by the planner where the
device's speed is known, else by the order in which such changes usually cost.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from paceline.config.job import Job
from paceline.explain.changes import changed_job
from paceline.explain.subject import Subject
from paceline.explain.what_if import limit_bytes, memory_terms, predicted_s
from paceline.render.figures import bytes_text

_UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
# torch 2 and torch 1 say the rest differently.
_FIGURES: Mapping[str, Sequence[re.Pattern[str]]] = {
    "capacity_bytes": (
        re.compile(rf"total capacity of {_SIZE}"),
        re.compile(rf"; {_SIZE} total capacity"),
    ),
    "free_bytes": (re.compile(rf"of which {_SIZE} is free"), re.compile(rf"; {_SIZE} free")),
    "allocated_bytes": (
        re.compile(rf"{_SIZE} is allocated by PyTorch"),
        re.compile(rf"; {_SIZE} already allocated"),
    ),
    "unused_bytes": (re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),),
    "reserved_bytes": (re.compile(rf"{_SIZE} reserved in total by PyTorch"),),
}
_ON_DEVICE = re.compile(r"(CUDA|HIP|XPU|MPS)( backend)? out of memory|OutOfMemoryError")
_ON_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough) |std::bad_alloc|^MemoryError|"
    r"Cannot allocate memory",
    re.M,
)
# The kernel's own choice leaves no message of torch, only the launcher's.
_KILLED = re.compile(r"(?:ended with|exitcode:?|signal) -?(?:9|137)\b|SIGKILL|oom-kill|Killed")
# Part of the limit that a change may fill: fragmentation differs from run to run.
_ROOM = 0.96


@dataclass(frozen=True)
class AllocationFailure:
    """What the message of an allocator says; bytes, None where it doesn't say."""

    rank: int | None
    where: str
    """"device", "host", or "killed": by the kernel, most likely for its memory."""
    asked_bytes: float | None = None
    capacity_bytes: float | None = None
    free_bytes: float | None = None
    allocated_bytes: float | None = None
    unused_bytes: float | None = None
    """Reserved by the allocator and in no tensor: fragmentation."""

    @property
    def needed_bytes(self) -> float | None:
        """What the tensors took, with the one that didn't fit."""
        if self.allocated_bytes is None:
            return None
        return self.allocated_bytes + (self.asked_bytes or 0.0)


@dataclass(frozen=True)
class Remedy:
    """A change that fits."""

    changes: tuple[str, ...]
    peak_bytes: float
    """As predicted, corrected by what this Job was seen to need."""
    slower: float | None
    """Predicted step over that of the Job, less 1; None where speeds aren't known."""


@dataclass(frozen=True)
class OutOfMemory:
    """Why a run had too little memory, and what would fit."""

    shortage: AllocationFailure
    predicted_bytes: Mapping[str, float]
    """By term of the vocabulary, of the heaviest device; empty for models of one's own."""
    limit_bytes: float | None
    ways: tuple[Remedy, ...]
    """The cheapest first."""

    @property
    def term(self) -> str | None:
        """The largest predicted term."""
        terms = self.predicted_bytes
        return max(terms, key=terms.__getitem__) if terms else None

    @property
    def sentences(self) -> list[str]:
        """All of it, for people."""
        return [*_told(self.shortage), *self._against(), *self._proposed()]

    def _against(self) -> Iterator[str]:
        if self.term is None:
            return
        total = sum(self.predicted_bytes.values())
        parts = sorted(self.predicted_bytes.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{term} {bytes_text(value)}" for term, value in parts[:4] if value)
        needed = self.shortage.needed_bytes
        beside = "" if needed is None else f" against {bytes_text(needed)} needed"
        yield f"Predicted were {bytes_text(total)}{beside}: {largest}."

    def _proposed(self) -> Iterator[str]:
        for way in self.ways[:1]:
            texts = " ".join(f"--set '{text}'" for text in way.changes)
            cost = "" if way.slower is None else f", {way.slower:+.0%} time"
            yield f"The cheapest change that fits ({bytes_text(way.peak_bytes)}{cost}): {texts}"


def out_of_memory(subject: Subject) -> OutOfMemory | None:
    """What a Run's logs say of it; None where no rank ran out of memory."""
    shortage = allocation_failure_of(subject)
    if shortage is None:
        return None
    job = subject.job
    terms = memory_terms(job) if job is not None else None
    if job is None or terms is None:
        return OutOfMemory(shortage, {}, None, ())
    limit = shortage.capacity_bytes or limit_bytes(job)
    return OutOfMemory(shortage, terms, limit, tuple(_ways(job, shortage, limit)))


def allocation_failure_of(subject: Subject) -> AllocationFailure | None:
    """The first rank's message that tells of a lack of memory."""
    found = [
        shortage
        for name, text in subject.logs.items()
        if (shortage := parse(text, subject.rank_of_log(name))) is not None
    ]
    return min(found, key=lambda each: each.where == "killed", default=None)


def parse(text: str, rank: int | None = None) -> AllocationFailure | None:
    """Read what a log says of a lack of memory, the last time it does; None where it doesn't."""
    device = [match.start() for match in _ON_DEVICE.finditer(text)]
    if device:
        told = text[device[-1] :][:2000]
        figures = {name: _first(patterns, told) for name, patterns in _FIGURES.items()}
        reserved, allocated = figures.pop("reserved_bytes"), figures["allocated_bytes"]
        if reserved is not None and allocated is not None:
            figures["unused_bytes"] = reserved - allocated
        return AllocationFailure(rank, "device", _first((_ASKED,), told), **figures)
    host = [match.start() for match in _ON_HOST.finditer(text)]
    if host:
        told = text[max(0, host[-1] - 300) :][:800]  # the system's own words come last
        return AllocationFailure(rank, "host", _first((_ASKED,), told))
    return AllocationFailure(rank, "killed") if _KILLED.search(text) else None


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> float | None:
    for pattern in patterns:
        if found := pattern.search(text):
            return float(found[1]) * _UNITS[found[2]]
    return None


def _ways(job: Job, shortage: AllocationFailure, limit: float | None) -> list[Remedy]:
    """Changes that fit, the one that costs least time first."""
    if limit is None:
        return []
    now, before_s = sum((memory_terms(job) or {}).values()), predicted_s(job)
    # What the planner was wrong by here, it may be wrong by after the change.
    wrong = max(1.0, (shortage.needed_bytes or now) / now, limit / now)
    found = []
    for order, changes in enumerate(_candidates(job)):
        other = changed_job(job, changes)
        terms = memory_terms(other) if other is not None else None
        if other is None or terms is None:
            continue
        peak = sum(terms.values()) * wrong
        if peak > limit * _ROOM:
            continue
        after_s = predicted_s(other) if before_s is not None else None
        slower = None if after_s is None or before_s is None else after_s / before_s - 1
        found.append(
            (slower if slower is not None else order, order, Remedy(changes, peak, slower))
        )
    return [way for _, _, way in sorted(found, key=lambda each: each[:2])]


def _candidates(job: Job) -> Iterator[tuple[str, ...]]:
    """Changes that save memory, roughly the cheaper first; then two of them together."""
    singles = [*_single(job)]
    yield from singles
    for one, other in combinations(singles, 2):
        both = (*one, *other)
        if len({text.partition("=")[0] for text in both}) == len(both):
            yield both


def _single(job: Job) -> Iterator[tuple[str, ...]]:
    layout = job.layout
    smaller = [each for each in range(job.micro_batch - 1, 0, -1) if job.micro_batch % each == 0]
    yield from ((f"layout.micro_batch={each}",) for each in smaller)
    if layout.fsdp > 1:
        yield from ((f"layout.zero={zero}",) for zero in (2, 3) if zero > layout.zero)
    elif layout.dp > 1:
        for zero in (1, 2, 3):
            yield ("layout.dp=1", f"layout.fsdp={layout.dp}", f"layout.zero={zero}")
    if layout.recompute == "none":
        yield ("layout.recompute=selective",)
    if layout.recompute != "full":
        yield ("layout.recompute=full",)
    has_adamw = job.optim.name == "adamw"
    if layout.optimizer_state == "full" and has_adamw:
        yield ("layout.optimizer_state=8bit",)
    if not layout.offload:
        if has_adamw:
            yield ('layout.offload=["optimizer"]',)
        yield ('layout.offload=["activations"]',)
        yield ('layout.offload=["params"]',)


def _told(shortage: AllocationFailure) -> Iterator[str]:
    who = "A rank" if shortage.rank is None else f"Rank {shortage.rank}"
    asked = ""
    if shortage.asked_bytes is not None:
        asked = f" when it asked for {bytes_text(shortage.asked_bytes)}"
    if shortage.where == "killed":
        yield f"{who} was killed by the kernel, most likely for its memory (look at dmesg)."
        return
    yield f"{who} ran out of memory of the {shortage.where}{asked}."
    if shortage.allocated_bytes is not None and shortage.capacity_bytes is not None:
        unused = shortage.unused_bytes or 0.0
        yield (
            f"Tensors held {bytes_text(shortage.allocated_bytes)} of "
            f"{bytes_text(shortage.capacity_bytes)}; {bytes_text(unused)} more were reserved and "
            "unused."
        )
        if unused > 0.1 * shortage.capacity_bytes:
            yield (
                "Memory is fragmented: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may be "
                "all that is needed."
            )
