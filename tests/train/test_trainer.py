"""The step on gloo ranks: what it sends, low precision, and steps that must not count.

That it equals the one-process step is proved in tests/parallel.
"""

import shutil

import pytest
import torch

from paceline.comm.rendezvous import Ranks
from tests.parallel.training import (
    FP32,
    job_of,
    micro_batches,
    run_cases,
    train,
    trainer_of,
    whole_tensor,
)
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def serial():
    """The one-process run in fp32."""
    return train(0, 1, (*FP32, "layout.micro_batch=2"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_equal_serial():
    """With the code generation of torch.compile. Blocks with collectives inside, without it:
    tests/parallel/test_tp.py."""
    one = (*FP32, "layout.micro_batch=2", "model.num_layers=2")
    serial = train(0, 1, one)
    (ranks,) = run_cases(2, [(*one, "layout.compile=true", "layout.dp=2")])
    for got in ranks:
        assert got.losses == pytest.approx(serial.losses, rel=1e-5)
        assert got.grad_norms == pytest.approx(serial.grad_norms, rel=1e-5)


def _count_collectives(rank, world_size, cases):
    """Collectives of one step on this rank, by layout and kind."""
    counts = []
    for overrides in cases:
        job = job_of(world_size, overrides)
        trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
        trainer.step(0, micro_batches(0, job, rank))()
        with torch.profiler.profile() as recorded:
            trainer.step(1, micro_batches(1, job, rank))()
        names = [event.name for event in recorded.events()]
        counts.append(
            {kind: sum(name.startswith(f"c10d::{kind}") for name in names) for kind in KINDS}
        )
    return counts


KINDS = ("allreduce", "_allgather_base", "_reduce_scatter_base")


def test_accumulation_communicates_as_little_as_the_layout_allows():
    """Over four micro-batches: gradients once a step with DDP, parameters with ZeRO-2.

    That the other degrees send what they say: tests/parallel/test_tp.py.
    """
    layouts = ("dp=2", "fsdp=2 zero=2")
    cases = [
        (
            *FP32,
            "comm.fsdp.algorithm=backend",  # whose collectives the profiler knows by name
            f"layout.micro_batch={size}",
            *(f"layout.{each}" for each in layout.split()),
        )
        for layout in layouts
        for size in (12, 3)
    ]
    counts = run_ranks(_count_collectives, 2, cases)[0]
    ddp, ddp_often, zero2, zero2_often = counts
    assert ddp == ddp_often
    assert zero2_often["_allgather_base"] == zero2["_allgather_base"]
    assert zero2_often["_reduce_scatter_base"] == 4 * zero2["_reduce_scatter_base"] > 0
    assert ddp["allreduce"] > 0
    assert zero2["_allgather_base"] > 0


PRECISIONS = {
    "bf16": ("layout.precision=bf16",),
    "fp16": ("layout.precision=fp16",),
    "fp8": ("layout.precision=fp8",),
    "bf16 parameters": ("layout.precision=bf16", "layout.param_dtype=bf16"),
}
# Under every axis what people train in; the others under each axis that treats them apart.
LAYOUTS = {
    "bf16": ("dp=2", "fsdp=2", "tp=2", "pp=2 schedule=zb_h1", "cp=2"),
    "fp16": ("dp=2", "pp=2 schedule=zb_h1"),
    "fp8": ("fsdp=2", "tp=2"),
    "bf16 parameters": ("dp=2", "fsdp=2"),
}


@pytest.fixture(scope="module")
def low():
    """Losses by precision and layout."""
    cases = {
        (name, layout): (*sets, "layout.micro_batch=6", *(f"layout.{x}" for x in layout.split()))
        for name, sets in PRECISIONS.items()
        for layout in LAYOUTS[name]
    }
    results = dict(zip(cases, run_cases(2, list(cases.values())), strict=True))
    for name, sets in PRECISIONS.items():
        results[name, "serial"] = run_cases(1, [(*sets, "layout.micro_batch=2")])[0]
    return results


@pytest.mark.parametrize(
    ("precision", "layout"),
    [(name, layout) for name in PRECISIONS for layout in ("serial", *LAYOUTS[name])],
)
def test_low_precision_follows_fp32(precision, layout, serial, low):
    for got in low[precision, layout]:
        assert got.losses == pytest.approx(serial.losses, rel=2e-2)
        assert got.losses != pytest.approx(serial.losses, rel=1e-7), "it was not low"


def _overflow(rank, world_size, cases):
    """Is the step bad, are the parameters as before, and by how much has the scale changed?"""
    found = []
    for overrides in cases:
        job = job_of(world_size, (*overrides, "layout.precision=fp16", "layout.micro_batch=2"))
        trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
        if rank == world_size - 1:  # the last rank's loss overflows in fp16: all must skip
            _let_overflow(trainer)
        before = [whole_tensor(p) for p in trainer.module.parameters()]
        scale = trainer.update.loss_scale.value.item()
        result = trainer.step(0, micro_batches(0, job, rank))()
        after = [whole_tensor(p) for p in trainer.module.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((result.is_bad, same, trainer.update.loss_scale.value.item() / scale))
    return found


def _let_overflow(trainer):
    scale = trainer.update.loss_scale.scale
    trainer.update.loss_scale.scale = lambda loss: scale(loss) * 1e38


def test_an_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale():
    layouts = [("layout.dp=2",), ("layout.fsdp=2",), ("layout.tp=2",), ("layout.pp=2",)]
    assert run_ranks(_overflow, 2, layouts) == [[(True, True, 0.5)] * len(layouts)] * 2
