"""Parallel equals serial: three optimizer steps on gloo ranks against one process.

With clipping and gradient accumulation, in fp64 to 1e-10 and in fp32 to 1e-5: losses, gradient
norms and every parameter.
"""

import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor

from paceline.comm.ranks import Ranks
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job, read_job
from paceline.models.decoder import Decoder
from paceline.plan.resolve import resolve
from paceline.train.data import MicroBatch
from paceline.train.data.order import rank_share
from paceline.train.task import Task, _next_token_loss
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks

BATCH, SEQ, STEPS = 16, 12, 3
CPU = Device(name="CPU", kind="cpu", precisions=("fp64", "fp32", "bf16", "fp16"))
SMALL = (
    "model.vocab_size=61", "model.hidden_size=32", "model.ffn_size=48", "model.num_layers=2",
    "model.num_heads=4", "model.num_kv_heads=2", "model.max_seq_len=12", f"train.seq_len={SEQ}",
    f"train.global_batch={BATCH}", "optim.warmup_steps=0", "optim.clip_norm=0.5", "optim.lr=1e-2",
    "layout.micro_batch=2",
)  # fmt: skip


def _job(num_ranks: int, *overrides: str) -> Job:
    machine = Cluster(device=CPU, devices_per_node=num_ranks, num_nodes=1)
    return resolve(read_job(None, [*SMALL, *overrides]), machine).job


