"""The seconds of a step. Pure functions, cheapest first: pipelines of given stages against the
published bubbles and by simulation; then whole steps of drawn layouts: terms sum up, better
hardware is never slower, columns say what single layouts say; then one physical effect per test.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.published_bubbles import bubble_fraction_published
from paceline.config.comm import Comm, LocalUpdates
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.schedule import DEMANDS, smallest_micro_batches
from paceline.config.stack import Stack
from paceline.observe.terms import TERMS
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.points import Points
from paceline.plan.price.pipelined import (
    StagePasses,
    bounding_stages,
    closed_form,
    simulated,
    stages_of,
)
from paceline.plan.price.step import NetworkParts, head_layers, predict, times_of
from paceline.plan.schedules import build_schedule, split_layers
from paceline.plan.search.pricing import step_seconds
from paceline.plan.stages import StageWork
from tests.plan.planned import EXPERTS, MODEL, cluster, figure, layout, setting, tiers

PER_RANK = {name: demands.stages_per_rank or 2 for name, demands in DEMANDS.items()}


# ---- pipelines of given stages -----------------------------------------------------------------


def equal_stages(name: str, ranks: int, batches: int, cost: tuple[float, float, float]):
    """What `closed_form` and `simulated` need for stages that all weigh the same."""
    stages = ranks * (1 if name == "dualpipe" else PER_RANK[name])
    one = setting(MODEL.replace(num_layers=stages), batch=batches)
    laid = layout(pp=ranks, schedule=name, stages_per_rank=PER_RANK[name], split=(1,) * stages)
    points, kinds = Points.of([laid], one), block_kinds_of(one.model)
    columns = bounding_stages(one.model, points, kinds, 0.0)
    every = stages_of(one, laid, kinds)

    def passes(of: StageWork) -> StagePasses:
        return StagePasses(*(np.full(of.has_embedding.shape, seconds) for seconds in cost))

    hop = np.zeros(1)
    closed = closed_form(setting(), points, columns, passes(columns), hop)
    schedule = build_schedule(name, ranks, batches, PER_RANK[name])
    return closed, simulated(schedule)(setting(), points, every, passes(every), hop), schedule


@pytest.mark.parametrize("name", sorted(DEMANDS))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_pipeline_takes_the_published_time(name, ranks):
    """F = I = W. DualPipe's formula is for pairs that overlap: our list waits half as long."""
    batches = 4 * ranks
    closed, ran, _ = equal_stages(name, ranks, batches, (1.0, 1.0, 1.0))
    busy = float((ran.work * 3.0).sum())
    bubble = bubble_fraction_published(name, ranks, batches, PER_RANK[name])
    if name.startswith("dualpipe"):
        bubble /= 2
    assert busy == batches * 3.0 * (1 if name == "dualpipe" else PER_RANK[name])
    assert ran.makespan_s[0] == pytest.approx(busy * (1 + bubble))
    assert closed.makespan_s[0] == pytest.approx(ran.makespan_s[0])


costs = st.sampled_from(((1, 1, 1), (1, 2, 0), (1, 1.3, 0.9), (2, 3, 1.5), (1, 1, 1.2)))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(DEMANDS)), st.sampled_from((2, 4, 6, 8)), st.integers(2, 6), costs)
def test_closed_forms_are_near_the_simulation(name, ranks, rounds, cost):
    batches = rounds * max(ranks, smallest_micro_batches(name, ranks))
    closed, ran, _ = equal_stages(name, ranks, batches, cost)
    exact = name in ("gpipe", "1f1b", "interleaved")
    assert closed.makespan_s[0] == pytest.approx(ran.makespan_s[0], rel=1e-9 if exact else 0.03)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(("gpipe", "1f1b", "interleaved", "zb_h1", "zbv")),
    st.sampled_from((2, 4, 8)),
    st.integers(16, 64),
    st.floats(0, 3),
)
def test_uneven_stages_are_near_the_simulation(name, ranks, num_layers, head):
    """The split of a network with a heavy head, in columns and layer by layer."""
    per_rank = PER_RANK[name]
    stages = ranks * per_rank
    assume(num_layers >= 2 * stages)
    one = setting(MODEL.replace(num_layers=num_layers), batch=4 * ranks)
    split = split_layers([1.0] * num_layers, stages, 0.0, head)
    laid = layout(pp=ranks, schedule=name, stages_per_rank=per_rank, split=split)
    points, kinds = Points.of([laid], one), block_kinds_of(one.model)

    def passes(of: StageWork) -> StagePasses:
        layers = of.layers.sum(0) + head * of.has_head
        return StagePasses(layers, layers, layers)

    columns, every = bounding_stages(one.model, points, kinds, head), stages_of(one, laid, kinds)
    closed = closed_form(setting(), points, columns, passes(columns), np.zeros(1))
    schedule = build_schedule(name, ranks, 4 * ranks, per_rank)
    ran = simulated(schedule)(setting(), points, every, passes(every), np.zeros(1))
    assert closed.makespan_s[0] == pytest.approx(ran.makespan_s[0], rel=0.1)


