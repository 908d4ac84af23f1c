"""Trial round: what every rank does while a few Jobs take turns, in one start of the ranks.

Each Job becomes a Trainer on its own data, all alive at once, so that a trial round is no larger
than what fits together. A turn is an untimed step and a few timed ones, reading the batch included.
After each round rank 0 decides who has another one (`tune.race`) and tells all, so that no rank
waits for one that has decided otherwise. Before everything that may fail rank 0 says which Job it
is about, and all meet: whoever started the ranks knows whom to blame when they are gone.

At the end the fastest is profiled for a few steps: what it spends its time on decides what is tried
next.

It is no run: nothing is kept of what was learnt, and neither evaluations nor checkpoints happen.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.profiler import record_function as span

from paceline.bench.rank_pool import RankProgress, TellProgress
from paceline.comm.core_share import core_share_of
from paceline.comm.records import broadcast
from paceline.comm.rendezvous import Ranks
from paceline.config.device import Device
from paceline.config.job import Job, to_raw
from paceline.explain.subject import only_axis
from paceline.kernels import switch
from paceline.observe.profile import ProfiledWindows
from paceline.train.families import task_of
from paceline.train.session import facts_of
from paceline.train.task import Step
from paceline.train.trainer import Trainer
from paceline.tune.race import leader, remaining_jobs, turn_seconds

# A turn's timed steps take about so long, so that a scheduler's whims are small beside it.
_TURN_S = 0.6
_MOST_STEPS = 8
_PROFILED_STEPS = 3


@dataclass(frozen=True)
class RoundRequest:
    """What a trial round is to do."""

    jobs: tuple[Job, ...]
    """Concrete, for as many ranks."""
    trace_folder: Path | None = None
    """Where the trace of the fastest goes; None: nothing is profiled."""

    def plain(self) -> dict[str, Any]:
        """As JSON, for another process."""
        folder = None if self.trace_folder is None else str(self.trace_folder)
        return {"jobs": [to_raw(job) for job in self.jobs], "trace_folder": folder}

    @staticmethod
    def of_plain(record: Mapping[str, Any]) -> "RoundRequest":
        """What another process asks for."""
        folder = record["trace_folder"]
        jobs = tuple(Job.parse(raw) for raw in record["jobs"])
        return RoundRequest(jobs, None if folder is None else Path(folder))


@dataclass(frozen=True)
class RoundResult:
    """What a trial round found."""

    steps_s: tuple[tuple[tuple[float, ...], ...], ...]
    """Of each Job and round, the seconds of each timed step."""
    fastest: int
    facts: Mapping[str, Any]
    """Of the fastest, as a Run keeps them."""
    terms: Mapping[int, Mapping[str, float]]
    """Step -> term -> seconds of its profiled steps; none where it wasn't profiled."""

    @property
    def rounds(self) -> dict[int, list[float]]:
        """What each turn stands for, by the number of the Job."""
        return _rounds(self.steps_s)


def run_trial_round(request: RoundRequest, ranks: Ranks, tell: TellProgress) -> RoundResult:
    """Let the Jobs take turns; every rank must call it."""
    _limit_memory(request.jobs[0].cluster.device)
    say = _Announcer(ranks, tell, request.jobs)
    ready = []
    with ExitStack() as opened:
        for at, job in enumerate(request.jobs):
            say.about(at, "set up")
            ready.append(_PreparedTrial.of(job, ranks, opened))
        turns = _race(ready, say)
        fastest = broadcast(leader(_rounds(turns)))  # each rank's clock may name another
        terms: Mapping[int, Mapping[str, float]] = {}
        if request.trace_folder is not None:
            say.about(fastest, "profile")
            terms = _profiled(ready[fastest], request.trace_folder, ranks)
    facts = facts_of(
        request.jobs[fastest], ranks, ready[fastest].trainer.task, core_share_of(ranks)
    )
    return RoundResult(tuple(map(tuple, turns)), fastest, facts, terms)