def _micro_batches(step: int, job: Job, rank: int) -> list[MicroBatch]:
    tokens = torch.randint(61, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    mine = tokens[
        torch.from_numpy(rank_share(torch.arange(BATCH).numpy(), rank, job.layout.num_ranks))
    ]
    return [MicroBatch(part[:, :-1], part[:, 1:], None) for part in mine.split(job.micro_batch)]


def _train(rank: int, world_size: int, overrides: tuple[str, ...]):
    """Losses, gradient norms and final parameters after three steps."""
    job = _job(world_size, *overrides)
    module = Decoder(job.model)
    module.init_weights(torch.Generator().manual_seed(7))
    task = Task(module, _next_token_loss, lambda first: iter(()), None, "tokens")
    trainer = Trainer.of(job, Ranks(rank, world_size, rank, world_size), task)
    results = [trainer.step(i, _micro_batches(i, job, rank))() for i in range(STEPS)]
    params = {name: _whole(p) for name, p in module.named_parameters()}
    return [r.loss for r in results], [r.grad_norm for r in results], params


def _whole(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


LAYOUTS = {
    "ddp": (2, ["layout.dp=2"]),
    "ddp, small buckets": (2, ["layout.dp=2", "layout.bucket_mib=0.01"]),
    "ddp on four": (4, ["layout.dp=4"]),
    "ddp, one micro-batch": (2, ["layout.dp=2", "layout.micro_batch=8"]),
    "fsdp": (2, ["layout.fsdp=2"]),
    "fsdp on four": (4, ["layout.fsdp=4"]),
    "hsdp": (4, ["layout.dp=2", "layout.fsdp=2"]),
    "ddp, full recompute": (2, ["layout.dp=2", "layout.recompute=full"]),
    "ddp, selective recompute": (2, ["layout.dp=2", "layout.recompute=selective"]),
    "fsdp, full recompute": (2, ["layout.fsdp=2", "layout.recompute=full"]),
    "fsdp, selective recompute": (2, ["layout.fsdp=2", "layout.recompute=selective"]),
    "serial, full recompute": (1, ["layout.recompute=full"]),
}
FP64 = ("layout.precision=fp64", "layout.param_dtype=fp64")
FP32 = ("layout.precision=fp32",)


@pytest.fixture(scope="module")
def serial():
    """The one-process run, by precision."""
    return {sets: _train(0, 1, sets) for sets in (FP64, FP32)}


@pytest.mark.parametrize(("precision", "tolerance"), [(FP64, 1e-10), (FP32, 1e-5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_equals_serial(layout, precision, tolerance, serial):
    num_ranks, overrides = LAYOUTS[layout]
    sets = (*precision, *overrides)
    runs = [_train(0, 1, sets)] if num_ranks == 1 else run_ranks(_train, num_ranks, sets)
    losses, norms, params = serial[precision]
    assert all(norm > 0.5 for norm in norms), "clipping must have had something to do"
    for got_losses, got_norms, got_params in runs:
        assert got_losses == pytest.approx(losses, rel=tolerance)
        assert got_norms == pytest.approx(norms, rel=tolerance)
        for name, p in got_params.items():
            name = name.replace("_checkpoint_wrapped_module.", "")
            assert torch.allclose(p, params[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_equal_serial(serial):
    losses, norms, _ = serial[FP32]
    for got_losses, got_norms, _ in run_ranks(
        _train, 2, (*FP32, "layout.dp=2", "layout.compile=true"), timeout_s=200
    ):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        assert got_norms == pytest.approx(norms, rel=1e-5)


def _count_all_reduces(rank, world_size, overrides):
    """Bytes that the backward passes of one step all-reduce on this rank."""
    job = _job(world_size, *overrides)
    module = Decoder(job.model)
    module.init_weights(torch.Generator().manual_seed(7))
    task = Task(module, _next_token_loss, lambda first: iter(()), None, "tokens")
    trainer = Trainer.of(job, Ranks(rank, world_size, rank, world_size), task)
    trainer.step(0, _micro_batches(0, job, rank))()
    with torch.profiler.profile(record_shapes=True) as recorded:
        trainer.step(1, _micro_batches(1, job, rank))()
    names = [event.name for event in recorded.events()]
    return sum("gloo:all_reduce" in name for name in names)


def test_accumulation_reduces_gradients_once_a_step():
    """As many all-reduces with four micro-batches as with one."""
    once, often = (
        run_ranks(_count_all_reduces, 2, ("layout.dp=2", f"layout.micro_batch={size}"))
        for size in (8, 2)
    )
    assert once == often
    assert once[0] > 0


PRECISIONS = {
    "bf16": ("layout.precision=bf16",),
    "fp16": ("layout.precision=fp16",),
    "bf16 parameters": ("layout.precision=bf16", "layout.param_dtype=bf16"),
}


@pytest.mark.parametrize("layout", ["serial", "layout.dp=2", "layout.fsdp=2"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_low_precision_follows_fp32(precision, layout, serial):
    sets = PRECISIONS[precision]
    alone = layout == "serial"
    runs = [_train(0, 1, sets)] if alone else run_ranks(_train, 2, (*sets, layout))
    losses, _, _ = serial[FP32]
    for got, _, _ in runs:
        assert got == pytest.approx(losses, rel=2e-2)
        assert got != losses, "the arithmetic was not low at all"


def _scales(rank, world_size, overrides):
    """Loss scale and parameters before and after a step whose gradients overflow in fp16."""
    job = _job(world_size, "layout.precision=fp16", *overrides)
    module = Decoder(job.model)
    module.init_weights(torch.Generator().manual_seed(7))

    def loss(module, batch):
        # Overflows on one rank only: all must skip.
        return _next_token_loss(module, batch) * (1e30 if rank == 0 else 1.0)

    task = Task(module, loss, lambda first: iter(()), None, "tokens")
    trainer = Trainer.of(job, Ranks(rank, world_size, rank, world_size), task)
    before = [_whole(p) for p in module.parameters()]
    scale = trainer.scaler.get_scale()
    result = trainer.step(0, _micro_batches(0, job, rank))()
    same = all(torch.equal(a, _whole(b)) for a, b in zip(before, module.parameters(), strict=True))
    return result.is_bad, same, trainer.scaler.get_scale() / scale


@pytest.mark.parametrize("layout", ["layout.dp=2", "layout.fsdp=2"])
def test_an_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale(layout):
    assert run_ranks(_scales, 2, (layout,)) == [(True, True, 0.5)] * 2
