"""Exact sums: every layout of dp, fsdp and pp has the bits of one rank, those of tp, cp and ep its
numbers to a tolerance. Gloo ranks against one process, three steps and an evaluation."""

import os
from random import Random

import pytest
import torch

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.checkpoint.state import training_state
from tests.parallel.drawn import DEEP, draw
from tests.parallel.training import (
    FP32,
    FP64,
    MODELS,
    TOLERANCE,
    assert_equal,
    job_of,
    micro_batches,
    run_cases,
    train,
    trainer_of,
    whole_tensor,
)
from tests.ranks import run_ranks

EXACT = ("elastic.min_nodes=1", "elastic.exact=true")
SEED = int(os.environ.get("PACELINE_LAYOUT_SEED", "2026"))
"""Another one draws other layouts."""
PRECISIONS = {
    "fp32": FP32,
    "bf16": ("layout.precision=bf16",),
    "bf16 alone": ("layout.precision=bf16", "layout.param_dtype=bf16"),
    "fp16": ("layout.precision=fp16",),
    "8bit": (*FP32, "layout.optimizer_state=8bit"),
    "fp64": FP64,
}
ALONE = {
    "replicas": (2, "dense", "fp32", 1, "dp=2"),
    "replicas, parts that are no power of two": (3, "dense", "fp32", 2, "dp=3"),
    "few parts": (3, "dense, tied", "fp32", 4, "dp=3"),
    "one part each": (4, "dense", "fp32", 6, "dp=4"),
    "zero 1": (3, "dense", "fp32", 2, "fsdp=3 zero=1"),
    "zero 2": (4, "dense", "fp32", 2, "fsdp=4 zero=2"),
    "zero 3": (3, "dense, tied", "fp32", 1, "fsdp=3 zero=3"),
    "hybrid": (4, "dense", "fp32", 2, "dp=2 fsdp=2 zero=3"),
    "experts": (2, "experts", "fp32", 2, "fsdp=2"),
    "experts in stages": (2, "experts", "fp32", 2, "pp=2 schedule=zbv"),
    "adapters": (2, "adapters", "fp32", 2, "fsdp=2"),
    "autocast": (2, "dense", "bf16", 2, "fsdp=2"),
    "narrow parameters": (2, "dense, tied", "bf16 alone", 2, "pp=2"),
    "loss scale": (2, "dense", "fp16", 2, "fsdp=2"),
    "8-bit states": (2, "dense", "8bit", 2, "fsdp=2"),
    "tied stages": (2, "dense, tied", "fp32", 2, "pp=2 schedule=zb_h1"),
    "tied stages on one rank": (2, "dense, tied", "fp32", 2, "pp=2 schedule=dualpipev"),
    "both directions": (4, "dense, tied", "fp32", 3, "pp=2 dp=2 schedule=dualpipe"),
    "both directions, sharded": (4, "dense", "fp32", 2, "pp=2 fsdp=2 schedule=dualpipe"),
    "stages of zero 3": (4, "dense", "fp32", 2, "pp=2 fsdp=2 zero=3"),
}
DRAWN = {2: 4, 3: 2, 4: 6}
TO_TOLERANCE = {
    "tensor": (2, "dense", "tp=2"),
    "tensor and replicas": (4, "dense, tied", "tp=2 dp=2"),
    "context": (2, "dense", "cp=2"),
    "context and shards": (4, "dense", "cp=2 fsdp=2"),
    "experts over replicas": (2, "experts", "dp=2 ep=2"),
    "experts over shards": (4, "experts", "dp=2 fsdp=2 ep=2"),
}


def _drawn(stream, num_ranks, kind, micro_batch):
    """Settings of a layout of dp, fsdp and pp that can run."""
    while True:
        settings = draw(stream, num_ranks, kind)
        own = [
            each for each in settings if not each.startswith(("layout.micro_batch", "layout.ep"))
        ]
        own.append(f"layout.micro_batch={micro_batch}")
        if {"layout.tp=1", "layout.cp=1"} <= set(own):
            try:
                job_of(num_ranks, (*EXACT, *MODELS[kind], *own))
            except InputError:
                continue
            return own


