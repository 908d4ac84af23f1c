"""Step: seconds and peak memory of real training steps, many Jobs in one start of ranks.

How it works: every Job becomes a Trainer on random tokens, all of them alive at once, and rounds of
a few steps each go over all Jobs in turn, so that a machine that is slower for a while is so for
all of them. A step is timed as the loop times it, from the end of the step before to the reading of
its loss; the figure is the median over all rounds.

Peak memory is what training holds in tensors, see `memory`: the most of any rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from paceline.bench.memory import peak_bytes
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.kernels import switch
from paceline.train.data import MicroBatch
from paceline.train.task import Step, Task, decoder_on_meta, fill_decoder, next_token, unstaged_loss
from paceline.train.trainer import Trainer

# The first step allocates optimizer state and buffers; of these the least peak counts.
_WATCHED_STEPS = 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredStep:
    """A Job and what its step really took."""

    job: Job
    steps_s: tuple[float, ...]
    """Of each timed step; ranks agree on the end of a step, so rank 0's."""
    peak_memory_bytes: float | None
    """Of the rank that holds most; None: not counted."""

    @property
    def step_s(self) -> float:
        """Median of the steps."""
        return median(self.steps_s)


@dataclass(frozen=True)
class _PreparedJob:
    """A Trainer with its batch."""

    job: Job
    trainer: Trainer
    batch: Step
    peak_memory_bytes: float | None


def measure_jobs(
    ranks: Ranks,
    jobs: Sequence[Job],
    *,
    num_rounds: int,
    steps_per_round: int,
    say: Say,
    counts_memory: bool = True,
) -> list[MeasuredStep]:
    """Time steps of these Jobs; every rank must call it.

    Args:
        ranks: this process's place; each Job is for as many.
        jobs: concrete.
        num_rounds: how often each Job has its turn.
        steps_per_round: timed steps of a turn, after an untimed one.
        say: called after each Job's set-up and after each of its turns.
        counts_memory: whether to count each Job's peak of memory, which takes a few slow steps;
            on a CPU the profiler leaves the process slower, so that times should come from another.
    """
    ready = []
    for job in jobs:
        ready.append(_prepared(job, ranks, counts_memory=counts_memory))
        say(f"{job.name}: set up")
    times: dict[int, list[float]] = {index: [] for index in range(len(ready))}
    for _ in range(num_rounds):
        for index, each in enumerate(ready):
            times[index] += _turn(each, steps_per_round)
            say(f"{each.job.name}: {median(times[index]) * 1e3:.1f} ms")
    return [
        MeasuredStep(each.job, tuple(times[index]), each.peak_memory_bytes)
        for index, each in enumerate(ready)
    ]


def num_measurements(num_jobs: int, num_rounds: int) -> int:
    """How many times `measure_jobs` will speak."""
    return num_jobs * (1 + num_rounds)


def _prepared(job: Job, ranks: Ranks, *, counts_memory: bool) -> _PreparedJob:
    batch = _random_batch(job, ranks)
    trainer: list[Trainer] = []

    def build() -> None:
        torch.manual_seed(job.train.seed)
        trainer.append(Trainer.of(job, ranks, _task(job, ranks)))
        trainer[0].step(0, batch)()

    def step() -> None:
        trainer[0].step(1, batch)()

    if counts_memory:
        peak = _most(peak_bytes(build, step, _WATCHED_STEPS, ranks.device), ranks)
        return _PreparedJob(job, trainer[0], batch, peak)
    build()
    return _PreparedJob(job, trainer[0], batch, None)


def _turn(ready: _PreparedJob, num_steps: int) -> list[float]:
    switch.use(ready.job.layout.kernels, ready.trainer.ranks.device)  # of the process, not a Job's
    ready.trainer.step(2, ready.batch)()
    times = []
    began = time.perf_counter()
    for _ in range(num_steps):
        ready.trainer.step(2, ready.batch)()
        ended = time.perf_counter()
        times.append(ended - began)
        began = ended
    return times


def _task(job: Job, ranks: Ranks) -> Task:
    """The Job's decoder; its batches come from elsewhere."""
    assert isinstance(job.model, Model)
    staged = next_token(job, ranks)
    return Task(
        decoder_on_meta(job.model),
        unstaged_loss(staged),
        lambda _first: iter(()),
        None,
        "tokens",
        staged=staged,
        fill=lambda module: fill_decoder(job.train, module),
    )


def _random_batch(job: Job, ranks: Ranks) -> Step:
    """This rank's micro-batches of random tokens, the same on ranks that share their samples."""
    assert isinstance(job.model, Model)
    share = job.train.global_batch // job.layout.num_data_ranks
    stream = torch.Generator().manual_seed(job.layout.data_rank(ranks.rank))
    tokens = torch.randint(job.model.vocab_size, (share, job.train.seq_len + 1), generator=stream)
    return [
        MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), None)
        for part in tokens.to(ranks.device).split(job.micro_batch)
    ]


def _most(value: float, ranks: Ranks) -> float:
    if ranks.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
