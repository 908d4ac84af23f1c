"""Rules about devices, links across nodes, memory and the machine, on hand-built Accounts. Pure."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.job import Job
from paceline.explain.changes import changed_job
from paceline.explain.finding import Finding
from paceline.explain.rules import RESIDUALS, RULES
from paceline.explain.subject import Subject
from paceline.explain.what_if import predicted
from paceline.observe.tables.gaps import BETWEEN_KERNELS
from tests.explain.accounts import account, job, line, subject
from tests.plan.planned import cluster, tiers

DEVICE = {"matmul": 50.0, "other_kernels": 40.0, "host_gap": 10.0}


def found(name: str, of: Subject) -> Finding:
    finding = RULES[name](of)
    assert finding is not None
    if finding.changes:
        assert of.job is not None
        assert changed_job(of.job, finding.changes) is not None
    return finding


def kernel(name: str, term: str, total_ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "op": "aten::x", "term": term, "total_ms": total_ms, **more}


def on_device(terms: dict[str, float] = DEVICE, **tables: Any) -> Subject:
    return subject(account([terms], is_device=True, **tables))


# ---- kernels -------------------------------------------------------------------------------------


def test_elementwise_kernels_count_and_copies_of_batches_don_t() -> None:
    plain = kernel("vectorized_elementwise_kernel<4, silu>", "other_kernels", 30)
    copy = kernel("Memcpy HtoD (Pinned -> Device)", "other_kernels", 10)
    both = on_device(kernels=[plain, copy])
    assert found("unfused-elementwise", both).gain_s == pytest.approx(0.015)
    assert RULES["unfused-elementwise"](on_device(kernels=[copy])) is None


def test_attention_of_separate_kernels_is_slow_and_a_fused_one_isn_t() -> None:
    softmax = kernel("softmax_warp_forward", "attention", 10)
    flash = kernel("flash_fwd_kernel", "attention", 10)
    products = {**kernel("gemm", "matmul", 10, count=2), "op": "aten::bmm"}
    plain = on_device(kernels=[softmax, products])
    assert found("slow-attention", plain).gain_s == pytest.approx(0.006)
    assert RULES["slow-attention"](on_device(kernels=[softmax, products, flash])) is None


def test_a_device_that_waits_for_short_kernels() -> None:
    idle = {"matmul": 20.0, "host_gap": 80.0}
    short = kernel("elementwise", "other_kernels", 5, count=2000)
    long = kernel("gemm", "matmul", 15, count=10)
    made = account([idle], kernels=[short, long], is_device=True)
    assert found("small-kernels", subject(made)).gain_s > 0.03
    busy = account([DEVICE], kernels=[long], is_device=True)
    assert RULES["small-kernels"](subject(busy)) is None


def test_small_micro_batches_gain_at_most_what_the_host_was_seen_to_take() -> None:
    work = {"matmul": 60.0, "host_gap": 40.0}
    of = job(2, micro_batch=1)
    finding = found("small-kernels", subject(account([work, work]), of))
    assert finding.changes == ("layout.micro_batch=8",)  # of 128 tokens: 1024 fill a core
    assert finding.gain_s == pytest.approx(0.040 * (1 - 2 / 16))
    assert RULES["small-kernels"](subject(account([work, work]), job(2, micro_batch=8))) is None


def test_the_planner_s_gain_of_a_larger_micro_batch_is_bounded_by_what_was_seen() -> None:
    of = job(8, cluster=cluster(nodes=1), batch=64, micro_batch=1)
    work = {"matmul": 95.0, "host_gap": 1.0}
    made = account([work] * 8, is_device=True)
    assert 0 < found("small-kernels", subject(made, of)).gain_s <= 3 * 0.001


def test_ranks_that_wait_longer_than_one_would_take_alone() -> None:
    sent = {"name": "all_reduce", "axis": "dp", "bytes": 1 << 20, "members": "[0, 1]"}
    both = [{**sent, "duration_ms": 20}]
    waits = {"matmul": 20.0, "exposed_comm.dp": 80.0}
    made = account([waits, waits], collectives=both)
    assert found("model-too-small", subject(made)).gain_s == pytest.approx(0.06)
    fine = {"matmul": 80.0, "exposed_comm.dp": 20.0}
    assert RULES["model-too-small"](subject(account([fine, fine], collectives=both))) is None


def test_products_slower_than_the_rest_are_left_over_after_named_causes() -> None:
    of = job(8, cluster=cluster(nodes=1), batch=64)
    plan = predicted(of)
    assert plan is not None
    own = {term: seconds * 1e3 for term, seconds in plan.time_s.items()}
    rule = RESIDUALS["slow-kernels"]

    def of_terms(**more: float) -> Subject:
        return subject(account([{**own, **more}] * 8, is_device=True), of)

    products_s = plan.time_s["matmul"] + plan.time_s["attention"]
    slow = of_terms(matmul=own["matmul"] * 3, attention=own["attention"] * 3)
    finding = rule(slow, 0.0)
    assert finding is not None
    assert finding.gain_s == pytest.approx(products_s * 2, rel=0.02)
    assert rule(slow, products_s * 2.1) is None  # all of it has another cause
    everything = {term: ms * 3 for term, ms in own.items()}
    assert rule(of_terms(**everything), 0.0) is None  # a machine that is slower in everything


# ---- memory --------------------------------------------------------------------------------------


def test_shards_that_memory_doesn_t_need() -> None:
    gather = {"name": "all_gather", "axis": "fsdp", "bytes": 1 << 22, "duration_ms": 40}
    waits = {**DEVICE, "exposed_comm.fsdp": 60.0}
    made = account([waits, waits], collectives=[gather])
    finding = found("sharding-not-needed", subject(made, job(2, dp=1, fsdp=2, zero=3)))
    assert finding.changes == ("layout.dp=2", "layout.fsdp=1", "layout.zero=0")
    assert finding.gain_s == pytest.approx(0.02)  # an all-reduce carries two thirds of 60 ms


def test_what_the_hooks_of_shards_take_of_the_host_is_saved_too() -> None:
    hook = {"name": "FSDP::all_gather (blocks.3)", "duration_ms": 12}
    waits = {**DEVICE, "exposed_comm.fsdp": 60.0}
    of = subject(account([waits, waits], gaps=[hook]), job(2, dp=1, fsdp=2, zero=3))
    assert found("sharding-not-needed", of).gain_s == pytest.approx(0.032)


def test_shards_keep_more_cores_from_computing_than_replicas() -> None:
    waits = {**DEVICE, "exposed_comm.fsdp": 60.0}
    gather = {"name": "all_gather", "axis": "fsdp", "bytes": 1 << 20, "duration_ms": 40}
    made = account([waits, waits], collectives=[gather])

    def gain_s(zero: int, core_wait_s: float) -> float:
        lines = [line(step, 120, ranks={"core_wait_s": [core_wait_s] * 2}) for step in range(9)]
        facts = {"num_cores": 2, "num_ranks": 2}
        of = subject(made, job(2, dp=1, fsdp=2, zero=zero), lines=lines, facts=facts)
        return found("sharding-not-needed", of).gain_s

    # Of three times the parameters that travel, two go on travelling.
    assert gain_s(3, 0.009) - gain_s(3, 0.0) == pytest.approx(0.003)
    assert gain_s(2, 0.009) == gain_s(2, 0.0)


def test_shards_on_devices_whose_speed_is_known_are_the_planner_s_to_judge() -> None:
    """Eight H100, whose replicas would expose next to nothing of their gradients."""
    of = job(8, cluster=cluster(nodes=1), batch=256, dp=1, fsdp=8, zero=3)
    waits = {**DEVICE, "exposed_comm.fsdp": 60.0}
    made = account([waits] * 8, is_device=True)
    assert 0.02 < found("sharding-not-needed", subject(made, of)).gain_s < 0.06


def test_asking_the_driver_for_memory_within_steps() -> None:
    gaps = [{"name": "cudaMalloc", "duration_ms": 3, "times": 2}]
    kept = [{"name": "cudaMallocAsync", "duration_ms": 3}]
    assert found("allocator-retries", on_device(gaps=gaps)).gain_s == pytest.approx(0.006)
    assert RULES["allocator-retries"](on_device(gaps=kept)) is None


# ---- the host ------------------------------------------------------------------------------------


def test_what_happens_once_is_not_the_host_s_fault() -> None:
    waits = {"matmul": 20.0, "host_gap": 80.0}
    loading = {"name": "cuModuleLoadData", "duration_ms": 280, "step": 10}
    late, queued = ({"name": name, "duration_ms": 10} for name in ("aten::mm", BETWEEN_KERNELS))
    of = on_device(waits, gaps=[loading, late, queued])
    assert found("warm-up-recorded", of).gain_s == pytest.approx(0.07)
    assert found("host-bound", of).gain_s == pytest.approx(0.01)


def test_compiling_again_within_steps() -> None:
    gap = {"name": "_compile.compile_inner (dynamo_timed)", "duration_ms": 9}
    assert found("recompilation", on_device(gaps=[gap])).gain_s == pytest.approx(0.009)


def test_copies_from_pageable_memory_hold_the_device_up() -> None:
    copy = kernel("Memcpy HtoD (Pageable -> Device)", "other_kernels", 4, count=2)
    assert found("pageable-copies", on_device(kernels=[copy])).gain_s == pytest.approx(0.004)


def test_more_threads_than_cores() -> None:
    facts = {"num_cores": 2, "threads_per_rank": 4, "num_ranks": 2}
    work = account([DEVICE, DEVICE])
    assert found("thread-oversubscription", subject(work, job(2), facts=facts)).gain > 0
    fair = {**facts, "num_cores": 8}
    assert RULES["thread-oversubscription"](subject(work, job(2), facts=fair)) is None


def test_what_all_ranks_wait_for_a_core_is_told_but_not_what_one_waits_alone() -> None:
    facts = {"num_cores": 2, "threads_per_rank": 1, "num_ranks": 2}

    def waiting(first_s: float, second_s: float, **more: int) -> Finding | None:
        lines = [line(step, 100, ranks={"core_wait_s": [first_s, second_s]}) for step in range(9)]
        each = subject(None, job(2), facts={**facts, **more}, lines=lines)
        return RULES["cores-taken"](each)

    both = waiting(0.04, 0.05)
    assert both is not None
    assert both.gain_s == pytest.approx(0.034)
    assert "Rank 1" in both.evidence[0].sentence
    assert waiting(0.011, 0.06) is None
    assert waiting(0.04, 0.05, threads_per_rank=2) is None  # they wait for each other


def test_settings_for_finding_errors() -> None:
    facts = {"checking": ["CUDA_LAUNCH_BLOCKING=1", "python -X dev"]}
    told = found("checking-left-on", subject(None, job(2), facts=facts, step_ms=1e5))
    assert "CUDA_LAUNCH_BLOCKING=1, python -X dev" in told.title
    assert told.gain > 0
    assert RULES["checking-left-on"](subject(None, job(2), step_ms=1e5)) is None


def test_ranks_bound_to_one_core_of_many_are_told_from_a_small_host() -> None:
    work = account([{"matmul": 100.0}] * 2)
    bound = {"num_cores": 1, "num_cores_of_host": 16, "num_ranks": 2, "threads_per_rank": 1}
    assert found("crowded-cores", subject(work, job(2), facts=bound)).gain == pytest.approx(0.5)
    small = {**bound, "num_cores_of_host": 1}
    assert RULES["crowded-cores"](subject(work, job(2), facts=small)) is None
    apart = {**bound, "num_cores": 2}
    assert RULES["crowded-cores"](subject(work, job(2), facts=apart)) is None


# ---- links ---------------------------------------------------------------------------------------

GRADIENTS = {"name": "all_reduce", "axis": "dp", "bytes": 4 << 20, "times": 8, "micro_batch": 1}
WAITS = {"matmul": 60.0, "exposed_comm.dp": 40.0}


def test_a_slow_link_that_is_as_it_was_measured_asks_for_compression() -> None:
    """Eight nodes of one device on 100 Mbit/s, whose curve says so."""
    slow = cluster(nodes=1).replace(devices_per_node=1, num_nodes=2, tiers=tiers(1e11, 1.2e7)[1:])
    slow = slow.replace(tiers=(slow.tiers[0].replace(num_devices=2),))
    of = job(2, cluster=slow, batch=64)
    each = {**GRADIENTS, "group_size": 2, "duration_ms": 380, "exposed_ms": 370}
    small = {"name": "all_reduce", "axis": "dp", "bytes": 8, "duration_ms": 0.1, "times": 2}
    waits = {"matmul": 60.0, "exposed_comm.dp": 3000.0}
    of_it = subject(account([waits, waits], collectives=[each, small], is_device=True), of)
    assert RULES["slow-link"](of_it) is None
    finding = found("compression-missing", of_it)
    assert finding.changes == ("comm.dp.compress=int8",)
    assert 0.5 < finding.gain < 0.8


def test_compression_gains_at_most_the_bytes_that_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing says what coding takes, on a link of 10 MB/s that is no slower than known."""
    monkeypatch.setattr("paceline.explain.rules.links.slow_flow", lambda _subject: None)
    each = {**GRADIENTS, "group_size": 2, "duration_ms": 400, "exposed_ms": 5}
    of = subject(account([WAITS, WAITS], collectives=[each]), job(2))
    assert found("compression-missing", of).gain_s == pytest.approx(8 * 0.005 * 0.74)


