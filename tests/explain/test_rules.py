"""Rules on hand-built Accounts: what each sees, what it estimates, when it is silent. Pure."""

from typing import Any

import pytest

from paceline.config.job import Job
from paceline.config.layers import Experts
from paceline.config.stack import Stack
from paceline.explain.changes import changed_job
from paceline.explain.finding import Evidence, Finding
from paceline.explain.rules import RESIDUALS, RULES, findings
from paceline.explain.subject import Subject
from tests.explain.accounts import H100, MODEL, account, job, line, subject
from tests.plan.planned import cluster

WORK = {"matmul": 60.0, "other_kernels": 20.0, "optimizer": 10.0, "host_gap": 5.0}


def found(name: str, of: Subject) -> Finding | None:
    return RULES[name](of)


def the(name: str, of: Subject) -> Finding:
    """The finding of a rule, which must be the first of all, and whose changes must run."""
    first = findings(of)[0]
    assert first.name == name
    if first.changes:
        assert of.job is not None
        assert changed_job(of.job, first.changes) is not None
    return first


def lines(step_ms: float, num: int = 20, **more: Any) -> list[dict[str, Any]]:
    return [line(step, step_ms, **more) for step in range(1, num + 1)]


# ---- uneven ranks --------------------------------------------------------------------------------


def test_a_rank_that_takes_longer_is_named_with_what_it_takes_longer_for() -> None:
    slow = {**WORK, "host_gap": 25.0}
    fast = {**WORK, "straggler_wait": 20.0}
    first = the("straggler-rank", subject(account([fast, fast, slow, fast]), job(4)))
    assert first.gain_s == pytest.approx(0.020)
    assert "Rank 2" in first.title
    assert "host_gap" in first.evidence[1].sentence


def test_a_slow_rank_costs_at_most_what_the_others_wait_for_it() -> None:
    slow = {**WORK, "host_gap": 65.0}
    of = subject(account([slow, {**WORK, "straggler_wait": 20.0}]), job(2))
    assert the("straggler-rank", of).gain_s == pytest.approx(0.020)


def test_the_lag_that_lines_tell_counts_where_no_step_was_profiled() -> None:
    told = [line(step, 120, ranks={"busy_s": [0.09, 0.12]}) for step in range(1, 21)]
    first = the("straggler-rank", subject(None, job(2), lines=told))
    assert first.gain_s == pytest.approx(0.030)
    assert "Rank 1" in first.title


def test_a_slow_loader_of_one_rank_is_no_slow_rank() -> None:
    slow = {**WORK, "data_wait": 30.0}
    fast = {**WORK, "straggler_wait": 30.0}
    both = subject(account([slow, fast]), job(2))
    assert the("loader-bound", both).gain_s == pytest.approx(0.030)
    assert "on rank 0" in the("loader-bound", both).title
    assert found("straggler-rank", both) is None


def test_a_wait_that_another_rank_hides_gains_nothing() -> None:
    late = {**WORK, "matmul": 100.0}
    waits = {**WORK, "data_wait": 30.0, "straggler_wait": 10.0}
    assert found("loader-bound", subject(account([late, waits]), job(2))) is None


def test_ranks_that_take_turns_in_being_late_have_uneven_lengths() -> None:
    long = {**WORK, "matmul": 90.0}
    short = {**WORK, "straggler_wait": 30.0}
    swapping = account([[long, short, long, short], [short, long, short, long]])
    first = the("length-imbalance", subject(swapping, job(2)))
    assert first.gain_s == pytest.approx(0.015)  # the mean of both is what even lengths take


def test_jitter_that_lengthens_the_optimizer_as_well_is_no_uneven_work() -> None:
    late = {term: ms * 1.3 for term, ms in WORK.items()}
    early = {**WORK, "straggler_wait": 28.5}
    swapping = account([[late, early, late, early], [early, late, early, late]])
    assert found("length-imbalance", subject(swapping, job(2))) is None
    assert found("straggler-rank", subject(swapping, job(2))) is None


