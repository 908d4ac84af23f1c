"""Real traces of A100s and an H800: what is made of them, against HolisticTraceAnalysis's figures
(files; its own run where it is installed)."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.device_mix import DeviceMix
from paceline.observe.accounting import accounting, accounting_ns
from paceline.observe.kineto.read import read_kineto
from paceline.observe.recorded import read_account
from paceline.observe.terms import TERM_ID, TERMS
from paceline.observe.timeline import COMM, PROCESSOR, Timeline

ROOT = Path(__file__).parents[2]
TRACES = ROOT / ".." / "shared" / "data" / "traces"
NAMES = (
    "a100_128ranks_rank0",
    "a100_128ranks_rank1",
    "a100_2ranks_rank0",
    "a100_8ranks_rank3",
    "a100_alexnet",
    "b200_vllm_eager",
    "h100_qwen",
    "h800_dualpipe_pair",
    "mi300_resnet_ddp",
    "mi300_vllm_decode_graph",
    "resnet50_loader_2021",
)
# HolisticTraceAnalysis 0.5.0 on these files, as `python -m benchmarks.explain_speed` asks it:
# shares of the device's time, of communication that is overlapped, and of the combinations of
# kernels in the time in which any ran, in percent.
PEER = {
    "a100_8ranks_rank3": {
        "split": (61.23, 22.57, 16.2),
        "overlap": 47.03,
        "kernels": {
            "compute": 47.2,
            "communication": 21.5,
            "communication compute": 17.2,
            "compute copy": 6.5,
            "copy": 5.1,
            "communication compute copy": 2.2,
            "communication copy": 0.3,
        },
    },
    "a100_2ranks_rank0": {
        "split": (17.26, 4.97, 77.78),
        "overlap": 14.31,
        "kernels": {
            "compute": 74.1,
            "communication": 21.3,
            "communication compute": 3.6,
            "copy": 0.9,
            "communication copy": 0.2,
        },
    },
    "a100_128ranks_rank0": {
        "split": (17.71, 28.74, 53.56),
        "overlap": 11.81,
        "kernels": {
            "communication": 61.6,
            "compute": 29.8,
            "communication compute": 8.3,
            "communication copy": 0.2,
            "copy": 0.1,
        },
    },
}


def path_of(name):
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in ../shared/data/traces")
    return path


@cache
def trace(name):
    return read_kineto(path_of(name))


@cache
def account_of(name):
    return read_account(path_of(name))


def to_whole_microseconds(timeline):
    """Shrink spans inwards, as HolisticTraceAnalysis does with traces that have nanoseconds."""
    spans = timeline.spans.copy()
    ends = (spans["start_ns"] + spans["duration_ns"]) // 1000 * 1000
    spans["start_ns"] = -(-spans["start_ns"] // 1000) * 1000
    spans["duration_ns"] = np.maximum(ends - spans["start_ns"], 0)
    return Timeline(spans, timeline.steps, timeline.names, timeline.streams)


@pytest.mark.parametrize("name", PEER)
def test_what_a_device_does_is_what_holistic_trace_analysis_sees(name):
    timeline, peer = to_whole_microseconds(trace(name)), PEER[name]
    mix = DeviceMix.of(timeline, *timeline.ranks)
    shares = [100 * mix.shares()[kind] for kind in ("compute", "non_compute", "idle")]
    assert shares == pytest.approx(peer["split"], abs=0.1)
    assert 100 * mix.overlap() == pytest.approx(peer["overlap"], abs=0.1)
    kernels = {" ".join(sorted(kinds)): 100 * share for kinds, share in mix.busy_shares().items()}
    assert {k: v for k, v in kernels.items() if v > 0.05 or k in peer["kernels"]} == pytest.approx(
        peer["kernels"], abs=0.1
    )


def test_the_exchange_of_experts_is_communication_though_its_kernels_are_no_nccl():
    # HolisticTraceAnalysis calls DeepEP's kernels computation: 99.6 % of the time, and no overlap.
    timeline = to_whole_microseconds(trace("h800_dualpipe_pair"))
    mix = DeviceMix.of(timeline, 0)
    assert 100 * (1 - mix.shares()["idle"]) == pytest.approx(99.6, abs=0.1)
    assert mix.shares()["compute"] < 0.97
    assert mix.overlap() > 0.9
    exchange = account_of("h800_dualpipe_pair")
    kinds = {exchange.names[name] for name in exchange.collectives["name"]}
    assert kinds == {"dispatch", "combine", "barrier"}


@pytest.mark.filterwarnings("ignore::Warning")  # those of its own code
def test_holistic_trace_analysis_says_so_itself(tmp_path):
    hta = pytest.importorskip(
        "hta.trace_analysis", reason="HolisticTraceAnalysis is not installed (extra trace-check)"
    )
    path = tmp_path / "t.json.gz"
    path.write_bytes(path_of("a100_128ranks_rank0").read_bytes())
    peer = hta.TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(tmp_path))
    split = peer.get_temporal_breakdown(visualize=False).iloc[0]
    shares = [split[f"{kind}_time_pctg"] for kind in ("compute", "non_compute", "idle")]
    assert shares == pytest.approx(PEER["a100_128ranks_rank0"]["split"], abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_names_tell_what_nearly_all_kernels_do(name):
    kernels = account_of(name).kernels
    unknown = kernels["total_ns"][kernels["term"] == TERM_ID["other_kernels"]].sum()
    print(f"{name}: {100 * unknown / kernels['total_ns'].sum():.1f} % by unknown kernels")
    assert unknown < 0.02 * kernels["total_ns"].sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_terms_of_real_steps_sum_and_nothing_is_left_over(name):
    account = account_of(name)
    lengths = account.steps["end_ns"] - account.steps["start_ns"]
    assert (account.terms_ns.sum(axis=1) == lengths).all()
    left = account.terms_ns[:, TERM_ID["unattributed"]] / lengths
    print(f"{name}: {100 * left.max():.2f} % unattributed")
    assert left.max() < 0.05
    # The gaps are the time in which the device idled, whoever claims it. (An engine's may idle
    # where the host wasn't recorded, which no gap can tell of.)
    if account.term_s("idle"):
        return
    computing = account.terms_ns[:, : TERM_ID["checkpoint_stall"]].sum()
    assert account.gaps["duration_ns"].sum() == lengths.sum() - computing


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("a100_128ranks_rank1", [551, 552]),
        ("a100_2ranks_rank0", [4, 5, 6]),
        ("a100_alexnet", [0]),
        ("h800_dualpipe_pair", [1]),
        ("resnet50_loader_2021", [5, 6, 7, 8, 9, 10]),
    ],
)
def test_the_steps_are_those_that_were_marked(name, steps):
    timeline = trace(name)
    (rank,) = timeline.ranks
    assert sorted(accounting_ns(timeline)[rank]) == steps


def test_the_dualpipe_pair_is_busy_and_its_exchange_hidden():
    account = accounting(trace("h800_dualpipe_pair"))[0][1]
    whole = sum(account.values())
    assert account["matmul"] > 0.5 * whole
    assert account["attention"] > 0.1 * whole
    assert account["exposed_comm.ep"] < 0.05 * whole  # 112 ms of exchange, 4 ms of it exposed


def test_collectives_of_ddp_are_found_by_the_operator_that_started_them():
    # This NCCL names every kernel SendRecv: only the launching operator tells them apart.
    timeline = trace("a100_128ranks_rank0")
    reduced = timeline.spans[timeline.spans["term"] == TERM_ID["exposed_comm.dp"]]
    assert len(reduced) > 0
    assert set(reduced["layer"]) == {COMM}
    assert (timeline.spans["layer"] == PROCESSOR).sum() > 1000
    account = account_of("a100_128ranks_rank0")
    found = {account.names[row["name"]] for row in account.collectives}
    assert found == {"all_to_all", "all_reduce", "all_gather"}


def test_what_is_known_of_a_collective():
    account = account_of("a100_2ranks_rank0")
    assert account.step_s() == pytest.approx(0.2224, rel=1e-3)
    found = account.collectives
    assert set(found["axis"]) == {0}
    rows = found[found["name"] == account.names.index("all_reduce")]
    assert len(rows) == 15  # 5 buckets in each of 3 steps; the others are of DDP's buffers
    assert {account.names[row["group"]] for row in rows} == {"default_pg"}
    assert {account.names[row["members"]] for row in rows} == {"[0, 1]"}
    assert set(rows["group_size"]) == {2}
    assert set(rows["micro_batch"]) == {1}
    # ResNet-50's 25.6 million gradients in fp32, each step.
    assert rows["bytes"].sum() == 3 * 4 * 25_557_032
    assert (rows["exposed_ns"] <= rows["duration_ns"]).all()
    exposed = account.collectives["exposed_ns"].sum() / 3e9
    assert exposed >= account.term_s("exposed_comm") > 0.8 * exposed


def test_kernels_are_summed_by_the_operators_that_launched_them():
    account = account_of("a100_2ranks_rank0")
    by_operator = {}
    for row in account.kernels:
        key = account.names[row["op"]], TERMS[row["term"]]
        by_operator[key] = by_operator.get(key, 0) + int(row["total_ns"])
    heaviest = sorted(by_operator, key=by_operator.__getitem__)[-3:]
    assert ("record_param_comms", "exposed_comm.dp") in heaviest
    assert ("aten::convolution_backward", "matmul") in heaviest
    per_rank = account.kernels["count"].sum()
    assert per_rank == pytest.approx(2700 + 960 + 114, rel=0.02)


def test_the_results_of_the_benchmark_have_the_same_figures():
    for path in sorted((ROOT / "benchmarks/results").glob("*/explain_speed.json")):
        for name, found in json.loads(path.read_text())["traces"].items():
            if name in PEER:
                figures = found["peer"]["figures"]
                split = [figures[kind] for kind in ("compute", "non_compute", "idle")]
                assert split == pytest.approx(PEER[name]["split"], abs=0.01)