def test_compression_is_not_offered_where_nothing_is_known_of_bytes() -> None:
    unknown = {**GRADIENTS, "bytes": -1, "group_size": 2, "duration_ms": 5}
    made = account([WAITS, WAITS], collectives=[unknown])
    assert RULES["compression-missing"](subject(made, job(2))) is None


def test_tensor_parallel_groups_belong_inside_a_node() -> None:
    two = cluster(nodes=1).replace(devices_per_node=1, num_nodes=2, tiers=tiers(1e11, 6e7)[1:])
    two = two.replace(tiers=(two.tiers[0].replace(num_devices=2),))
    of = job(2, cluster=two, batch=64, dp=1, tp=2)
    waits = {"matmul": 60.0, "exposed_comm.tp": 400.0}
    finding = found("tp-across-nodes", subject(account([waits, waits]), of))
    assert "layout.tp=1" in finding.changes
    inside = of.replace(cluster=two.replace(devices_per_node=2, num_nodes=1))
    assert RULES["tp-across-nodes"](subject(account([waits, waits]), inside)) is None


def test_nccl_s_own_log_tells_the_wrong_fabric(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    log = tmp_path / "log" / "rank0.log"
    log.write_text("NCCL INFO NET/IB : No device found\nChannel 00 : 0 -> 8 via NET/Socket/0\n")
    each = {**GRADIENTS, "group_size": 2, "duration_ms": 50}
    made = subject(account([WAITS, WAITS], collectives=[each]), folder=tmp_path)
    assert RULES["wrong-fabric"](made) is None  # sockets are all there is
    assert RULES["slow-link"](made) is not None
    log.write_text("NCCL INFO NET/Socket : mlx5_0 is there\nChannel 00 : 0 -> 8 via NET/Socket/0\n")
    seen = subject(account([WAITS, WAITS], collectives=[each]), folder=tmp_path)
    assert found("wrong-fabric", seen).gain_s > 0
    assert RULES["slow-link"](seen) is None  # the cause is named, not the symptom


# ---- pipelines and the machine -------------------------------------------------------------------


def test_gathering_for_each_micro_batch_of_a_pipeline() -> None:
    gather = {"name": "all_gather", "axis": "fsdp", "bytes": 1 << 22, "duration_ms": 5}
    hop = {"name": "send", "axis": "pp", "bytes": 1 << 20, "duration_ms": 0}
    gathers = [{**gather, "micro_batch": at} for at in range(4)]
    made = account([DEVICE], collectives=[*gathers, hop], is_device=True)
    assert found("regather-in-pipeline", subject(made)).gain_s == pytest.approx(0.015)


def test_a_device_that_is_too_hot_by_what_the_doctor_kept(tmp_path: Path) -> None:
    clocks = {"reasons": ["hw_thermal_slowdown"], "sm_mhz": 1485, "max_sm_mhz": 1980}
    cool = {"reasons": [], "sm_mhz": 1980, "max_sm_mhz": 1980}
    gpus = [{"clocks": clocks}, {"clocks": cool}]
    (tmp_path / "doctor.json").write_text(json.dumps({"facts": {"gpus": gpus}}))
    of = subject(account([DEVICE]), folder=tmp_path)
    assert found("clock-throttling", of).gain_s == pytest.approx(0.0125)


def test_an_unknown_peak_is_told_and_gains_nothing() -> None:
    assert found("peak-missing", subject(None, job(2), step_ms=100)).gain == 0.0
    known = subject(None, job(2), step_ms=100, facts={"peak_flops": 1e12})
    assert RULES["peak-missing"](known) is None


def test_a_slow_stage_is_a_slow_rank_only_beyond_what_its_layers_take() -> None:
    def pipeline(*busy_ms: float) -> tuple[Subject, Job]:
        most = max(busy_ms)
        ranks = [{"matmul": ms, "bubble": most - ms + 20} for ms in busy_ms]
        of = job(2, dp=1, pp=2, schedule="1f1b", micro_batch=2, split=(4, 4))
        return subject(account(ranks), of), of

    assert RULES["straggler-rank"](pipeline(100, 120)[0]) is None
    assert found("straggler-rank", pipeline(200, 100)[0]).gain_s > 0.05


def test_lines_with_something_between_steps_don_t_make_a_rank_slow() -> None:
    ranks = {"busy_s": [0.16, 0.1]}
    late = [line(at, 100, between_s=0.06, ranks=ranks) for at in range(1, 21)]
    assert RULES["straggler-rank"](subject(None, job(2), lines=late)) is None
