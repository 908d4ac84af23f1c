"""How replicas exchange gradients, as the planner prices and chooses it: pure."""

import numpy as np
import pytest

from paceline.comm.compress.codecs import codec_of
from paceline.config.comm import Comm, DpComm, LocalUpdates, codec, coded_bits
from paceline.config.curves import (
    AttentionCurve,
    CodecCurve,
    DeviceCurves,
    MatmulCurve,
    MemoryCurve,
)
from paceline.config.device import Device
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, Tier
from paceline.config.job import Job, JobOnCluster, read_job
from paceline.plan.answer.find import answer
from paceline.plan.points import Setting
from paceline.plan.price.compress import codec_s
from paceline.plan.price.step import predict
from paceline.plan.search.choose import plan_job
from paceline.plan.search.gradient_comm import AFTER_WARM_UP, FORMS, named_forms

VALUES = 20_000_000


def _figure(value: float) -> Figure:
    return Figure(value=value, origin="assumed", source="this test")


def _core(**changes) -> Device:
    """A core of 54 GFLOP/s and 10 GB/s."""
    curves = DeviceCurves(
        matmul={"fp32": MatmulCurve(m=(1,), n=(1,), k=(1,), share=(0.9,), source="this test")},
        attention={
            "flash": AttentionCurve(
                seq_len=(128,), head_dim=(64,), forward=(0.5,), backward=(0.4,), source="this test"
            )
        },
        memory=MemoryCurve(bytes=(1e3, 1e9), seconds=(1e-7, 0.1), source="this test"),
    )
    facts = {
        "name": "core", "kind": "cpu", "memory_bytes": _figure(8e9), "precisions": ("fp32",),
        "peak_flops": {"fp32": _figure(60e9)}, "curves": curves,
    }  # fmt: skip
    return Device(**{**facts, **changes})


def _job(mbit: float, *settings: str, hosts: int = 2, device: Device | None = None) -> JobOnCluster:
    """14.6 M parameters, 1,024 tokens a host and step, over links of so many Mbit/s."""
    link = Tier(
        name="network",
        num_devices=hosts,
        latency_s=_figure(3e-4),
        bytes_per_s=_figure(mbit * 1e6 / 8),
    )
    cluster = Cluster(device=device or _core(), devices_per_node=1, num_nodes=hosts, tiers=(link,))
    given = read_job(
        None,
        [
            *("model.hidden_size=384", "model.num_layers=8", "model.ffn_size=1024"),
            *(f"train.global_batch={8 * hosts}", "train.seq_len=128", "layout.micro_batch=8"),
            *(f"layout.dp={hosts}", *settings),
        ],
    )
    return given.on(cluster)


def _plan(mbit: float, *settings: str, **constraints):
    job = _job(mbit, *settings, **constraints)
    return plan_job(job, job.cluster)


def _step_s(job: Job, **comm) -> float:
    """Of the job's plan, exchanged otherwise."""
    plan = plan_job(job, job.cluster).job
    return predict(Setting.of(plan.replace(comm=Comm(**comm))), plan.layout).step_s


@pytest.mark.parametrize(
    "text", ["fp16", "bf16", "int8", "fp8", "int4", "quinary", "onebit", "topk:0.01", "topk:0.0001"]
)
def test_the_planner_counts_the_bytes_that_codecs_write(text):
    written = codec_of(codec(text)).num_bytes(VALUES)
    assert coded_bits(codec(text)) / 8 * VALUES == pytest.approx(written, rel=0.002)


LONG = "train.steps=1000"


@pytest.mark.parametrize(("mbit", "expected"), [(30, "quinary"), (200, "int4"), (1e5, "none")])
def test_auto_flips_with_the_link(mbit, expected):
    plan = _plan(mbit, "comm.dp.compress=auto", LONG)
    assert plan.job.comm.dp.compress == expected
    assert "a step takes" in plan.reasons["comm.dp.compress"]
    assert isinstance(plan.job, Job)


@pytest.mark.parametrize("asked", [0, 50])
def test_auto_begins_exactly_before_it_sends_few_bits(asked):
    plan = _plan(50, "comm.dp.compress=auto", f"comm.warmup_steps={asked}", LONG)
    assert plan.job.comm.dp.compress in AFTER_WARM_UP
    assert plan.job.comm.warmup_steps == max(asked, 30)
    assert f"after {max(asked, 30)} exact steps" in plan.reasons["comm.dp.compress"]


