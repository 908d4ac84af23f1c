"""Parallel equals serial: two optimizer steps on gloo ranks against one process.

With clipping and gradient accumulation: losses, gradient norms and every parameter, in fp64 to
1e-10, some in fp32 to 1e-5. First each technique alone, then layouts drawn at random over all axes.
Cases of one number of ranks share launches.
"""

import os

import pytest

from tests.parallel.drawn import AXES, DEEP, accepted, techniques
from tests.parallel.training import (
    FP32,
    FP64,
    MODELS,
    PER_LAUNCH,
    TOLERANCE,
    assert_equal,
    run_cases,
    train,
)

HOT = "comm.ep.hot_experts=3 comm.ep.hot_every=1"
ALONE = {
    "ddp": (2, "dense", "dp=2"),
    "ddp, small buckets": (2, "dense", "dp=2 bucket_mib=0.01"),
    "ddp, one micro-batch": (2, "dense", "dp=2 micro_batch=12"),
    "zero 1": (2, "dense", "fsdp=2 zero=1"),
    "zero 2": (2, "dense", "fsdp=2 zero=2"),
    "zero 3": (2, "dense, tied", "fsdp=2 zero=3"),
    "hsdp": (4, "dense", "dp=2 fsdp=2 micro_batch=3"),
    "zero 3, gpt": (2, "gpt", "fsdp=2 zero=3"),
    "tensor and sequence, gpt": (2, "gpt", "tp=2 micro_batch=8"),
    "1f1b, gpt": (2, "gpt", "pp=2"),
    "zero 3, encoder": (2, "encoder", "fsdp=2 zero=3"),
    "tensor and sequence, encoder": (2, "encoder", "tp=2 micro_batch=8"),
    "1f1b, encoder": (2, "encoder", "pp=2"),
    "zero 3, gemma": (2, "gemma", "fsdp=2 zero=3"),
    "1f1b, gemma": (2, "gemma", "pp=2"),
    "hsdp, zero 1": (4, "dense", "dp=2 fsdp=2 zero=1 micro_batch=3"),
    "tensor": (2, "dense", "tp=2 sequence_parallel=false micro_batch=8"),
    "tensor and sequence": (2, "dense, tied", "tp=2 micro_batch=8"),
    "shared key heads, odd vocabulary": (4, "one key head", "tp=4 micro_batch=8"),
    "shared key heads in stages": (4, "one key head", "tp=2 pp=2"),
    "gpipe": (2, "dense", "pp=2 schedule=gpipe"),
    "1f1b": (2, "dense, tied", "pp=2"),
    "uneven split": (2, "dense", "pp=2 split=[1,3]"),
    "interleaved": (2, "dense", "pp=2 schedule=interleaved"),
    "zb_h1": (2, "dense", "pp=2 schedule=zb_h1"),
    "interleaved_zb": (2, "dense", "pp=2 schedule=interleaved_zb"),
    "zbv": (2, "dense, tied", "pp=2 schedule=zbv"),
    "dualpipev": (2, "dense", "pp=2 schedule=dualpipev"),
    "dualpipe": (2, "dense, tied", "pp=2 schedule=dualpipe"),
    "dualpipe on four": (4, "dense", "pp=4 schedule=dualpipe"),
    "gpipe, zero 2": (4, "dense", "pp=2 schedule=gpipe fsdp=2 zero=2 micro_batch=2"),
    "1f1b, zero 2": (4, "dense, tied", "pp=2 fsdp=2 zero=2 micro_batch=2"),
    "1f1b, zero 3": (4, "dense, tied", "pp=2 fsdp=2 zero=3 micro_batch=2"),
    "interleaved, zero 3": (4, "dense", "pp=2 schedule=interleaved fsdp=2 zero=3 micro_batch=2"),
    "zb_h1, zero 2": (4, "dense", "pp=2 schedule=zb_h1 fsdp=2 zero=2 micro_batch=2"),
    "interleaved_zb, zero 3": (
        4,
        "dense",
        "pp=2 schedule=interleaved_zb fsdp=2 zero=3 micro_batch=2",
    ),
    "zbv, zero 2": (4, "dense, tied", "pp=2 schedule=zbv fsdp=2 zero=2 micro_batch=2"),
    "dualpipev, zero 3": (4, "dense", "pp=2 schedule=dualpipev fsdp=2 zero=3 micro_batch=2"),
    "dualpipe, zero 2": (4, "dense, tied", "pp=2 schedule=dualpipe fsdp=2 zero=2 micro_batch=2"),
    "dualpipe, zero 3": (4, "dense", "pp=2 schedule=dualpipe fsdp=2 zero=3 micro_batch=2"),
    "zero 3 in recomputed stages": (
        4,
        "dense",
        "pp=2 schedule=zbv fsdp=2 zero=3 recompute=full micro_batch=2",
    ),
    "zero 3 on the host in stages": (
        4,
        "dense",
        "pp=2 fsdp=2 zero=3 offload=['params'] micro_batch=2",
    ),
    "experts in split stages of shards": (
        4,
        "experts",
        "pp=2 schedule=zbv fsdp=2 zero=2 ep=2 micro_batch=2",
    ),
    "experts in stages of shards": (4, "experts", "pp=2 fsdp=2 zero=3 ep=2 micro_batch=2"),
    "adapters in split stages of shards": (
        4,
        "adapters",
        "pp=2 schedule=zbv fsdp=2 zero=2 micro_batch=2",
    ),
    "tensor in split stages of shards": (
        8,
        "dense",
        "pp=2 schedule=zbv fsdp=2 zero=2 tp=2 micro_batch=2",
    ),
    "tensor in stages of shards": (8, "dense, tied", "pp=2 fsdp=2 zero=3 tp=2 micro_batch=2"),
    "split stages of shards with replicas": (
        8,
        "dense",
        "pp=2 schedule=zbv dp=2 fsdp=2 zero=2 micro_batch=1",
    ),
    "stages of shards with replicas": (8, "dense", "pp=2 dp=2 fsdp=2 zero=3 micro_batch=1"),
    "ring": (2, "dense", "cp=2 micro_batch=8"),
    "ring, documents": (2, "documents", "cp=2 micro_batch=8"),
    "ulysses": (2, "dense", "cp=2 ulysses=2 micro_batch=8"),
    "ulysses, documents": (2, "documents", "cp=2 ulysses=2 micro_batch=8"),
    "ring and ulysses": (4, "dense", "cp=4 ulysses=2 micro_batch=8"),
    "experts over replicas": (2, "experts", "dp=2 ep=2"),
    "experts over shards": (2, "experts", "fsdp=2 ep=2"),
    "experts and tensor": (4, "experts", "dp=2 ep=2 tp=2"),
    "experts that move": (2, "experts", "dp=2 ep=2 rebalance_every=1"),
    "shards of experts that move": (2, "experts", "fsdp=2 ep=2 rebalance_every=1"),
    "hot experts over replicas": (2, "experts", f"dp=2 ep=2 {HOT}"),
    "hot experts over shards": (2, "experts", f"fsdp=2 zero=3 ep=2 {HOT} recompute=full"),
    "hot experts kept by parts": (2, "experts", f"fsdp=2 ep=2 {HOT} recompute=selective"),
    "hot experts that move": (2, "experts", f"dp=2 ep=2 rebalance_every=1 {HOT}"),
    "hot experts with biases": (2, "gpt-oss", f"fsdp=2 zero=2 ep=2 {HOT}"),
    "hot experts in a ring": (2, "experts", f"cp=2 ep=2 micro_batch=8 {HOT}"),
    "hot experts and tensor": (4, "experts", f"dp=2 ep=2 tp=2 {HOT}"),
    "hot experts in stages of shards": (
        4,
        "experts",
        f"pp=2 fsdp=2 zero=3 ep=2 micro_batch=2 {HOT}",
    ),
    "hot experts in split stages of shards": (
        4,
        "experts",
        f"pp=2 schedule=zbv fsdp=2 zero=2 ep=2 micro_batch=2 {HOT}",
    ),
    "adapters of hot experts": (2, "adapters of experts", f"fsdp=2 ep=2 {HOT}"),
    "adapters beside hot experts": (2, "adapters", f"dp=2 ep=2 {HOT}"),
    "answers over replicas": (2, "answers", "dp=2"),
    "answers in stages": (2, "answers", "pp=2 schedule=dualpipe"),
    "answers in a ring": (2, "answers", "cp=2 micro_batch=1"),
    "sources over replicas": (2, "sources", "dp=2"),
    "sources and tensor": (2, "sources", "tp=2 micro_batch=8"),
    "sources in stages": (2, "sources", "pp=2 schedule=dualpipe"),
    "sources in a ring": (2, "sources", "cp=2 micro_batch=1"),
    "adapters over replicas": (2, "adapters", "dp=2"),
    "adapters over shards": (2, "adapters", "fsdp=2 zero=3"),
    "adapters and tensor": (2, "adapters", "tp=2 micro_batch=8"),
    "adapters and whole tokens": (2, "adapters", "tp=2 sequence_parallel=false micro_batch=8"),
    "adapters beside experts": (2, "adapters", "dp=2 ep=2"),
    "adapters in split stages": (2, "adapters", "pp=2 schedule=zbv"),
    "adapters of experts over replicas": (2, "adapters of experts", "dp=2"),
    "adapters of experts over shards": (2, "adapters of experts", "fsdp=2 zero=3"),
    "adapters of shared out experts": (2, "adapters of experts", "dp=2 ep=2"),
    "adapters of experts and tensor": (2, "adapters of experts", "tp=2 micro_batch=8"),
    "adapters of cut experts in shards": (4, "adapters of experts", "fsdp=4 ep=2 micro_batch=2"),
    "adapters of experts in all": (4, "adapters of experts", "fsdp=2 ep=2 tp=2 micro_batch=4"),
    "adapters of experts that move": (2, "adapters of experts", "fsdp=2 ep=2 rebalance_every=1"),
    "adapters of experts in stages": (2, "adapters of experts", "pp=2 schedule=zbv"),
    "adapters of recomputed experts": (1, "adapters of experts", "recompute=full micro_batch=8"),
    "adapters of recomputed blocks": (1, "adapters", "recompute=full micro_batch=8"),
    "offload activations": (2, "dense", "dp=2 offload=['activations'] recompute=full"),
    "offload optimizer": (2, "dense", "tp=2 offload=['optimizer'] micro_batch=8"),
    "offload parameters": (2, "dense", "fsdp=2 offload=['params']"),
    "full recompute": (1, "dense", "recompute=full micro_batch=8"),
    "selective recompute of some layers": (
        2,
        "dense",
        "fsdp=2 recompute=selective recompute_layers=2",
    ),
}
ALSO_IN_FP32 = (
    "ddp", "zero 3", "tensor and sequence", "zbv", "ring", "experts over replicas",
    "zbv, zero 2", "1f1b, zero 3", "hot experts over replicas",
)  # fmt: skip
"""Equality in fp64 says that the sums are the same; one case for each kind of code also in fp32."""
DRAWN_ON = (2, 3, 4, 6, 8)
"""On each number of ranks a layout is drawn for each kind of model."""
SEED = int(os.environ.get("PACELINE_LAYOUT_SEED", "2026"))
"""Another one draws other layouts: all that the check accepts must run."""