def test_a_rank_that_is_late_in_half_of_the_steps_is_not_slow() -> None:
    late, early = {term: ms * 1.4 for term, ms in WORK.items()}, {**WORK, "straggler_wait": 38.0}
    half = account([[late, late, WORK, WORK], [early, early, WORK, WORK]])
    assert found("straggler-rank", subject(half, job(2))) is None


def test_with_experts_it_is_their_load_and_the_change_evens_it_out() -> None:
    experts = Experts(num_experts=8, experts_per_token=2, ffn_size=384)
    of = job(2, model=MODEL.replace(experts=experts), ep=2)
    busy = {**WORK, "matmul": 100.0}
    idle = {**WORK, "straggler_wait": 40.0}
    tokens = {"name": "all_to_all", "axis": "ep", "duration_ms": 0}
    sent = [{**tokens, "rank": 0, "bytes": 3_000_000}, {**tokens, "rank": 1, "bytes": 2_000_000}]
    first = the("expert-imbalance", subject(account([busy, idle], collectives=sent), of))
    assert first.gain_s == pytest.approx(0.020)
    assert first.changes == ("layout.rebalance_every=20",)


def test_an_even_load_of_experts_leaves_a_slow_rank_what_it_is() -> None:
    experts = Experts(num_experts=8, experts_per_token=2, ffn_size=384)
    of = job(2, model=MODEL.replace(experts=experts), ep=2)
    even = {"name": "all_to_all", "axis": "ep", "duration_ms": 0, "bytes": 2_000_000}
    busy, idle = {**WORK, "matmul": 100.0}, {**WORK, "straggler_wait": 40.0}
    made = account([busy, idle], collectives=[even])
    assert the("straggler-rank", subject(made, of)).gain_s == pytest.approx(0.040)


# ---- stalls --------------------------------------------------------------------------------------


def test_checkpoints_cost_their_mean_over_all_steps() -> None:
    stalled = lines(100)
    for each in stalled[::2]:
        each["terms"]["checkpoint_stall"] = 0.04
        each["step_time_s"] += 0.04
    of = job(2)
    of = of.replace(checkpoint=of.checkpoint.replace(every=2))
    first = the("checkpoint-stall", subject(None, of, lines=stalled))
    assert first.gain_s == pytest.approx(0.020, rel=0.12)
    assert first.gain == pytest.approx(0.020 / 0.120, rel=0.12)
    assert first.changes[0].startswith("checkpoint.every=")


def test_writing_checkpoints_costs_ranks_that_compute_on_every_core() -> None:
    writing = lines(100, checkpoint_cpu_s=0.01, terms={"checkpoint_stall": 0.02})
    for num_cores, wanted in ((2, 0.030), (3, 0.020)):
        facts = {"num_cores": num_cores, "num_ranks": 2}
        made = subject(None, job(2), lines=writing, facts=facts)
        assert the("checkpoint-stall", made).gain_s == pytest.approx(wanted, rel=0.02)


def test_writing_that_is_told_beside_a_window_counts() -> None:
    told = lines(100, num=43, checkpoint_cpu_s=0.0, terms={"checkpoint_stall": 0.02})
    for one, after in zip(told[3::4], told[4::4], strict=True):
        one["profiled"], after["checkpoint_cpu_s"] = True, 0.04
    of = subject(None, job(2), lines=told, facts={"num_cores": 2, "num_ranks": 2})
    assert the("checkpoint-stall", of).gain_s == pytest.approx(0.030, rel=0.02)


def test_what_was_measured_stands_before_what_was_predicted_to_gain_as_much() -> None:
    of = subject(None, job(2), step_ms=100)
    told = (Evidence("host", "Seen."), Evidence("clock", "And timed."))
    sure, guess = (
        Finding.of(of, "", gain_s, told, basis=basis)
        for gain_s, basis in ((0.010, "measured"), (0.012, "predicted"))
    )
    assert sure.weight > guess.weight
    assert sure.gain < guess.gain


def test_garbage_collection_is_what_the_slowest_rank_loses() -> None:
    gap = {"name": "paceline.gc", "duration_ms": 12}
    slow, fast = {**WORK, "host_gap": 17.0}, {**WORK, "straggler_wait": 12.0}
    of = subject(account([slow, fast], gaps=[{**gap, "rank": 0}]), job(2))
    assert the("garbage-collection", of).gain_s == pytest.approx(0.012)