def test_auto_begins_nothing_exactly_that_needs_no_such_steps():
    short = _plan(50, "comm.dp.compress=auto", "train.steps=299")
    fast = _plan(1e5, "comm.dp.compress=auto", LONG)
    named = _plan(50, "comm.dp.compress=int4", LONG)
    assert [plan.job.comm.dp.compress for plan in (short, fast, named)] == ["int8", "none", "int4"]
    assert {plan.job.comm.warmup_steps for plan in (short, fast, named)} == {0}


@pytest.mark.parametrize(
    ("mbit", "change", "other_mbit", "form"),
    [
        (80, "network half as fast", 40, "quinary between replicas"),
        (400, "network twice as fast", 800, "exact sums"),
        (200, "network twice as fast", 400, None),
    ],
)
def test_a_flip_of_the_form_is_what_a_plan_on_such_links_chooses(mbit, change, other_mbit, form):
    auto = ("comm.dp.compress=auto", LONG)
    (flip,) = (flip for flip in answer(_job(mbit, *auto)).sensitivities if flip.change == change)
    assert flip.is_other == (form is not None)
    assert flip.exchange == named_forms(_plan(other_mbit, *auto).job.comm)
    assert flip.exchange == form or form is None
    assert (f"dp 2 with {form} is chosen" in flip.text) == flip.is_other


def test_without_auto_flips_know_exact_sums_only():
    assert {flip.exchange for flip in answer(_job(50, LONG)).sensitivities} == {None}


@pytest.mark.parametrize("mbit", [200, 1000])
def test_auto_is_the_fastest_form_or_exact_within_the_margin(mbit):
    chosen = _plan(mbit, "comm.dp.compress=auto", LONG).ranked[0].step_s
    forms = [*FORMS, *AFTER_WARM_UP]
    fixed = [_plan(mbit, f"comm.dp.compress={form}", LONG).ranked[0].step_s for form in forms]
    assert chosen <= min(fixed) * 1.03 + 1e-9


def test_exact_sums_stay_where_nobody_asked_and_the_plan_says_what_is_lost():
    slow, fast = _plan(50), _plan(1e5)
    assert slow.job.comm.dp.compress == fast.job.comm.dp.compress == "none"
    assert any("--set comm.dp.compress=auto" in note for note in slow.notes)
    assert not any("comm.dp.compress" in note for note in fast.notes)


def test_buckets_are_no_worse_than_any_stated_size():
    chosen = _plan(1000).ranked[0]
    for mib in (1.0, 4.0, 25.0, 100.0):
        stated = _plan(1000, f"layout.bucket_mib={mib}")
        assert stated.job.layout.bucket_mib == mib
        assert chosen.step_s <= stated.ranked[0].step_s + 1e-9


def test_a_measured_codec_has_its_own_seconds():
    curve = CodecCurve(
        values=(1e6, 1e7), encode=(0.01, 0.1), decode=(0.005, 0.05), source="this test"
    )
    setting = Setting.of(_job(200, device=_core(codecs={"int8": curve})))
    found = codec_s(setting.device, codec("int8"), np.array([2e7]), np.array([2]))
    # 20 M values are coded, those of both decoded; beyond the curve in proportion.
    assert found[0] == pytest.approx(0.2 + 0.2)
    # Of four ranks each decodes three quarters of a sum, of which it has its own, then all means.
    found = codec_s(setting.device, codec("int8"), np.array([2e7]), np.array([4]))
    assert found[0] == pytest.approx(0.2 + 0.175)


def test_units_cost_passes_beside_the_codec():
    rates = {"encode": (0.01, 0.1), "decode": (1e-9, 1e-8)}
    curve = CodecCurve(values=(1e6, 1e7), **rates, source="this test")
    setting = Setting.of(_job(200, device=_core(codecs=dict.fromkeys(("int4", "quinary"), curve))))
    int4, quinary = (
        codec_s(setting.device, codec(name), np.array([1e7]), np.array([2]))[0]
        for name in ("int4", "quinary")
    )
    assert int4 == pytest.approx(0.1)
    assert 0.001 < quinary - int4 < 0.2


def _sharded(mbit: float, *settings: str, **constraints):
    return _plan(mbit, "layout.dp=1", "layout.fsdp=2", "layout.zero=3", *settings, **constraints)


@pytest.mark.parametrize(("mbit", "expected"), [(50, "int4"), (1e5, "none")])
def test_auto_flips_between_shards_too(mbit, expected):
    plan = _sharded(mbit, "comm.fsdp.compress=auto", LONG)
    assert plan.job.comm.fsdp.compress == expected
    assert "a step takes" in plan.reasons["comm.fsdp.compress"]
    assert (plan.job.comm.warmup_steps > 0) == (expected == "int4")
    forms = ("none", "bf16", "int8", "int4")
    fixed = [_sharded(mbit, f"comm.fsdp.compress={f}").ranked[0].step_s for f in forms]
    assert plan.ranked[0].step_s <= min(fixed) * 1.03 + 1e-9


