"""Pipelines whose ranks share cores. Pure functions: the execution against arithmetic by hand and
against the one without sharing; what it does to a predicted step; closed form against execution.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.curves import DeviceCurves, SharingCurve
from paceline.config.hardware import Cluster
from paceline.config.schedule import DEMANDS
from paceline.observe.accounting import accounting
from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.points import Points
from paceline.plan.price.core_contention import core_contention_of, paces
from paceline.plan.price.pipelined import (
    StagePasses,
    bounding_stages,
    closed_form,
    simulated,
    stages_of,
)
from paceline.plan.price.simulate import predicted_timeline
from paceline.plan.price.step import predict
from paceline.plan.schedules import build_schedule
from paceline.plan.schedules.contention import (
    CoreContention,
    scatter_wait_s,
    shared_timeline,
    stretch_factors,
)
from paceline.plan.schedules.timing import StageCost, equal_cost, makespan, schedule_end_s, timeline
from paceline.plan.stages import StageWork
from tests.bench.test_host_time import CPU, CURVES, KNOWN, MEASURED
from tests.plan.planned import MODEL, layout, setting, tiers

ALONE = CoreContention(8, (1.0,) * 8)
TWO_CORES = CoreContention(4, (2.0, 2.0, 4 / 3, 1.0))
PER_RANK = {name: demands.stages_per_rank or 2 for name, demands in DEMANDS.items()}


def sharing(*pace: float) -> DeviceCurves:
    curve = SharingCurve(num_ranks=(1, 2, 4)[: len(pace)], pace=pace, source="a test")
    return MEASURED.replace(sharing=curve)


def cpus(curves: DeviceCurves, ranks: int = 4) -> Cluster:
    device = CPU.replace(curves=curves, peak_flops={"fp32": KNOWN}, memory_bytes_per_s=KNOWN)
    (tier,) = (tiers(1e10, 1e10)[0].replace(num_devices=ranks, collectives=CURVES),)
    return Cluster(device=device, devices_per_node=ranks, num_nodes=1, tiers=(tier,))


@pytest.mark.parametrize("name", sorted(DEMANDS))
def test_at_an_even_pace_it_is_the_execution_without_sharing(name):
    schedule = build_schedule(name, 4, 8, PER_RANK[name])
    cost = StageCost(*([1.0 + 0.1 * s for s in range(schedule.num_stages)] for _ in range(3)), 0.25)
    for shared, alone in zip(
        shared_timeline(schedule, cost, ALONE), timeline(schedule, cost), strict=True
    ):
        assert [one.action for one in shared] == [one.action for one in alone]
        for one, other in zip(shared, alone, strict=True):
            assert one[1:] == pytest.approx(other[1:])


def test_a_pipeline_of_two_on_one_core_waits_for_nothing():
    """Either rank alone is twice as fast: all that counts is the sum of the work."""
    schedule = build_schedule("gpipe", 2, 3, 1)
    rows = shared_timeline(schedule, equal_cost(2), CoreContention(2, (2.0, 1.0)))
    assert schedule_end_s(rows) == pytest.approx(2 * 3 * 3.0 / 2)
    assert stretch_factors(rows[0], equal_cost(2))[0] == pytest.approx(0.5)  # nobody else computes


SCATTERED = CoreContention(2, (1.0, 1.0), spread=0.12)


def _drawn_s(schedule, cost, contention, draws=400):
    """Seconds that passes drawn anew add: independent ones, in plain numbers."""
    generator, sigma = np.random.default_rng(7), np.sqrt(np.log1p(contention.spread**2))
    ends = []
    for _ in range(draws):
        normal = [generator.standard_normal(len(actions)) for actions in schedule.actions]
        factors = [np.exp(sigma * z - sigma**2 / 2) for z in normal]
        ends.append(schedule_end_s(shared_timeline(schedule, cost, contention, factors)))
    return np.mean(ends) - schedule_end_s(shared_timeline(schedule, cost, contention))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "interleaved"])
def test_the_wait_for_scattered_passes_is_that_of_many_draws(name):
    schedule = build_schedule(name, 2, 8, PER_RANK[name] if name == "interleaved" else 1)
    cost = equal_cost(schedule.num_stages)
    few, many = scatter_wait_s(schedule, cost, SCATTERED), _drawn_s(schedule, cost, SCATTERED)
    alone_s = schedule_end_s(shared_timeline(schedule, cost, SCATTERED))
    assert few == pytest.approx(many, abs=0.01 * alone_s)
    assert 0.005 * alone_s < many < 0.12 * alone_s


def test_scatter_is_waited_for_where_ranks_have_no_time_to_spare():
    """The passes of docs/decisions/ranks-that-share-cores.md: only the even ones lose time."""
    schedule = build_schedule("1f1b", 2, 8, 1)
    even = StageCost((27.0, 27.0), (30.0, 30.0), (30.0, 30.0))
    uneven = StageCost((36.0, 17.0), (40.0, 17.0), (40.0, 17.0))
    waits = [scatter_wait_s(schedule, cost, SCATTERED) for cost in (even, uneven)]
    assert waits[0] > 0.02 * schedule_end_s(shared_timeline(schedule, even, SCATTERED))
    assert waits[1] < 0.005 * schedule_end_s(shared_timeline(schedule, uneven, SCATTERED))
    assert scatter_wait_s(schedule, even, SCATTERED) == waits[0]
    assert scatter_wait_s(schedule, even, SCATTERED._replace(spread=0.0)) == 0
    assert scatter_wait_s(schedule, even, SCATTERED._replace(spread=0.06)) < waits[0]


def test_scattered_passes_are_a_wait_of_the_predicted_step():
    curves = sharing(1.2, 1.2, 1.0)
    uneven = curves.replace(sharing=curves.sharing.replace(spread=0.1))
    laid = layout(pp=4, schedule="1f1b", precision="fp32", split=(4, 4, 4, 4))
    light_head = MODEL.replace(num_layers=16, vocab_size=64)
    exact, scattered = (
        setting(light_head, on=cpus(each), batch=8, seq_len=64) for each in (curves, uneven)
    )
    before, after = (predict(one, laid) for one in (exact, scattered))
    grown = {term for term, s in after.time_s.items() if s != pytest.approx(before.time_s[term])}
    assert grown == {"straggler_wait"}
    assert 1.01 * before.step_s < after.step_s < 1.2 * before.step_s
    accounts = accounting(predicted_timeline(scattered, laid)).values()
    assert all(sum(steps[0].values()) == pytest.approx(after.step_s) for steps in accounts)
    waits = [steps[0]["straggler_wait"] for steps in accounts]
    assert waits == pytest.approx([after.time_s["straggler_wait"]] * 4)


def test_ranks_of_other_machines_are_not_in_the_way():
    schedule = build_schedule("gpipe", 4, 4, 1)
    pairs = shared_timeline(schedule, equal_cost(4), CoreContention(2, (1.0, 1.0)))
    assert schedule_end_s(pairs) == makespan(schedule, equal_cost(4))
    slower = shared_timeline(schedule, equal_cost(4), CoreContention(4, (1.0, 1.0, 0.5, 0.5)))
    assert schedule_end_s(slower) > makespan(schedule, equal_cost(4))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(DEMANDS)), st.integers(1, 3), st.floats(0.2, 5.0))
def test_it_takes_no_less_than_the_cores_need_and_no_more_than_without(name, rounds, uneven):
    schedule = build_schedule(name, 4, 4 * rounds, PER_RANK[name])
    seconds = [1.0] * (schedule.num_stages - 1) + [uneven]
    cost = StageCost(seconds, seconds, seconds)
    end_s = schedule_end_s(shared_timeline(schedule, cost, TWO_CORES))
    work_s = sum(cost.of(action) for actions in schedule.actions for action in actions)
    longest_s = max(sum(map(cost.of, actions)) for actions in schedule.actions)
    assert end_s >= max(work_s / 4, longest_s / 2) - 1e-9
    assert end_s <= makespan(schedule, cost) + 1e-9


def test_a_deadlock_is_told():
    schedule = build_schedule("1f1b", 2, 2, 1)
    stuck = schedule._replace(actions=(schedule.actions[0][::-1], schedule.actions[1]))
    with pytest.raises(ValueError, match="deadlock"):
        shared_timeline(stuck, equal_cost(2), ALONE)


def test_paces_are_read_for_the_ranks_of_a_stage_together():
    one = setting(on=cpus(sharing(2.2, 1.9, 1.0)))
    whole, pairs = (Points.of([layout(**sizes)], one) for sizes in ({"pp": 4}, {"pp": 2, "tp": 2}))
    assert core_contention_of(one, whole) == CoreContention(4, pytest.approx((2.2, 1.9, np.exp(
        np.log(1.9) * (1 - np.log2(1.5))), 1.0)))  # fmt: skip
    assert core_contention_of(one, pairs) == CoreContention(2, pytest.approx((1.9, 1.0)))
    assert core_contention_of(one, Points.of([layout(dp=4)], one)) is None
    assert core_contention_of(setting(), Points.of([layout(pp=4)], setting())) is None


def test_noise_makes_no_rank_slower_alone_nor_few_faster_than_all():
    one = setting(on=cpus(sharing(9.0, 0.8, 1.0)))
    points = Points.of([layout(pp=4)], one)
    assert paces(one, points, np.array([1, 2, 4])) == pytest.approx([4.0, 1.0, 1.0])


@pytest.mark.parametrize("name", sorted(DEMANDS))
@pytest.mark.parametrize("tp", [1, 2])
def test_terms_and_timeline_of_a_step_with_shared_cores(name, tp):
    pp, per_rank = 4 // tp, PER_RANK[name]
    stages = pp * (1 if name == "dualpipe" else per_rank)
    laid = layout(
        pp=pp, tp=tp, schedule=name, stages_per_rank=per_rank, precision="fp32",
        split=(16 // stages,) * stages,
    )  # fmt: skip
    faster, alone = (
        setting(on=cpus(curves), batch=8, seq_len=64) for curves in (sharing(2, 2, 1), MEASURED)
    )
    found, without = predict(faster, laid), predict(alone, laid)
    assert found.step_s <= without.step_s
    assert tp == 2 or found.step_s < 0.99 * without.step_s
    assert min(found.time_s.values()) >= 0
    assert sum(found.time_s.values()) == pytest.approx(found.step_s)
    accounts = accounting(predicted_timeline(faster, laid))
    nearest = min(
        max(abs(steps[0].get(term, 0.0) - s) for term, s in found.time_s.items())
        for steps in accounts.values()
    )
    # Terms are those without transfers, which shift what runs at the same time.
    assert nearest < 0.03 * found.step_s
    assert all(sum(steps[0].values()) == pytest.approx(found.step_s) for steps in accounts.values())


@pytest.mark.parametrize("name", sorted(DEMANDS))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_the_closed_form_is_near_the_execution(name, rounds):
    one = setting(MODEL.replace(num_layers=16), on=cpus(sharing(2, 2, 1)), batch=4 * rounds)
    stages = 4 * (1 if name == "dualpipe" else PER_RANK[name])
    laid = layout(pp=4, schedule=name, stages_per_rank=PER_RANK[name], split=(1,) * stages)
    points, kinds = Points.of([laid], one), block_kinds_of(one.model.replace(num_layers=stages))
    columns = bounding_stages(one.model.replace(num_layers=stages), points, kinds, 0.0)
    every = stages_of(one, laid, kinds)

    def passes(of: StageWork) -> StagePasses:
        return StagePasses(*(np.ones(of.has_embedding.shape) for _ in range(3)))

    ran = simulated(build_schedule(name, 4, 4 * rounds, PER_RANK[name]))
    executed = ran(one, points, every, passes(every), np.zeros(1)).makespan_s[0]
    closed = closed_form(one, points, columns, passes(columns), np.zeros(1)).makespan_s[0]
    assert closed == pytest.approx(executed, rel=0.15)