def test_evaluations_are_to_come_less_often() -> None:
    of = job(2)
    of = of.replace(train=of.train.replace(eval_every=1))
    told = lines(100, eval_s=0.05, between_s=0.05)
    first = the("evaluation-stall", subject(None, of, lines=told))
    assert first.gain_s == pytest.approx(0.05, rel=0.05)
    assert changed_job(of, first.changes).train.eval_every > 20  # type: ignore[union-attr]


def test_what_passes_between_steps_is_a_finding() -> None:
    first = the("logging-stall", subject(None, job(2), lines=lines(100, between_s=0.04)))
    assert first.gain_s == pytest.approx(0.04)
    assert first.gain == pytest.approx(0.04 / 0.14)


# ---- exchanging gradients ------------------------------------------------------------------------

BUCKET = {"name": "all_reduce", "axis": "dp", "group_size": 2}
DP = {**WORK, "exposed_comm.dp": 40.0}


def test_an_all_reduce_in_each_micro_batch_costs_all_but_one_of_them() -> None:
    each = [{**BUCKET, "bytes": 8 << 20, "duration_ms": 10, "micro_batch": i} for i in range(1, 5)]
    of = subject(account([DP, DP], collectives=each), facts={"num_cores": 64})
    assert the("reduce-every-micro-batch", of).gain_s == pytest.approx(0.030)


def test_one_all_reduce_a_step_is_as_it_should_be() -> None:
    last = [{**BUCKET, "bytes": 8 << 20, "duration_ms": 10, "micro_batch": 4, "times": 4}]
    assert found("reduce-every-micro-batch", subject(account([DP, DP], collectives=last))) is None


def test_hidden_exchanges_of_a_cpu_cost_the_processor_s_time() -> None:
    each = [
        {**BUCKET, "bytes": 9_000_000, "duration_ms": 40, "exposed_ms": 0, "micro_batch": i}
        for i in range(1, 3)
    ]
    crowded = subject(
        account([WORK, WORK], collectives=each), facts={"num_cores": 2, "num_ranks": 2}
    )
    roomy = subject(account([WORK, WORK], collectives=each), facts={"num_cores": 8, "num_ranks": 2})
    finding = found("reduce-every-micro-batch", crowded)
    assert finding is not None
    assert finding.gain_s == pytest.approx(0.010)  # 18 MB over 0.9 GB/s, one of two
    assert found("reduce-every-micro-batch", roomy) is None


def test_tiny_buckets_cost_their_latency() -> None:
    tiny = {**BUCKET, "bytes": 10_000, "duration_ms": 0.5, "times": 80, "micro_batch": 1}
    number = {**BUCKET, "bytes": 24, "duration_ms": 0.45}
    of = subject(account([DP, DP], collectives=[tiny, number]), job(2))
    first = the("buckets-too-small", of)
    assert first.gain_s == pytest.approx(72 * 0.00045, rel=0.15)
    assert float(first.changes[0].partition("=")[2]) > 0.09


def test_tiny_buckets_cost_the_cores_that_their_threads_take() -> None:
    tiny = {**BUCKET, "bytes": 10_000, "duration_ms": 0.5, "times": 80, "micro_batch": 1}
    account_ = account([DP, DP], collectives=[tiny, {**BUCKET, "bytes": 24, "duration_ms": 0.45}])

    def gain_s(num_cores: int, **ranks: Any) -> float:
        told = lines(100, ranks=ranks)
        facts = {"num_cores": num_cores, "num_ranks": 2}
        finding = found("buckets-too-small", subject(account_, job(2), lines=told, facts=facts))
        assert finding is not None
        return finding.gain_s

    unknown_s = gain_s(2)
    # 8 buckets of the 80 stay, and with them their part of the queue.
    assert gain_s(2, core_wait_s=[0.010, 0.020]) == pytest.approx(unknown_s + 0.9 * 0.015)
    # It queues for something else while nothing is exchanged: 40 ms.
    assert gain_s(2, core_wait_s=[0.080, 0.080]) == pytest.approx(unknown_s + 0.9 * 0.040)
    assert gain_s(64, core_wait_s=[0.010, 0.020]) == pytest.approx(gain_s(64))


