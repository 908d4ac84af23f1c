"""Replicas whose gradients are compressed, on gloo ranks: they learn, agree, repeat and go on."""

import time

import pytest
import torch

from paceline.comm.compress.blockwise import Blockwise
from paceline.comm.rendezvous import Ranks
from paceline.parallel.replicas import COMM_SECTION, Replicas
from paceline.parallel.replicate import compressed_all_reduce_of
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.state import training_state
from paceline.train.data import MicroBatch
from paceline.train.run_checkpoints import state_to_load
from tests.parallel.training import (
    BATCH,
    FP32,
    FP64,
    SEQ,
    TOLERANCE,
    VOCAB,
    assert_equal,
    job_of,
    run_cases,
    train,
    trainer_of,
)
from tests.ranks import run_ranks

STEPS = 40
# Every bucket holds a matrix or two, so that many are under way at once.
REPLICAS = (
    *(*FP32, "layout.micro_batch=4", "layout.bucket_mib=0.02", "comm.compress_from=512"),
    *(f"train.steps={STEPS}", "optim.lr=5e-3", "optim.warmup_steps=5", "optim.clip_norm=1"),
    "model.num_layers=2",
)
# How much of the loss that the exact run loses each must lose as well: rounding next to nothing,
# and what sends a part of the values most of it.
LEAST_PROGRESS = {
    "bf16": 0.995,
    "int8": 0.995,
    "int4": 0.98,
    "quinary": 0.9,
    "onebit": 0.8,
    "topk:0.2": 0.7,
    "powersgd:4": 0.5,
}


def _learnable(step, job, rank):
    """This rank's part of sequences in which each token follows from the one before."""
    follower = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = [torch.randint(VOCAB, (BATCH,), generator=torch.Generator().manual_seed(step))]
    for _ in range(SEQ):
        tokens.append(follower[tokens[-1]])
    mine = torch.stack(tokens, 1)[job.layout.data_rank(rank) :: job.layout.num_data_ranks]
    return [MicroBatch(part[:, :-1], part[:, 1:], None) for part in mine.split(job.micro_batch)]


def _learn(rank, world_size, cases):
    """Losses, what the last step tells of communication, and all parameters as one tensor."""
    return [_learned(rank, world_size, case) for case in cases]


def _learned(rank, world_size, case):
    job = job_of(world_size, [*REPLICAS, f"layout.dp={world_size}", *case])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    results = [trainer.step(step, _learnable(step, job, rank))() for step in range(job.train.steps)]
    parameters = [parameter.detach().flatten() for parameter in trainer.module.parameters()]
    return [r.loss for r in results], results[-10].comm, torch.cat(parameters)


@pytest.fixture(scope="module")
def learned():
    """Of two ranks, by codec; "again" is a second run of int8."""
    names = ("none", *LEAST_PROGRESS, "again")
    kinds = {"again": "int8"}
    cases = [
        (f"comm.dp.compress={kinds.get(name, name)}", "layout.micro_batch=6") for name in names
    ]
    per_rank = run_ranks(_learn, 2, cases)
    return {name: runs for name, *runs in zip(names, *per_rank, strict=True)}


@pytest.mark.parametrize("name", LEAST_PROGRESS)
def test_it_learns_about_as_much_as_the_exact_run(name, learned):
    exact, compressed = learned["none"][0][0], learned[name][0][0]
    assert exact[0] == pytest.approx(compressed[0], abs=1e-6)
    progress = (compressed[0] - compressed[-1]) / (exact[0] - exact[-1])
    assert LEAST_PROGRESS[name] < progress < 1.02


@pytest.mark.parametrize("name", LEAST_PROGRESS)
def test_replicas_have_the_same_bits(name, learned):
    first, second = (parameters for _, _, parameters in learned[name])
    assert torch.equal(first, second)
    assert not torch.equal(first, learned["none"][0][2])


def test_a_second_run_has_the_same_bits(learned):
    assert learned["int8"][0][0] == learned["again"][0][0]
    assert torch.equal(learned["int8"][0][2], learned["again"][0][2])