def test_an_answer_has_the_exchange_that_a_run_will_have():
    job = _job(50, "layout.dp=1", "layout.fsdp=2", "layout.zero=3", "comm.fsdp.compress=auto", LONG)
    found, plan = answer(job), plan_job(job, job.cluster)
    assert found.best.step_s == pytest.approx(plan.ranked[0].step_s)
    assert found.best_job.comm.fsdp.compress == plan.job.comm.fsdp.compress == "int4"
    assert found.best_job.comm.warmup_steps == plan.job.comm.warmup_steps
    (note,) = found.notes
    assert note.startswith("comm.fsdp.compress = int4: after 30 exact steps a step takes")


def test_replicas_of_shards_flip_alone():
    settings = ("layout.dp=2", "layout.fsdp=2", "layout.zero=2", "comm.dp.compress=auto", LONG)
    slow, fast = (_plan(mbit, *settings, hosts=4).job.comm for mbit in (50, 1e5))
    assert (slow.dp.compress, slow.fsdp.compress) == ("int4", "none")
    assert (fast.dp.compress, fast.fsdp.compress) == ("none", "none")


def test_coding_of_shards_takes_the_codec_s_seconds():
    curve = CodecCurve(
        values=(1e3, 1e8), encode=(1e-6, 0.1), decode=(5e-7, 0.05), source="this test"
    )
    free = CodecCurve(values=(1.0,), encode=(1e-18,), decode=(1e-18,), source="this test")
    plans = [
        _sharded(200, "comm.fsdp.compress=int8", device=_core(codecs={"int8": each}))
        for each in (curve, free)
    ]
    (slow, num_params), (fast, _) = (
        (plan.ranked[0].time_s["exposed_comm.fsdp"], plan.job.model.num_params) for plan in plans
    )
    # Half of the gradients are coded for the other rank, whose half of its own is decoded.
    assert slow - fast == pytest.approx(num_params / 2 * 1.5e-9, rel=0.01)


def test_a_form_is_not_chosen_where_its_errors_do_not_fit():
    roomy = _sharded(50, "comm.fsdp.compress=auto")
    errors = roomy.ranked[0].heaviest.terms["comm_buffers"]
    tight = roomy.ranked[0].peak_memory_bytes - errors / 2
    device = _core(memory_bytes=_figure(tight))
    plan = _sharded(50, "comm.fsdp.compress=auto", device=device)
    assert roomy.job.comm.fsdp.compress == "int8"
    assert plan.job.comm.fsdp.compress == "none"


def test_a_slow_codec_is_not_chosen():
    slow = CodecCurve(values=(1.0,), encode=(1.0,), decode=(1.0,), source="this test")
    device = _core(codecs=dict.fromkeys([*FORMS[1:], *AFTER_WARM_UP], slow))
    plan = _plan(200, "comm.dp.compress=auto", LONG, device=device)
    assert plan.job.comm.dp.compress == "none"


def test_local_updates_cost_a_round_in_so_many_steps():
    job = _job(50)
    alone = _job(1e9)
    exact, rare = _step_s(job), _step_s(job, local=LocalUpdates(method="diloco", every=50))
    assert rare - _step_s(alone) < (exact - _step_s(alone)) / 10
    smaller = LocalUpdates(method="diloco", every=50, compress="int8")
    assert _step_s(job, local=smaller) < rare


def test_workers_of_shards_exchange_shards_and_step_as_runs_of_their_own():
    diloco = ("comm.local.method=diloco", "comm.local.every=8")
    shards = ("layout.fsdp=2", "layout.zero=3")
    plans = (
        _plan(50, *diloco),
        _plan(50, *diloco, *shards, "layout.dp=2", hosts=4),
        _plan(50, *shards, "layout.dp=1"),
    )
    whole, of_shards, alone = (plan.ranked[0].time_s for plan in plans)
    assert of_shards["exposed_comm.dp"] == pytest.approx(whole["exposed_comm.dp"] / 2, rel=0.01)
    assert of_shards["exposed_comm.fsdp"] == pytest.approx(alone["exposed_comm.fsdp"])
    assert alone["exposed_comm.fsdp"] > 0