def _cases():
    """(name, precision) -> (number of ranks, kind of model, settings)."""
    cases = {}
    for name, (num_ranks, kind, settings) in ALONE.items():
        layout = tuple(
            each if each.startswith("comm.") else f"layout.{each}" for each in settings.split()
        )
        layout += () if "micro_batch" in settings else ("layout.micro_batch=4",)
        for precision in (FP64, FP32) if name in ALSO_IN_FP32 else (FP64,):
            cases[name, precision] = num_ranks, kind, layout
    for num_ranks in DRAWN_ON:
        for kind, settings in MODELS.items():
            layout = next(accepted(SEED, num_ranks, settings, kind))
            name = " ".join(each.removeprefix("layout.") for each in layout)
            cases[f"{kind}: {name}", FP64] = num_ranks, kind, layout
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def serial():
    """The one-process run of each kind of model and precision."""
    wanted = {_serial_key(case) for case in CASES}
    return {
        (kind, precision, depth): train(
            0, 1, (*precision, *MODELS[kind], *depth, "layout.micro_batch=4")
        )
        for kind, precision, depth in wanted
    }


def _serial_key(case):
    """Kind, precision and depth of the network."""
    _, kind, settings = CASES[case]
    return kind, case[1], (DEEP,) if DEEP in settings else ()