def test_one_bucket_can_t_overlap() -> None:
    whole = {**BUCKET, "bytes": 32 << 20, "duration_ms": 40, "micro_batch": 1}
    of = subject(account([DP, DP], collectives=[whole]), job(2), facts={"num_cores": 64})
    finding = found("buckets-too-large", of)
    assert finding is not None
    # 7 of 8 parts of the backward pass of two micro-batches: 85 ms / 2 x 2/3 x 7/8.
    assert finding.gain_s == pytest.approx(0.0248, rel=0.02)


def test_buckets_that_overlap_are_left_alone() -> None:
    hidden = {**BUCKET, "bytes": 4 << 20, "duration_ms": 5, "exposed_ms": 0.2, "times": 8}
    of = subject(account([WORK, WORK], collectives=[hidden]), job(2), facts={"num_cores": 64})
    for name in ("buckets-too-small", "buckets-too-large", "no-overlap"):
        assert found(name, of) is None


def test_many_buckets_after_backward_don_t_overlap() -> None:
    late = {**BUCKET, "bytes": 4 << 20, "duration_ms": 5, "times": 8, "micro_batch": 1}
    of = subject(account([DP, DP], collectives=[late]), facts={"num_cores": 64})
    finding = found("no-overlap", of)
    assert finding is not None
    assert finding.gain_s == pytest.approx(0.035)
    assert found("buckets-too-large", of) is None


# ---- links ---------------------------------------------------------------------------------------


def test_a_link_slower_than_sockets_is_slow() -> None:
    slow = {**BUCKET, "bytes": 4_500_000, "duration_ms": 40, "micro_batch": 1}
    of = subject(account([DP, DP], collectives=[slow]), job(2), facts={"num_cores": 64})
    first = the("slow-link", of)
    assert first.gain_s == pytest.approx(0.035, rel=0.02)  # 4.5 MB at 0.9 GB/s take 5 ms
    assert "8.4 times" in first.title


def test_what_a_slow_link_costs_is_without_the_wait_for_the_last_rank() -> None:
    both = {**BUCKET, "bytes": 4_500_000, "duration_ms": 60, "wait_ms": 20, "micro_batch": 1}
    of = subject(account([DP, DP], collectives=[both]), job(2), facts={"num_cores": 64})
    finding = found("slow-link", of)
    assert finding is not None
    assert finding.gain_s == pytest.approx(0.035, rel=0.1)


def test_waiting_for_the_last_rank_is_no_slow_link() -> None:
    waited = {**BUCKET, "bytes": 4_500_000, "duration_ms": 40, "wait_ms": 34, "micro_batch": 1}
    of = subject(account([DP, DP], collectives=[waited]), job(2), facts={"num_cores": 64})
    assert found("slow-link", of) is None


# ---- pipelines -----------------------------------------------------------------------------------

PP = {"dp": 1, "pp": 2, "schedule": "1f1b", "micro_batch": 2}


def pipeline(split: tuple[int, int], **more: Any) -> Job:
    return job(2, **{**PP, "split": split, **more})


def test_uneven_stages_gain_what_the_heaviest_has_too_much() -> None:
    heavy = {"matmul": 90.0, "other_kernels": 30.0, "optimizer": 5.0}
    light = {"matmul": 30.0, "other_kernels": 10.0, "optimizer": 5.0, "bubble": 80.0}
    of = subject(account([heavy, light]), pipeline((6, 2)))
    first = the("uneven-stages", of)
    assert first.changes == ("layout.split=[4, 4]",)
    # From 6 blocks at 20 ms each to 4 and a head of a tenth of a block.
    assert first.gain_s == pytest.approx(0.038, rel=0.05)


