"""Who is late, told by the step's own exchange: two gloo ranks, one of them slow (seconds)."""

import time

import pytest

from paceline.comm.rendezvous import Ranks
from paceline.models.decoder import Block
from paceline.observe.rank_spread import slowest_rank
from tests.parallel.training import FP32, job_of, micro_batches, trainer_of
from tests.ranks import run_ranks

LAYOUTS = {
    "replicas": ("layout.dp=2",),
    "compressed": ("layout.dp=2", "comm.dp.compress=int8"),
    "shards": ("layout.fsdp=2", "layout.zero=3"),
    "tensor": ("layout.tp=2",),
    "pipeline": ("layout.pp=2", "layout.micro_batch=12"),
}
DELAY_S = 0.1
# What else the machine does only adds to a step, so the best of some is near the truth: of as many
# as that takes, at most.
_MOST_STEPS = 40


def _busy_s(rank, world_size, layouts):
    """The busy times that each rank is told: by layout, who is late, step and rank."""
    return {name: _told(rank, world_size, overrides) for name, overrides in layouts.items()}


def _told(rank, world_size, overrides):
    job = job_of(world_size, [*FP32, *overrides])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    block = next(module for module in trainer.module.modules() if isinstance(module, Block))
    steps = iter(range(100))

    def step():
        index = next(steps)
        return trainer.step(index, micro_batches(index, job, rank))().ranks["busy_s"]

    told = {}
    with trainer.stats.clock:
        step()
        for late in range(world_size):
            delay_s = DELAY_S / job.accumulation * (rank == late)
            hook = block.register_forward_hook(lambda *_, s=delay_s: time.sleep(s))
            told[late] = _best((step() for _ in range(_MOST_STEPS)), late)
            hook.remove()
    return told


def _best(steps, late):
    """The least busy time of each rank: of four steps, or more while they don't show the delay."""
    least = [float("inf")] * 2
    for index, busy_s in enumerate(steps):
        least = [min(pair) for pair in zip(least, busy_s, strict=True)]
        if index >= 3 and _shows(least, late):
            break
    return least


def _shows(busy_s, late):
    named, lag_s = slowest_rank(busy_s)
    return named == late and 0.5 * DELAY_S < lag_s < 2 * DELAY_S


@pytest.fixture(scope="module")
def told():
    first, second = run_ranks(_busy_s, 2, LAYOUTS)
    assert first == second, "what ranks are told differs"
    return first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_late_rank_is_named(told, layout):
    for late, busy_s in told[layout].items():
        assert _shows(busy_s, late), (late, busy_s)