DILOCO = ("comm.local.method=diloco", LONG)
STREAMING = ("comm.local.method=streaming", LONG)
SITE_OF_SHARDS = ("layout.fsdp=2", "layout.zero=3", "layout.dp=2")


def _rounds(mbit: float, *settings: str, **constraints) -> tuple[LocalUpdates, float]:
    """What was chosen of local updates, and the share of computing alone that it leaves."""
    plan = _plan(mbit, *settings, **constraints)
    local = plan.job.comm.local
    never = plan.job.comm.replace(local=local.replace(every=10**9))
    alone = predict(Setting.of(plan.job.replace(comm=never)), plan.job.layout)
    assert not local.is_open
    assert plan.ranked[0].step_s == predict(Setting.of(plan.job), plan.job.layout).step_s
    return local, alone.step_s / plan.ranked[0].step_s


def test_auto_meets_as_seldom_as_the_link_demands():
    auto = (*DILOCO, "comm.local.every=auto")
    found = [_rounds(mbit, *auto) for mbit in (1000, 100, 50, 1)]
    every = [local.every for local, _ in found]
    assert every == sorted(every)
    assert 10 < every[1] < every[2] < every[3] == 500
    for local, kept in found[1:3]:
        assert 0.95 <= kept < 0.951, local
    assert found[3][1] < 0.95
    assert "the most that these links leave" in _plan(1, *auto).reasons["comm.local.every"]


def test_auto_sends_the_least_rounded_form_that_the_steps_have_room_for():
    auto = (*DILOCO, "comm.local.compress=auto")
    forms = [_rounds(mbit, *auto)[0].compress for mbit in (1000, 50, 20, 1)]
    assert forms == ["none", "int8", "int4", "int4"]
    both, kept = _rounds(20, *auto, "comm.local.every=auto")
    assert (both.compress, both.every < 50) == ("int4", True)
    assert kept >= 0.95


def test_auto_is_as_late_as_a_fragment_needs():
    auto = (*STREAMING, "comm.local.fragments=2", "comm.local.overlap_steps=auto")
    late = [_rounds(mbit, *auto)[0].overlap_steps for mbit in (1000, 50, 1)]
    assert late[0] == 0 < late[1] <= late[2] == 5


def test_a_site_of_shards_needs_half_the_steps_between_rounds():
    auto = (*DILOCO, "comm.local.every=auto")
    near = Tier(name="near", num_devices=2, latency_s=_figure(1e-6), bytes_per_s=_figure(1e12))
    job = _job(20, *auto, *SITE_OF_SHARDS, hosts=4)
    cluster = job.cluster.replace(devices_per_node=2, num_nodes=2, tiers=(near, *job.cluster.tiers))
    site = plan_job(job.replace(cluster=cluster), cluster).job.comm.local
    whole, _ = _rounds(20, *auto)
    assert site.every == pytest.approx(whole.every / 2, rel=0.1)


def test_an_answer_has_the_rounds_of_the_plan():
    settings = (*DILOCO, "comm.local.every=auto", "comm.local.compress=auto")
    found = answer(_job(20, *settings))
    assert found.job.comm.local == _plan(20, *settings).job.comm.local
    assert any(note.startswith("comm.local.every: computing keeps 95") for note in found.notes)


def test_a_short_run_is_told_of_its_outer_momentum():
    told = "this run has 20 rounds"
    assert told in " ".join(_plan(50, *DILOCO).notes)
    assert told not in " ".join(_plan(50, *DILOCO, "comm.local.outer_momentum=0.6").notes)
    assert told not in " ".join(_plan(50, *DILOCO, "comm.local.every=5").notes)


def test_a_fragment_is_hidden_as_far_as_the_steps_beside_it_are_long():
    job, alone = _job(50), _step_s(_job(1e9))
    stops, short, middle, whole, longer = (
        _step_s(job, local=LocalUpdates(method="streaming", every=50, overlap_steps=steps)) - alone
        for steps in (0, 1, 2, 20, 40)
    )
    assert 0 < stops - short == pytest.approx(short - middle)
    assert whole == pytest.approx(longer), "there is no more to hide"
    assert 0 < whole < 0.3 * stops


def test_on_a_fast_link_compression_costs_its_own_kernels():
    job = _job(1e5)
    assert _step_s(job, dp=DpComm(compress="int4")) > _step_s(job)


def test_nothing_is_on_its_way_before_a_bucket_is_full():
    whole, half, many = (
        _plan(100, f"layout.bucket_mib={mib}").ranked[0].time_s["exposed_comm.dp"]
        for mib in (100.0, 30.0, 1.0)
    )
    assert 0 < whole - half < 0.6 * (whole - many)