class _Announcer:
    """Rank 0 tells what comes next, and all meet before it does."""

    def __init__(self, ranks: Ranks, tell: TellProgress, jobs: Sequence[Job]) -> None:
        self._ranks, self._tell, self._jobs = ranks, tell, jobs

    def about(self, at: int, what: str) -> None:
        self._tell(RankProgress("heat", at, len(self._jobs), what))
        if self._ranks.world_size > 1:
            dist.barrier()


@dataclass
class _PreparedTrial:
    """A Trainer with its batches."""

    job: Job
    trainer: Trainer
    batches: Iterator[Step]
    index: int
    """Of every step: beyond those that are exact before compression begins, and one at which
    nothing extra is computed."""

    @classmethod
    def of(cls, job: Job, ranks: Ranks, opened: ExitStack) -> "_PreparedTrial":
        """Built, and stepped twice: buffers, buckets and the optimizer's state are there then.

        Args:
            opened: closes the tables that the Job has.
        """
        torch.manual_seed(job.train.seed)
        task = task_of(job, ranks)
        if task.tables is not None:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            opened.callback(task.tables.close)
            task.tables.open(folder, folder, print)
            task.tables.load(0)
        ready = cls(
            job,
            Trainer.of(job, ranks, task),
            task.steps_from(0),
            10 * (job.comm.warmup_steps // 10 + 1) + 1,
        )
        ready.turn(1)
        return ready

    def turn(self, num_steps: int) -> list[float]:
        """Seconds of each timed step, after an untimed one."""
        # The switch is the process's, not a Job's.
        switch.use(self.job.layout.kernels, self.trainer.ranks.device)
        self.step()
        ends = [time.perf_counter()]
        for _ in range(num_steps):
            self.step()
            ends.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(ends)]

    def step(self) -> None:
        """One optimizer step, batch and numbers read."""
        with span("paceline.step"):
            with span("paceline.data_wait"):
                batch = next(self.batches)
            self.trainer.step(self.index, batch)()


def _race(ready: Sequence[_PreparedTrial], say: _Announcer) -> list[list[tuple[float, ...]]]:
    turns: list[list[tuple[float, ...]]] = [[] for _ in ready]
    plan = [(at, 1) for at in range(len(ready))]
    while plan:
        for at, num_steps in plan:
            say.about(at, "turn")
            turns[at].append(tuple(ready[at].turn(num_steps)))
        plan = broadcast(_next_round(turns))
    return turns


def _next_round(turns: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, int]]:
    """Who has another turn, and how many steps it has."""
    rounds = _rounds(turns)
    return [(at, _steps_of_turn(min(rounds[at]))) for at in remaining_jobs(rounds)]


def _rounds(turns: Sequence[Sequence[Sequence[float]]]) -> dict[int, list[float]]:
    return {at: [turn_seconds(turn) for turn in of_it] for at, of_it in enumerate(turns)}


def _steps_of_turn(step_s: float) -> int:
    return max(1, min(_MOST_STEPS, round(_TURN_S / step_s)))


def _profiled(
    ready: _PreparedTrial, folder: Path, ranks: Ranks
) -> Mapping[int, Mapping[str, float]]:
    """Record a few steps; rank 0 gets their terms."""
    every = 1 + _PROFILED_STEPS
    windows = ProfiledWindows(folder, ranks.rank, every, _PROFILED_STEPS, axis=only_axis(ready.job))
    terms: dict[int, dict[str, float]] = {}
    with windows:
        for _ in range(every):
            ready.step()
            terms |= windows.step()
    return terms


# ---- memory --------------------------------------------------------------------------------------


def _limit_memory(device: Device) -> None:
    """Let a CPU rank take its share of the host's memory and no more.

    Otherwise the kernel would end some process of the machine, and not this rank's allocation.
    """
    if device.kind != "cpu" or device.memory_bytes is None:
        return
    try:
        import resource
    except ImportError:  # not on Windows
        return
    most = _data_bytes() + int(device.memory_bytes.value)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))


def _data_bytes() -> int:
    """What counts against the limit: private writable memory of this process."""
    return int(getattr(psutil.Process().memory_info(), "data", 0))