def test_uneven_stages_gain_no_work_that_every_rank_has() -> None:
    heavy = {"matmul": 90.0, "other_kernels": 30.0, "optimizer": 5.0}
    light = {"matmul": 30.0, "other_kernels": 30.0, "optimizer": 5.0, "bubble": 60.0}
    # A block takes (125 - 65) / (6 - 2.1) ms, whatever the light rank does besides.
    found_ = the("uneven-stages", subject(account([heavy, light]), pipeline((6, 2))))
    assert found_.gain_s == pytest.approx(0.0154 * 1.9, rel=0.05)


def test_even_stages_have_no_core_to_spare_for_threads_that_send() -> None:
    known = cluster(nodes=1, kind="cpu").replace(devices_per_node=2)
    work = [{"matmul": 110.0}, {"matmul": 50.0, "bubble": 60.0}]

    def gain_s(cores: int, *core_wait_s: float) -> float:
        told = lines(110, ranks={"busy_s": [0.1, 0.05], "core_wait_s": [*core_wait_s]})
        facts = {"num_cores": cores, "num_ranks": 2}
        of = pipeline((6, 2), cluster=known)
        finding = found("uneven-stages", subject(account(work), of, lines=told, facts=facts))
        assert finding is not None
        return finding.gain_s

    # Of 75 ms each is at work then it queues for 2 of 50, less 1, in 17 passes of 16.
    assert gain_s(2, 0.0, 0.0) - gain_s(2, 0.001, 0.002) == pytest.approx(0.002 * 17 / 16)
    # However it queued, not for more than threads of its own can be the cause of.
    assert gain_s(2, 0.0, 0.0) - gain_s(2, 0.001, 0.025) == pytest.approx(0.0035 * 17 / 16)
    assert gain_s(8, 0.0, 0.0) == gain_s(8, 0.001, 0.002)


def test_few_micro_batches_leave_a_bubble() -> None:
    half = {"matmul": 60.0, "other_kernels": 20.0, "bubble": 26.0}
    of = subject(account([half, half]), pipeline((4, 4), micro_batch=16))
    finding = found("few-micro-batches", of)
    assert finding is not None
    # (2 + 1) / 2 passes become (32 + 1) / 32.
    assert finding.gain_s == pytest.approx(0.106 * (1 - (33 / 32) / 1.5), rel=0.01)
    assert finding.changes == ("layout.micro_batch=1",)


# ---- memory and arithmetic -----------------------------------------------------------------------


def test_recompute_that_memory_doesn_t_need() -> None:
    again = {**WORK, "recompute": 20.0}
    first = the("recompute-not-needed", subject(account([again, again]), job(2, recompute="full")))
    assert first.gain_s == pytest.approx(0.020 * (1 + 5 / 100))
    assert "layout.recompute=none" in first.changes


def test_choosing_what_is_kept_costs_the_forward_pass_too() -> None:
    again = account([{**WORK, "recompute": 20.0}] * 8)

    def gain_s(select_us: float, **more: Any) -> float:
        # A processor whose speed is known, whatever it is.
        on = cluster(nodes=1, kind="cpu").replace(stack=Stack(constants={"select_us": select_us}))
        of = subject(again, job(8, cluster=on, batch=64, **more))
        return the("recompute-not-needed", of).gain_s

    cheap_s, dear_s = gain_s(5, recompute="selective"), gain_s(100, recompute="selective")
    assert dear_s > 1.1 * cheap_s > 1.1 * 0.020 * (1 + 5 / 115)
    assert gain_s(5, recompute="full") == gain_s(100, recompute="full")  # keeps nothing


def test_recompute_that_memory_needs_is_kept() -> None:
    tight = job(2, recompute="full")
    device = tight.cluster.device
    small = device.replace(memory_bytes=device.memory_bytes.replace(value=5e7))  # type: ignore[union-attr]
    tight = tight.replace(cluster=tight.cluster.replace(device=small))
    again = {**WORK, "recompute": 20.0}
    assert found("recompute-not-needed", subject(account([again, again]), tight)) is None


def test_fp64_costs_half_of_the_work() -> None:
    of = subject(account([WORK, WORK]), job(2, precision="fp64", param_dtype="fp64"))
    first = the("fp32", of)
    assert first.gain_s == pytest.approx(0.045)