def _cases():
    """Name -> number of ranks, kind of model, precision, samples of a micro-batch, settings."""
    cases = {}
    for name, (num_ranks, kind, precision, size, settings) in ALONE.items():
        layout = [*(f"layout.{each}" for each in settings.split()), f"layout.micro_batch={size}"]
        cases[name] = num_ranks, kind, precision, size, layout
    stream = Random(SEED)
    for num_ranks, number in DRAWN.items():
        for _ in range(number):
            kind, size = (
                stream.choice(list(MODELS)),
                stream.choice([1, 2, 4 if num_ranks < 4 else 3]),
            )
            precision = stream.choice(list(PRECISIONS))
            layout = _drawn(stream, num_ranks, kind, size)
            name = " ".join(each.removeprefix("layout.") for each in layout)
            cases[f"{kind}, {precision}: {name}"] = num_ranks, kind, precision, size, layout
    return cases


CASES = _cases()


def _settings(case):
    _, kind, precision, _, layout = CASES[case]
    return (*EXACT, *PRECISIONS[precision], *MODELS[kind], *layout)


def _serial_settings(case):
    _, kind, precision, size, layout = CASES[case]
    depth = (DEEP,) if DEEP in layout else ()
    own = (*EXACT, *PRECISIONS[precision], *MODELS[kind], *depth)
    return (*own, f"layout.micro_batch={size}")


def _trained(rank, world_size, overrides):
    """Losses, norms and evaluation, and all of the state by name."""
    job = job_of(world_size, overrides)
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    results = [trainer.step(step, micro_batches(step, job, rank))() for step in range(3)]
    numbers = [(result.loss, result.grad_norm) for result in results]
    numbers.append(trainer.evaluate([micro_batches(9, job, rank)]))
    state = training_state(trainer.module, trainer.update.optimizer)
    held = {f"weight {name}": whole_tensor(p) for name, p in state["model"].items()}
    for name, own in state["optimizer"].items():
        held |= {f"{key} {name}": whole_tensor(value) for key, value in own.items()}
    return numbers, held, [result.is_bad for result in results]


def _trained_each(rank, world_size, cases):
    return [_trained(rank, world_size, case) for case in cases]


@pytest.fixture(scope="module")
def serial():
    """What one rank gives for the settings of a case."""
    kept = {}

    def get(case):
        settings = _serial_settings(case)
        if settings not in kept:
            kept[settings] = _trained(0, 1, settings)
        return kept[settings]

    return get


@pytest.fixture(scope="module")
def ran():
    """What the ranks of each case gave; all cases of one number of ranks share a launch."""
    kept = {}

    def get(case):
        if case not in kept:
            same = [name for name, each in CASES.items() if each[0] == CASES[case][0]]
            settings = [_settings(name) for name in same]
            of_ranks = run_ranks(_trained_each, CASES[case][0], settings)
            kept.update(zip(same, zip(*of_ranks, strict=True), strict=True))
        return kept[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_bits_of_one(case, serial, ran):
    numbers, state, bad = serial(case)
    assert not all(bad), "some step must have been taken"
    seen = set()
    for got_numbers, got_state, _ in ran(case):
        assert str(got_numbers) == str(numbers)  # a step that overflowed has no norm
        for name, value in got_state.items():
            assert torch.equal(value, state[name]), name
        seen |= got_state.keys()
    assert seen == state.keys()


@pytest.mark.parametrize("precision", [FP32, FP64])
def test_axes_inside_a_layer_are_exact_to_a_tolerance(precision):
    tolerance = {FP32: TOLERANCE[FP32], FP64: 1e-12}[precision]
    serial = {
        kind: train(0, 1, (*EXACT, *precision, *MODELS[kind], "layout.micro_batch=2"))
        for kind in MODELS
    }
    for num_ranks in (2, 4):
        names = [name for name, case in TO_TOLERANCE.items() if case[0] == num_ranks]
        cases = [
            (
                *(*EXACT, *precision, *MODELS[TO_TOLERANCE[name][1]], "layout.micro_batch=2"),
                *(f"layout.{each}" for each in TO_TOLERANCE[name][2].split()),
            )
            for name in names
        ]
        for name, got in zip(names, run_cases(num_ranks, cases), strict=True):
            assert_equal(got, serial[TO_TOLERANCE[name][1]], tolerance, name)


def test_one_rank_without_exact_sums_differs_in_bits_only():
    """Else nothing above would show that an order was chosen."""
    settings = (*FP32, "layout.micro_batch=1", "model.tie_embeddings=false")
    plain, exact = train(0, 1, settings), train(0, 1, (*EXACT, *settings))
    assert plain.grad_norms != exact.grad_norms
    assert_equal([exact], plain, TOLERANCE[FP32], "one rank")