def test_transfers_cost_1f1b_in_every_round_and_gpipe_once():
    def with_hops(name: str) -> float:
        _, ran, schedule = equal_stages(name, 4, 16, (1.0, 1.0, 1.0))
        one = setting(MODEL.replace(num_layers=4), batch=16)
        laid = layout(pp=4, schedule=name, split=(1,) * 4)
        points, kinds = Points.of([laid], one), block_kinds_of(one.model)
        passes = StagePasses(*(np.ones((4, 1)) for _ in range(3)))
        stages = stages_of(one, laid, kinds)
        hops = simulated(schedule)(setting(), points, stages, passes, np.array([0.1]))
        by_class = bounding_stages(one.model, points, kinds, 0.0)
        formula = closed_form(setting(), points, by_class, passes, np.array([0.1]))
        assert formula.makespan_s[0] == pytest.approx(hops.makespan_s[0])
        return float(hops.makespan_s[0] - ran.makespan_s[0]) / 0.1

    assert with_hops("gpipe") == pytest.approx(6)
    assert with_hops("1f1b") == pytest.approx(28)


# ---- whole steps -------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    """Any layout of 16 ranks for `MODEL`, and its batch."""
    tp, pp, cp = draw(
        st.sampled_from(
            ((1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 2, 1), (2, 4, 1), (1, 1, 2), (2, 2, 2))
        )
    )
    data = 16 // (tp * pp * cp)
    fsdp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if data % n == 0]))
    zero = 0 if fsdp == 1 else draw(st.sampled_from((1, 2, 3)))
    schedule, per_rank = "none", 1
    if pp > 1:
        schedule = draw(st.sampled_from(sorted(DEMANDS)))
        per_rank = PER_RANK[schedule]
    stages = pp * (1 if schedule == "dualpipe" else per_rank)
    offload = draw(st.sampled_from(((), ("optimizer",), *([("params",)] if zero == 3 else []))))
    return layout(
        dp=data // fsdp, fsdp=fsdp, zero=zero, tp=tp, pp=pp, cp=cp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        ulysses=draw(st.sampled_from((1, cp))),
        schedule=schedule, stages_per_rank=per_rank,
        split=split_layers([1.0] * 16, stages) if pp > 1 else (),
        micro_batch=draw(st.sampled_from((1, 2))),
        precision=draw(st.sampled_from(("bf16", "fp32", "fp8"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        compile=draw(st.booleans()),
        offload=offload,
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_terms_sum_to_the_step(laid):
    one = setting()
    found = predict(one, laid)
    assert set(found.time_s) <= set(TERMS)
    assert sum(found.time_s.values()) == pytest.approx(found.step_s)
    assert all(seconds >= -1e-12 for seconds in found.time_s.values())
    assert found.tokens_per_s * found.step_s == pytest.approx(64 * 2048)
    peak = one.device.peak(laid.precision).value
    flops = MODEL.train_flops_per_token(2048) * found.tokens_per_s
    assert found.mfu == pytest.approx(flops / (16 * peak))
    assert found.interval_s[0] < found.step_s < found.interval_s[1]
    assert laid.pp > 1 or found.time_s["bubble"] == found.time_s["exposed_comm.pp"] == 0


@settings(deadline=None, max_examples=40)
@given(layouts(), st.sampled_from(("memory", "peak", "nvlink", "infiniband")))
def test_better_hardware_is_never_slower(laid, what):
    def on(factor: float) -> Cluster:
        old = cluster().device
        changes = {}
        if what == "memory":
            changes["memory_bytes_per_s"] = figure(old.memory_bytes_per_s.value * factor)
        if what == "peak":
            changes["peak_flops"] = {
                key: figure(peak.value * factor) for key, peak in old.peak_flops.items()
            }
        rates = {"nvlink": 300e9, "infiniband": 25e9}
        rates |= {what: rates[what] * factor} if what in rates else {}
        return cluster(**changes).replace(tiers=tiers(rates["nvlink"], rates["infiniband"]))

    before, after = (predict(setting(on=on(factor)), laid).step_s for factor in (1.0, 1.7))
    assert after <= before * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(layouts(), min_size=2, max_size=5))
def test_columns_say_what_single_layouts_say(several):
    one = setting()
    priced = step_seconds(one, Points.of(several, one))
    assert priced.step_s.shape == (len(several),)
    for number, laid in enumerate(several):
        alone = step_seconds(one, Points.of([laid], one))
        assert priced.step_s[number] == pytest.approx(alone.step_s[0])
        found = predict(one, laid)
        if laid.pp == 1:
            assert alone.step_s[0] == pytest.approx(found.step_s)
        else:  # few micro-batches, and stages of one to eight layers; usually: the test below
            assert alone.step_s[0] == pytest.approx(found.step_s, rel=0.2)


def test_columns_of_pipelines_are_usually_near_what_is_played_action_by_action():
    one, apart = setting(), []
    for schedule, ranks, micro_batch in itertools.product(sorted(DEMANDS), (2, 4), (1, 2)):
        per_rank = PER_RANK[schedule]
        stages = ranks * (1 if schedule == "dualpipe" else per_rank)
        laid = layout(
            pp=ranks, dp=16 // ranks, schedule=schedule, stages_per_rank=per_rank,
            split=split_layers([1.0] * 16, stages), micro_batch=micro_batch,
        )  # fmt: skip
        column = step_seconds(one, Points.of([laid], one)).step_s[0]
        apart.append(abs(column / predict(one, laid).step_s - 1))
    assert len(apart) == 32
    assert np.median(apart) < 0.04
    assert max(apart) < 0.08


# ---- one effect each ---------------------------------------------------------------------------


def seconds(laid, term: str | None = None, **given) -> float:
    found = predict(setting(**given), laid)
    return found.step_s if term is None else found.time_s[term]


def test_more_micro_batches_have_a_smaller_share_of_bubble():
    laid = layout(pp=4, dp=4, schedule="1f1b", split=(4, 4, 4, 4))

    def share(batch: int) -> float:
        found = predict(setting(batch=batch), laid)
        return found.time_s["bubble"] / found.step_s

    assert share(16) > share(32) > share(128) > 0


def test_zero_gathers_and_reduces_as_often_as_it_says():
    """With nothing hidden, exposed time is the collectives' own."""
    alone = Stack(overlaps_data_axes=False)
    of = {
        zero: seconds(layout(fsdp=16, zero=zero), "exposed_comm.fsdp", stack=alone)
        for zero in (1, 2, 3)
    }
    # 4 micro-batches; a gather moves 2 bytes per parameter, a reduction 4: 2 + 4, 2 + 16, 16 + 16.
    assert of[1] < of[2] < of[3]
    assert of[2] / of[1] == pytest.approx(18 / 6, rel=0.1)
    assert of[3] / of[1] == pytest.approx(32 / 6, rel=0.1)
    assert seconds(layout(fsdp=16), "exposed_comm.fsdp") < of[3]


def test_stages_gather_and_reduce_as_often_as_their_degree_says():
    """With nothing hidden; and the other stages wait for passes that take longer."""
    alone = Stack(overlaps_data_axes=False)
    laid = {
        zero: layout(pp=2, fsdp=8, zero=zero, schedule="1f1b", split=(8, 8)) for zero in (1, 2, 3)
    }
    of = {zero: seconds(one, "exposed_comm.fsdp", stack=alone) for zero, one in laid.items()}
    # 8 micro-batches: a gather moves 2 bytes per parameter, a reduction 4: 2 + 4, 2 + 32, 32 + 32.
    assert of[2] / of[1] == pytest.approx(34 / 6, rel=0.1)
    assert of[3] / of[1] == pytest.approx(64 / 6, rel=0.1)
    waits = [seconds(one, "bubble", stack=alone) for one in laid.values()]
    assert waits[0] < waits[1] < waits[2]


def test_ranks_that_share_a_sequence_shard_states_without_other_data_ranks():
    def stepping(zero: int) -> float:
        return seconds(layout(cp=16, zero=zero), "optimizer")

    assert stepping(1) < 0.2 * stepping(0)


def test_replicas_reduce_once_a_step_and_hide_behind_the_last_backward_pass():
    few, many = (seconds(layout(dp=16), "exposed_comm.dp", batch=n) for n in (16, 160))
    assert few == pytest.approx(many)
    alone = Stack(overlaps_data_axes=False)
    assert seconds(layout(dp=16), "exposed_comm.dp", stack=alone) > 2 * few


def test_replicas_also_reduce_while_the_device_waits_for_the_host():
    small = MODEL.replace(hidden_size=512, ffn_size=1024, num_heads=4, num_kv_heads=4, head_dim=128)
    on = cluster().replace(tiers=tiers(300e9, 2e9))
    slow, fast = (
        seconds(
            layout(dp=16), "exposed_comm.dp", model=small, seq_len=128, batch=16,
            stack=Stack(constants={"launch_us": us}), on=on,
        )
        for us in (100.0, 1.0)
    )  # fmt: skip
    assert slow < 0.8 * fast


def test_local_updates_send_seldom():
    alone = Stack(overlaps_data_axes=False)
    whole = layout(dp=16, bucket_mib=1e6)  # as workers send what they changed
    plain = seconds(whole, "exposed_comm.dp", stack=alone)
    eighth = Comm(local=LocalUpdates(method="diloco", every=8))
    seldom = seconds(layout(dp=16), "exposed_comm.dp", stack=alone, comm=eighth)
    assert seldom == pytest.approx(plain / 8)


def test_recomputation_repeats_what_it_does_not_keep():
    def again(kind: str, **stack) -> float:
        return seconds(layout(fsdp=16, recompute=kind), "recompute", stack=Stack(**stack))

    assert again("none") == 0
    assert 0 < again("selective") < again("selective", recompute_granularity="half")
    assert again("selective", recompute_granularity="half") < again("full")
    assert again("full") < again("full", recompute_stops_early=False)
    half = layout(fsdp=16, recompute="full", recompute_layers=8)
    assert seconds(half, "recompute") == pytest.approx(again("full") / 2)


def test_a_small_network_waits_for_the_host():
    small = MODEL.replace(hidden_size=256, ffn_size=512, num_heads=4, num_kv_heads=4, head_dim=64)
    late = seconds(layout(dp=16), "host_gap", model=small, seq_len=256)
    replayed = seconds(
        layout(dp=16), "host_gap", model=small, seq_len=256, stack=Stack(launch="graph")
    )
    compiled = seconds(layout(dp=16, compile=True), "host_gap", model=small, seq_len=256)
    assert replayed < compiled < 0.5 * late
    assert late > 0.3 * seconds(layout(dp=16), model=small, seq_len=256)
    assert replayed < 0.3 * late
    wide = MODEL.replace(hidden_size=8192, ffn_size=28672, num_heads=64)
    busy = layout(fsdp=16)
    assert seconds(busy, "host_gap", model=wide) < 0.01 * seconds(busy, model=wide)


def test_on_a_cpu_the_hosts_work_adds_up():
    device = cluster().device.replace(kind="cpu")
    on = Cluster(device=device, devices_per_node=8, num_nodes=2, tiers=tiers(1e10, 1e9))
    slow, fast = (
        seconds(layout(dp=16), "host_gap", on=on, stack=Stack(constants={"launch_us": us}))
        for us in (40.0, 20.0)
    )
    once = 2e-3 + 4 * 0.5e-3  # a step, and its micro-batches
    assert slow - once == pytest.approx(2 * (fast - once))


def test_asynchronous_and_overlapping_tensor_parallelism_hide_their_collectives():
    def exposed(stack: Stack, asynchronous: bool = False) -> float:
        laid = layout(tp=8, fsdp=2, sequence_parallel=True, compile=True, async_tp=asynchronous)
        return seconds(laid, "exposed_comm.tp", stack=stack)

    assert exposed(Stack(overlaps_tp=True)) < exposed(Stack(), True) < 0.8 * exposed(Stack())


def test_long_sequences_hide_the_hops_of_a_ring():
    laid = layout(cp=16)
    whole = Stack(constants={"overlap_share": 1.0})
    on = cluster().replace(tiers=tiers(300e9, 25e9))

    def share(seq_len: int) -> float:
        found = predict(setting(batch=1, seq_len=seq_len, stack=whole, on=on), laid)
        return found.time_s["exposed_comm.cp"] / found.step_s

    assert share(2048) > 0.002
    assert share(2**20) < 1e-6


def test_uneven_experts_cost_time():
    model = MODEL.replace(experts=EXPERTS)
    laid = layout(fsdp=16, ep=16)
    even, uneven = (
        predict(setting(model, expert_imbalance=load), laid).time_s for load in (1.0, 1.5)
    )
    for term in ("exposed_comm.ep", "matmul", "other_kernels"):
        assert uneven[term] > even[term]
    assert uneven["attention"] == even["attention"]


def test_copies_of_hot_experts_even_out_ranks_and_cost_exchanges():
    model, laid = MODEL.replace(experts=EXPERTS), layout(fsdp=16, ep=16)
    comm = Comm.parse({"ep": {"hot_experts": 2}})

    def terms(load: float, **more):
        return predict(setting(model, expert_imbalance=load, **more), laid).time_s

    for term in ("matmul", "other_kernels"):
        assert terms(1.5, comm=comm)[term] < terms(1.5)[term]
    model = MODEL.replace(experts={**EXPERTS, "ffn_size": 8192})
    assert terms(1.0, comm=comm)["exposed_comm.ep"] > terms(1.0)["exposed_comm.ep"]


def test_an_offloaded_optimizer_travels_and_coded_moments_travel_less():
    plain, away, coded = (
        seconds(layout(fsdp=16, **more), "optimizer")
        for more in (
            {},
            {"offload": ("optimizer",)},
            {"offload": ("optimizer",), "optimizer_state": "8bit"},
        )
    )
    assert plain < coded < away


def test_more_ranks_wait_longer_for_the_slowest():
    few, many = (
        predict(setting(batch=8 * nodes, on=cluster(nodes=nodes)), layout(fsdp=8, dp=nodes))
        for nodes in (1, 128)
    )

    def share(found) -> float:
        return found.time_s["straggler_wait"] / (found.step_s - found.time_s["straggler_wait"])

    # Expected maxima of 8 and 1,024 standard normal values.
    assert share(few) == pytest.approx(0.01 * 1.4236, rel=1e-3)
    assert share(many) == pytest.approx(0.01 * 3.2515, rel=1e-2)


def test_constants_change_their_own_terms():
    laid = layout(fsdp=16)

    def with_constant(name: str, value: float) -> dict[str, float]:
        stack = Stack(constants={name: value}, origin="fitted to six steps")
        found = predict(setting(stack=stack), laid)
        assert found.assumptions[f"stack.{name}"] == "fitted to six steps"
        return dict(found.time_s)

    plain = dict(predict(setting(), laid).time_s)
    assert with_constant("attention_time", 2.0)["attention"] == pytest.approx(
        2 * plain["attention"]
    )
    assert with_constant("optimizer_time", 2.0)["optimizer"] > 1.8 * plain["optimizer"]
    assert with_constant("comm_time_across", 3.0)["exposed_comm.fsdp"] > plain["exposed_comm.fsdp"]
    assert with_constant("matmul_time", 1.2)["matmul"] > 1.15 * plain["matmul"]


def test_an_unknown_rate_is_an_error_and_an_unknown_peak_no_utilisation():
    device = cluster().device.replace(name="mystery", peak_flops={})
    with pytest.raises(InputError, match="mystery"):
        predict(setting(on=Cluster(device=device, devices_per_node=8, num_nodes=2)), layout(dp=16))


def test_times_takes_any_pipeline():
    one = setting(batch=64)
    laid = layout(pp=4, dp=4, schedule="1f1b", split=(4, 4, 4, 4))
    points = Points.of([laid], one)
    stages = stages_of(one, laid, block_kinds_of(MODEL))
    schedule = build_schedule("1f1b", 4, 16, 1)
    network = NetworkParts.of(one, points)
    found = times_of(one, points, network, stages, simulated(schedule))
    assert found.step_s[0] == pytest.approx(predict(one, laid).step_s)
    assert found.passes.whole_s.shape == (4, 1)
    assert found.passes.weight_grad_s[0, 0] == 0  # the first stage does all in I
    assert float(head_layers(network)[0]) > 0.5
    seldom = replace(one, comm=Comm(local=LocalUpdates(method="diloco", every=2)))
    doubled = times_of(seldom, points, network, stages, simulated(schedule))
    assert doubled.step_s[0] <= found.step_s[0]