@pytest.fixture(scope="module")
def ran():
    """What every case gave, made with the others of its launch when the first is asked for."""
    results = {}
    failed = {}

    def get(case):
        same = [key for key, (ranks, _, _) in CASES.items() if ranks == CASES[case][0]]
        at = same.index(case) // PER_LAUNCH * PER_LAUNCH
        launch = tuple(same[at : at + PER_LAUNCH])
        if launch in failed:
            pytest.fail(f"the ranks of this launch failed: {failed[launch]}")
        if case not in results:
            settings = [(*key[1], *MODELS[CASES[key][1]], *CASES[key][2]) for key in launch]
            try:
                results.update(zip(launch, run_cases(CASES[case][0], settings), strict=True))
            except AssertionError as error:
                failed[launch] = error
                raise
        return results[case]

    return get


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1][0][-4:]}")
def test_parallel_equals_serial(case, serial, ran):
    precision = case[1]
    expected = serial[_serial_key(case)]
    assert all(norm > 0.3 for norm in expected.grad_norms), "clipping must have had something to do"
    assert_equal(ran(case), expected, TOLERANCE[precision], case[0])


def test_enough_combinations_were_drawn():
    """Half of the drawn ones use several axes at once, and every axis is among them."""
    drawn = [techniques(settings) for (name, _), (_, _, settings) in CASES.items() if ": " in name]
    assert len(drawn) >= 24
    axes = {*AXES, "ep"}
    assert set.union(*drawn) >= axes
    assert sum(len(used & axes) >= 2 for used in drawn) >= 12
