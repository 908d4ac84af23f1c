"""Who is late, told by the step's own exchange: two gloo ranks, one of them slow (seconds)."""

import time

import pytest

from paceline.comm.ranks import Ranks
from paceline.models.decoder import Block
from paceline.observe.ranks import late_by
from tests.parallel.training import FP32, job_of, micro_batches, trainer_of
from tests.ranks import run_ranks

LAYOUTS = {
    "replicas": ("layout.dp=2",),
    "compressed": ("layout.dp=2", "comm.dp.compress=int8"),
    "shards": ("layout.fsdp=2", "layout.zero=3"),
    "tensor": ("layout.tp=2",),
    "pipeline": ("layout.pp=2", "layout.micro_batch=12"),
}
# Longer than what else this machine does adds to the best of some steps.
DELAY_S = 0.1
_STEPS = 4


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
    with trainer.clock:
        step()
        for late in range(world_size):
            delay_s = DELAY_S / job.accumulation * (rank == late)
            hook = block.register_forward_hook(lambda *_, s=delay_s: time.sleep(s))
            told[late] = [step() for _ in range(_STEPS)]
            hook.remove()
    return told


@pytest.fixture(scope="module")
def told():
    first, second = run_ranks(_busy_s, 2, LAYOUTS)
    assert first == second, "what ranks are told differs"
    return first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_late_rank_is_named(told, layout):
    for late, steps in told[layout].items():
        named, lag_s = late_by([min(of_rank) for of_rank in zip(*steps, strict=True)])
        assert named == late
        assert 0.5 * DELAY_S < lag_s < 2 * DELAY_S