def test_a_step_tells_what_it_sent_and_what_it_owes(learned):
    assert learned["none"][0][1] == {}
    told = {name: learned[name][0][1] for name in LEAST_PROGRESS}
    sent = {name: told[name]["dp.bytes"] for name in told}
    assert sent["int4"] < 0.6 * sent["int8"] < 0.4 * sent["bf16"]
    owed = {name: told[name]["error_norm"] for name in told}
    assert 0 < owed["bf16"] < owed["int8"] < owed["int4"] < owed["quinary"] < owed["topk:0.2"]
    assert sent["quinary"] < 0.7 * sent["int4"]


MORE = {
    "three ranks": (3, ()),
    "bf16 parameters": (2, ("layout.precision=bf16", "layout.param_dtype=bf16")),
    "a scaled loss": (2, ("layout.precision=fp16",)),
    "warm-up": (2, ("comm.warmup_steps=5",)),
}


@pytest.mark.parametrize("name", MORE)
def test_it_learns_in_every_precision_and_number_of_ranks(name):
    num_ranks, changes = MORE[name]
    cases = [(f"comm.dp.compress={kind}", "train.steps=25", *changes) for kind in ("none", "int8")]
    if name == "warm-up":
        cases[0] = cases[0][:2]
    per_rank = run_ranks(_learn, num_ranks, cases)
    exact, compressed = per_rank[0][0][0], per_rank[0][1][0]
    assert compressed[-1] == pytest.approx(exact[-1], rel=0.01)
    assert compressed[-1] < 0.75 * compressed[0]
    assert all(torch.equal(of_rank[1][2], per_rank[0][1][2]) for of_rank in per_rank[1:])
    if name == "warm-up":
        assert compressed[:6] == exact[:6]
        assert compressed[6:] != exact[6:]


@pytest.mark.parametrize("precision", [FP64, FP32], ids=["fp64", "fp32"])
def test_an_exact_exchange_of_ours_equals_serial(precision):
    """By another algorithm, and in the warm-up of a compressed run."""
    own = ("layout.dp=2", "layout.micro_batch=6", "layout.bucket_mib=0.02")
    cases = [(*precision, *own, "comm.dp.algorithm=ring")]
    if precision == FP32:
        cases.append((*precision, *own, "comm.dp.compress=int8", "comm.warmup_steps=3"))
    serial = train(0, 1, (*precision, "layout.micro_batch=2"))
    for case, ranks in zip(cases, run_cases(2, cases), strict=True):
        assert_equal(ranks, serial, TOLERANCE[precision], case)


def test_many_buckets_at_once_equal_serial_by_a_tree():
    """Eight equal layers on three ranks, which have different numbers of messages in a round."""
    layers = (*FP64, "model.num_layers=8")
    buckets = ("layout.dp=3", "layout.micro_batch=4", "layout.bucket_mib=0.02")
    case = (*layers, *buckets, "comm.dp.algorithm=tree")
    serial = train(0, 1, (*layers, "layout.micro_batch=4"))
    (ranks,) = run_cases(3, [case])
    assert_equal(ranks, serial, TOLERANCE[FP64], case)


def _bad_step(rank, world_size, kind):
    """Loss before, at and after a step whose gradient is not finite on one rank."""
    job = job_of(world_size, [*REPLICAS, "layout.dp=2", f"comm.dp.compress={kind}"])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    results = []
    for step in range(4):
        handle = None
        if (rank, step) == (1, 1):
            weight = next(p for p in trainer.module.parameters() if p.numel() > 512)
            handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        results.append(trainer.step(step, _learnable(step, job, rank))())
        if handle is not None:
            handle.remove()
    return [(r.is_bad, r.loss, r.grad_norm) for r in results]


@pytest.mark.parametrize("kind", ["int8", "quinary", "topk:0.05", "powersgd:2"])
def test_a_bad_step_is_skipped_and_leaves_no_trace(kind):
    for of_rank in run_ranks(_bad_step, 2, kind):
        assert [is_bad for is_bad, _, _ in of_rank] == [False, True, False, False]