def test_fp32_kernels_of_a_foreign_trace_are_told_without_a_setting() -> None:
    wide = {"name": "ampere_sgemm_128x64_nn", "op": "aten::mm", "term": "matmul", "total_ms": 60}
    of = subject(account([WORK], kernels=[wide], is_device=True, device=H100))
    first = the("fp32", of)
    assert first.gain_s == pytest.approx(0.051)
    assert not first.changes
    assert first.advice


# ---- the host ------------------------------------------------------------------------------------


def test_reading_values_in_every_micro_batch_keeps_the_device_idle() -> None:
    work = {"matmul": 60.0, "host_gap": 40.0}
    gap = {"name": "aten::item", "duration_ms": 2, "times": 16, "at_ms": 5}
    sync = {"name": "cudaStreamSynchronize", "line": "train.py(12): step", "duration_ms": 4}
    of = account([work], gaps=[gap], syncs=[{**sync, "times": 16, "at_ms": 2}], is_device=True)
    finding = found("sync-points", subject(of))
    assert finding is not None
    assert finding.gain_s == pytest.approx(0.032)
    assert "train.py(12)" in finding.evidence[0].sentence


@pytest.mark.parametrize("what", [{"bytes": 8}, {"name": "barrier", "bytes": -1}])
def test_agreeing_on_numbers_costs_what_the_last_rank_loses(what: dict[str, Any]) -> None:
    number = {**BUCKET, **what, "duration_ms": 2, "times": 9}
    read = {"name": "aten::item", "duration_ms": 0.01, "times": 9}
    of = account([DP, DP], collectives=[number], syncs=[read])
    # Eight of nine: the last one agrees on loss and norm.
    finding = found("sync-points", subject(of, job(2)))
    assert finding is not None
    assert finding.gain_s == pytest.approx(0.016)


def test_long_pauses_of_all_ranks_are_the_host_s() -> None:
    late = {**WORK, "host_gap": 35.0}
    pause = {"name": "paceline.forward", "line": "train.py(3): prepare", "duration_ms": 15}
    of = subject(account([late, late], gaps=[{**pause, "times": 2}]), job(2))
    first = the("host-bound", of)
    assert first.gain_s == pytest.approx(0.030)
    assert "train.py(3)" in first.evidence[0].sentence


def test_a_pause_of_one_rank_is_that_rank_s() -> None:
    pause = {"name": "paceline.forward", "duration_ms": 15, "rank": 0}
    of = subject(account([{**WORK, "host_gap": 20.0}, WORK], gaps=[pause]), job(2))
    assert found("host-bound", of) is None


def test_a_pause_at_another_place_in_each_step_is_the_system_s() -> None:
    pauses = [{"name": f"aten::op{at}", "duration_ms": 15, "step": 10 + at} for at in range(4)]
    of = subject(account([WORK, WORK], gaps=pauses), job(2))
    assert found("host-bound", of) is None


# ---- all together --------------------------------------------------------------------------------


def test_a_healthy_run_has_no_finding_above_3_percent() -> None:
    fine = {**WORK, "exposed_comm.dp": 3.0, "data_wait": 0.2}
    hidden = {**BUCKET, "bytes": 1 << 20, "duration_ms": 2, "exposed_ms": 0.3, "times": 8}
    of = subject(
        account([fine, fine], collectives=[{**hidden, "micro_batch": 2}]),
        job(2, micro_batch=16),
        facts={"num_cores": 2, "num_ranks": 2, "threads_per_rank": 1},
        lines=lines(98, between_s=0.001),
    )
    assert [each for each in findings(of) if each.gain > 0.03] == []


def test_every_rule_is_silent_where_nothing_is_known() -> None:
    empty = subject(account([WORK]))
    for name, rule in RULES.items():
        assert rule(empty) is None, name
    for name, rest in RESIDUALS.items():
        assert rest(empty, 0.0) is None, name


def test_findings_are_sorted_by_gain() -> None:
    slow = {**WORK, "data_wait": 30.0, "recompute": 10.0}
    told = findings(subject(account([slow, slow]), job(2, recompute="full")))
    assert [each.name for each in told[:2]] == ["loader-bound", "recompute-not-needed"]
