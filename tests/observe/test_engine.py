"""Traces of engines that serve a model: iterations, phases, idle time (files, pure)."""

import json

import pytest

from paceline.observe import caveats
from paceline.observe.recorded import read_account
from paceline.observe.terms import TERMS
from tests.observe.test_kineto import event, kernel, launch, span

PREFILL = (
    "execute_context_1(888_788544)_generation_0(0)",
    "execute_2_context_1(sq8sk0sqsq0sqsk0)_generation_1(sq1sk5sqsq1sqsk5)",
    "execute_new_1_cached_3",
    "step[EXTEND bs=1 toks=512]",
    "step[MIXED bs=3 toks=12]",
    "prefill[bs=2 tok=16384]",
)
DECODE = (
    "execute_context_0(0)_generation_4(4)",
    "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk5sqsq3sqsk5)",
    "execute_new_0_cached_3",
    "step[DECODE bs=16]",
    "step[TARGET_VERIFY bs=16]",
    "decode[bs=4]",
)


def serve(first, second, *more):
    """Two iterations, of 100 and 60 us; each launches early what its device does late."""
    return [
        *(span(first, 0, 40), span(second, 100, 130)),
        *(launch(5, 1), kernel("nvjet_tst_128x8", 50, 90, 1)),
        *(launch(105, 2), kernel("flash_fwd_splitkv_kernel", 110, 140, 2)),
        *(launch(110, 3), kernel("void flashinfer::sampling::TopKSamplingKernel<8>", 150, 160, 3)),
        *more,
    ]


@pytest.fixture
def read(tmp_path):
    def of(*events):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": list(events)}))
        return read_account(path)

    return of


def terms(account):
    return [
        {term: ns / 1000 for term, ns in zip(TERMS, row, strict=True) if ns}
        for row in account.terms_ns.tolist()
    ]


@pytest.mark.parametrize(("prefill", "decode"), [*zip(PREFILL, DECODE, strict=True)])
def test_iterations_are_steps_of_prefill_decode_sampling_and_idle(read, prefill, decode):
    account = read(*serve(prefill, decode))
    assert terms(account) == [
        {"prefill": 40, "idle": 60},
        {"decode": 30, "sampling": 10, "idle": 20},
    ]
    (told,) = account.caveats
    assert told.kind == caveats.INFERENCE
    assert told.numbers == {"iterations": 2, "prefill": 1, "decode": 1}
    # What the kernels are is told beside it.
    kinds = {TERMS[row["term"]] for row in account.kernels}
    assert kinds == {"matmul", "attention", "other_kernels.routing"}


@pytest.mark.parametrize(
    "sampler",
    [
        span("gpu_model_runner: sample", 103, 108),
        event("vllm/v1/sample/sampler.py(68): forward", 103, 108, "python_function"),
        event("sglang/srt/layers/sampler.py(40): forward", 103, 108, "python_function"),
    ],
)
def test_what_a_sampler_launches_is_sampling(read, sampler):
    account = read(*serve(PREFILL[0], DECODE[0], sampler))
    assert terms(account)[1] == {"sampling": 40, "idle": 20}


def test_communication_of_an_engine_keeps_its_term(read):
    reduced = [launch(7, 9), kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 90, 96, 9)]
    account = read(*serve(PREFILL[0], DECODE[0], *reduced))
    assert terms(account)[0] == {"prefill": 40, "exposed_comm.tp": 6, "idle": 54}


def test_steps_that_are_marked_stay_and_other_ranges_are_no_engine(read):
    steps = [span("ProfilerStep#4", 0, 170)]
    account = read(*serve(PREFILL[0], DECODE[0], *steps))
    assert account.steps["step"].tolist() == [4]
    assert terms(account) == [{"prefill": 40, "decode": 30, "sampling": 10, "idle": 90}]
    other = read(*serve("execute_plan", "step[", *steps))
    assert other.caveats == ()
    assert "host_gap" in terms(other)[0]