def _save(rank, world_size, folder, kind):
    job = job_of(world_size, [*REPLICAS, f"layout.dp={world_size}", f"comm.dp.compress={kind}"])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    for step in range(3):
        trainer.step(step, _learnable(step, job, rank))()
    checkpointer = Checkpointer(folder, keep_last=1, say=lambda _: None)
    state = training_state(trainer.module, trainer.update.optimizer)
    checkpointer.save(3, {**state, COMM_SECTION: trainer.replicas.state()}, {})
    checkpointer.finish()
    return trainer.replicas.state()["error"][str(rank)]


def _load(rank, world_size, folder, kind):
    job = job_of(world_size, [*REPLICAS, f"layout.dp={world_size}", f"comm.dp.compress={kind}"])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    checkpointer = Checkpointer(folder, keep_last=1, say=lambda _: None)
    found = checkpointer.latest_good()
    owed = state_to_load(trainer, found)
    checkpointer.load(found, owed)
    trainer.replicas.load(owed[COMM_SECTION])
    errors = trainer.replicas.state()["error"][str(rank)]
    copied = {name: error.clone() for name, error in errors.items()}
    trainer.step(3, _learnable(3, job, rank))()
    return copied, {
        name: factor.isfinite().all() for name, factor in owed["comm"]["factor"].items()
    }


@pytest.mark.parametrize(
    ("kind", "old", "new"), [("int8", 2, 3), ("quinary", 2, 3), ("powersgd:2", 3, 2)]
)
def test_another_number_of_ranks_takes_over_all_that_is_owed(kind, old, new, tmp_path):
    saved = run_ranks(_save, old, tmp_path, kind)
    loaded = run_ranks(_load, new, tmp_path, kind)
    for name in saved[0]:
        owed = sum(of_rank[name] for of_rank in saved)
        assert owed.norm() > 0
        now = sum(of_rank[name] for of_rank, _ in loaded if name in of_rank)
        assert (now - owed).norm() < 1e-6 * owed.norm(), name
    assert len(loaded[0][1]) == (0 if kind == "int8" else len(saved[0]))


def _late(rank, world_size):
    """What each rank measures when the other's gradients come so much later."""
    job = job_of(world_size, [*REPLICAS, "layout.dp=2"])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    tails = []
    for late_s in (0.0, 0.4):
        step = _learnable(0, job, rank)
        weight = next(trainer.module.parameters())
        handle = weight.register_hook(lambda _, late_s=late_s: time.sleep(late_s * rank))
        trainer.step(0, step)()
        handle.remove()
        tails.append(trainer.passes.exposed_all_reduce.seconds)
    return tails


def test_the_tail_is_how_long_the_last_gradients_are_waited_for():
    of_first, of_second = run_ranks(_late, 2)
    assert max(*of_first[:1], *of_second) < 0.2
    assert of_first[1] > 0.3


def _torn(rank, world_size):
    job = job_of(world_size, [*REPLICAS, "layout.dp=2", "comm.dp.compress=int8"])
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    if rank == 1:
        Blockwise.decode = _raise
    with pytest.raises((ValueError, RuntimeError)) as raised:
        trainer.step(0, _learnable(0, job, rank))()
    if rank == 1:
        raise raised.value
    time.sleep(60)


def _raise(*_given, **_named):
    raise ValueError("the payload is torn")


def test_what_fails_in_an_exchange_fails_the_step_with_its_traceback():
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ---.*in average.*the payload is torn"):
        run_ranks(_torn, 2)
    assert time.monotonic() - began < 50


def test_nothing_is_put_between_ddp_and_its_own_sums_without_being_asked():
    job = job_of(1, [*REPLICAS, "layout.dp=1"])
    assert compressed_all_reduce_of(torch.nn.Linear(2, 2), {}, job.comm, 1) is None
    assert type(trainer_of(job, Ranks()).replicas) is Replicas
