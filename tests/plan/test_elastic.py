"""Which Job goes on with the nodes that are left, and what a run does about a loss (pure)."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.feasible import check_layout
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job, JobSpec, to_raw
from paceline.config.layout import Layout
from paceline.plan.elastic import Remaining, Replanner, WayOn, job_on, ways_on
from paceline.plan.search.choose import plan_job
from tests.plan.answers import SMALL
from tests.plan.planned import cluster, figure

CPU = Device(name="some CPU", kind="cpu", precisions=("fp64", "fp32"))
TINY = {
    **SMALL,
    "name": "tiny",
    "model": {**SMALL["model"], "hidden_size": 256, "ffn_size": 704, "vocab_size": 512},
    "train": {"steps": 100, "global_batch": 24, "seq_len": 128},
}


def _nodes(nodes: int, devices: int = 1, device: Device = CPU) -> Cluster:
    return Cluster(device=device, devices_per_node=devices, num_nodes=nodes)


def _run(on: Cluster, raw: dict[str, Any] = TINY, **sections: Any) -> tuple[JobSpec, Job]:
    """A person's wish, and the Job that began."""
    layout = {"micro_batch": 1, **sections.pop("layout", {})}
    elastic = {"min_nodes": 1, **sections.pop("elastic", {})}
    asked = JobSpec.parse({**raw, "layout": layout, "elastic": elastic, **sections})
    return asked, plan_job(asked, on).job


def _numbers(job: Job) -> dict[str, Any]:
    """All that could change the numbers of a run that sums exactly."""
    same = ("micro_batch", "precision", "param_dtype", "optimizer_state", "compile", "kernels",
            "tp", "cp", "ep", "sequence_parallel", "ulysses")  # fmt: skip
    layout = {name: getattr(job.layout, name) for name in same}
    sections = ("name", "model", "data", "optim", "train", "checkpoint", "elastic")
    return {**layout, **{name: getattr(job, name) for name in sections}}


@pytest.mark.parametrize(
    ("nodes", "devices", "batch", "ranks"),
    [(3, 1, 24, 3), (3, 1, 16, 2), (1, 1, 24, 1), (3, 2, 24, 6), (3, 2, 16, 4), (2, 3, 16, 4),
     (1, 3, 16, 2), (3, 1, 8, 2), (7, 1, 24, 6), (5, 4, 24, 12)],
)  # fmt: skip
def test_replicas_go_on_with_as_many_devices_as_share_the_batch(nodes, devices, batch, ranks):
    raw = {**TINY, "train": {**TINY["train"], "global_batch": batch}}
    first = 8
    asked, job = _run(_nodes(first, 1), raw)
    job = job.replace(cluster=_nodes(first, devices), layout=job.layout.replace(dp=8))
    found = job_on(asked, job, nodes, devices)
    assert found is not None
    assert found.layout.dp == found.layout.num_ranks == found.cluster.num_devices == ranks
    assert found.cluster.num_nodes <= nodes
    assert found.cluster.devices_per_node <= devices


@given(
    batch=st.integers(1, 12).map(lambda n: n * 8),
    nodes=st.integers(1, 9),
    devices=st.integers(1, 4),
    fsdp=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2]),
    exact=st.booleans(),
)
def test_what_goes_on_can_run_and_has_the_same_numbers(
    batch, nodes, devices, fsdp, micro_batch, exact
):
    raw = {**TINY, "train": {**TINY["train"], "global_batch": batch}}
    layout = {"micro_batch": micro_batch, "fsdp": fsdp, "dp": 4 // fsdp}
    elastic = {"exact": exact, "max_nodes": 9}
    asked, job = _run(_nodes(4), raw, layout=layout, elastic=elastic)
    found = job_on(asked, job, nodes, devices)
    assert found is not None
    train = found.train
    check_layout(found.layout, found.model, found.cluster, train.seq_len, train.global_batch)
    assert _numbers(found) == _numbers(job)
    assert found.accumulation * found.layout.num_data_ranks * micro_batch == batch
    assert found.cluster.num_devices <= nodes * devices
    assert found.layout.fsdp >= min(fsdp, found.layout.num_data_ranks)


def test_a_return_brings_back_the_first_job():
    asked, job = _run(_nodes(4))
    replanner = Replanner(asked, job)
    assert replanner.job_on(2) != job
    assert replanner.job_on(4) is job
    assert replanner.job_on(9) is job  # elastic.max_nodes


def test_too_few_nodes_have_no_job():
    asked, job = _run(_nodes(4), elastic={"min_nodes": 3})
    assert job_on(asked, job, 3) is not None
    assert job_on(asked, job, 2) is None
    assert job_on(asked, job, 0) is None
    assert Replanner(asked, job).job_on(2) is not None  # which saves what is left


def test_what_was_fixed_beside_data_axes_stays():
    layout = {"tp": 2, "dp": 2}
    asked, job = _run(_nodes(2, 2), layout=layout, elastic={"exact": True})
    found = job_on(asked, job, 1)
    assert found is not None
    assert (found.layout.tp, found.layout.dp) == (2, 1)
    asked, job = _run(_nodes(2, 1), layout={"tp": 2})
    assert job_on(asked, job, 1) is None  # tp = 2 doesn't run on one device
    asked, job = _run(_nodes(4, 1), layout={"tp": 2, "fsdp": 2})
    assert job_on(asked, job, 1) is None


@pytest.mark.parametrize("exact", [True, False])
def test_where_speeds_are_known_a_pipeline_may_change_and_tp_only_without_exact(exact):
    on = cluster("H100-SXM", nodes=2).replace(devices_per_node=2)
    raw = {**SMALL, "train": {**SMALL["train"], "global_batch": 16}}
    asked, job = _run(on, raw, elastic={"exact": exact})
    job = job.replace(layout=job.layout.replace(
        tp=4, dp=1, fsdp=1, zero=0, sequence_parallel=False, pp=1))  # fmt: skip
    found = job_on(asked, job, 1)
    assert (found is None) == exact
    assert exact or found.layout.num_ranks == 2


def test_searched_layouts_fit_where_replicas_do_not():
    """22 GB of states on devices of 11 GB: more shards of fewer nodes, or none."""
    memory = {"memory_bytes": figure(11e9)}
    on = cluster("H100-SXM", nodes=4, **memory).replace(devices_per_node=2)
    raw = {**SMALL, "model": {**SMALL["model"], "num_layers": 24}}
    raw["train"] = {**SMALL["train"], "global_batch": 24, "seq_len": 512}
    asked, job = _run(on, raw)
    found = job_on(asked, job, 3)
    assert found is not None
    assert found.layout.num_ranks == 6
    assert job_on(asked, job, 1) is None


def test_what_fits_only_recomputed_is_recomputed_where_that_was_left_open():
    on = cluster("H100-SXM", nodes=2, memory_bytes=figure(15.5e9)).replace(devices_per_node=2)
    raw = {**SMALL, "model": {**SMALL["model"], "num_layers": 24}}
    raw["train"] = {**SMALL["train"], "global_batch": 24}
    asked, job = _run(on, raw, elastic={"exact": True})
    assert job.layout.recompute == "none"
    found = job_on(asked, job, 1)
    assert found is not None
    assert found.layout.recompute != "none"
    fixed = asked.replace(layout=asked.layout.replace(recompute="none"))
    assert job_on(fixed, job, 1) is None


def test_a_run_that_should_not_fit_is_not_ended_by_the_same_prediction():
    on = cluster("H100-SXM", nodes=4, memory_bytes=figure(5e9)).replace(devices_per_node=1)
    fixed = Layout(dp=4, micro_batch=1, precision="bf16")
    asked, job = _run(on, {**SMALL, "train": {**SMALL["train"], "global_batch": 24}},
                      layout=to_raw(fixed))  # fmt: skip
    found = job_on(asked, job, 3)
    assert found is not None
    assert found.layout.num_ranks == 3


def test_ones_own_module_changes_data_axes_only():
    raw = {"name": "own", "model": {"family": "custom"}, "data": {"source": "here"},
           "train": {"steps": 10, "global_batch": 24}}  # fmt: skip
    asked, job = _run(_nodes(4), raw)
    found = job_on(asked, job, 3)
    assert found is not None
    assert (found.layout.dp, found.layout.micro_batch) == (3, 1)
    asked, job = _run(_nodes(4), raw, layout={"fsdp": 4, "dp": 1, "zero": 2})
    found = job_on(asked, job, 3)
    assert found is not None
    assert (found.layout.fsdp, found.layout.zero, found.layout.dp) == (3, 2, 1)


def test_a_form_of_gradients_stays_and_rests_on_one_rank():
    asked, job = _run(_nodes(4), comm={"dp": {"compress": "int8"}}, checkpoint={"every": 0})
    two, one = job_on(asked, job, 2), job_on(asked, job, 1)
    assert two is not None
    assert one is not None
    assert (two.layout.dp, two.comm.dp.compress) == (2, "int8")
    assert one.comm.dp.compress == "none"  # nothing travels
    assert one.layout.fsdp == two.layout.fsdp == 1


@pytest.mark.parametrize(("nodes", "workers"), [(6, 3), (5, 2), (3, 1), (1, None)])
def test_workers_of_local_updates_stay_what_they_are(nodes, workers):
    layout = {"dp": 3, "fsdp": 2, "zero": 3}
    asked, job = _run(_nodes(6), layout=layout, comm={"local": {"method": "diloco"}})
    found = job_on(asked, job, nodes)
    assert (found and found.layout.dp) == workers
    if found is not None:
        assert (found.layout.fsdp, found.layout.zero, found.layout.tp) == (2, 3, 1)
        assert found.cluster.num_nodes == 2 * workers


def test_answers_are_kept_and_prepared():
    asked, job = _run(_nodes(8))
    replanner = Replanner(asked, job)
    replanner.prepare(7, 6).join(60)
    assert replanner.job_on(6) is replanner.job_on(6)
    assert set(replanner._known) == {7, 6}


# ---- the choice ----------------------------------------------------------------------------------


def _replanner(nodes: int = 4, **elastic: Any) -> Replanner:
    return Replanner(*_run(_nodes(nodes), elastic=elastic))


def _best(now: Remaining, replanner: Replanner) -> WayOn:
    return ways_on(now, replanner)[0]


def test_ranks_are_started_again_where_they_were():
    best = _best(Remaining(4, 1, 100, 1.0, restartable=1), _replanner())
    assert (best.action, best.nodes) == ("replace", 4)
    assert best.job is not None
    assert best.job.layout.dp == 4


def test_a_spare_takes_the_place():
    best = _best(Remaining(4, 1, 100, 1.0, spares=1), _replanner())
    assert (best.action, best.nodes) == ("spare", 4)


def test_what_was_measured_decides_between_the_same_node_and_a_spare():
    slow = {"replace": 9.0, "spare": 2.0}
    both = {"restartable": 1, "spares": 1}
    assert _best(Remaining(4, 1, 9, 1.0, **both, go_on_s=slow), _replanner()).action == "spare"
    slow = {"replace": 1.0, "spare": 2.0}
    assert _best(Remaining(4, 1, 9, 1.0, **both, go_on_s=slow), _replanner()).action == "replace"


def test_it_shrinks_where_returns_take_long_and_waits_where_they_come_soon():
    late = _best(Remaining(4, 1, 1000, 1.0), _replanner())
    assert late.job is not None
    assert (late.action, late.nodes, late.job.layout.dp) == ("shrink", 3, 3)
    ways = ways_on(Remaining(4, 2, 1000, 1.0, away_s=60, returns=5999), _replanner(wait_s=60))
    assert ways[0].action == "wait"
    assert ways[0].job is None
    assert [each.expected_s for each in ways] == sorted(each.expected_s for each in ways)


def test_below_the_least_it_waits_until_the_deadline_and_then_stops():
    few = _replanner(min_nodes=3, wait_s=60)
    assert _best(Remaining(4, 2, 100, 1.0, waited_s=10), few).action == "wait"
    over = ways_on(Remaining(4, 2, 100, 1.0, waited_s=60), few)
    assert [(way.action, way.nodes, way.job) for way in over] == [("stop", 0, None)]
    assert over[0].reason == "2 nodes left, and elastic.min_nodes = 3"


@pytest.mark.parametrize(("steps_left", "action"), [(1000, "grow"), (10, "replace")])
def test_it_grows_where_the_rest_of_the_run_gains_more_than_that_costs(steps_left, action):
    best = _best(Remaining(3, 0, steps_left, 1.0, spares=1), _replanner())
    assert (best.action, best.nodes) == (action, 4 if action == "grow" else 3)


def test_it_grows_also_where_nobody_has_measured_a_step_yet():
    for steps_left, action in ((1000, "grow"), (2, "replace")):
        assert _best(Remaining(3, 0, steps_left, None, spares=1), _replanner()).action == action


def test_a_node_that_could_not_share_the_batch_stays_a_spare():
    raw = {**TINY, "train": {**TINY["train"], "global_batch": 16}}
    replanner = Replanner(*_run(_nodes(4), raw))
    assert _best(Remaining(2, 0, 10**6, 1.0, spares=1), replanner).action == "replace"


def _drawn_s(now: Remaining, nodes: int, most: int, runs: int) -> np.ndarray:
    """Seconds of the steps left on so many of all nodes, with returns drawn, replicas only."""
    rng = np.random.default_rng(0)
    alone = now.steps_left * now.step_s * now.active / nodes
    whole = now.steps_left * now.step_s * now.active / most
    back = rng.exponential(now.return_s, runs)
    grown = back + now.cost_s("grow") + whole * (1 - back / alone)
    return np.where(back < alone, grown, alone)


@pytest.mark.parametrize(("steps", "away", "returns"), [(300, 0, 0), (3000, 0, 0), (100, 90, 9)])
@pytest.mark.parametrize("wait_s", [0.0, 45.0])
def test_expected_times_are_those_of_drawn_returns(steps, away, returns, wait_s):
    now = Remaining(4, 1, steps, 1.0, away_s=away, returns=returns)
    ways = {way.action: way for way in ways_on(now, _replanner(wait_s=wait_s))}
    shrunk = now.cost_s("shrink") + _drawn_s(now, 3, 4, 20_000)
    error = 4 * shrunk.std() / np.sqrt(len(shrunk))
    assert ways["shrink"].expected_s == pytest.approx(shrunk.mean(), abs=error)
    assert ("wait" in ways) == (wait_s > 0)
    if wait_s:
        back = np.random.default_rng(1).exponential(now.return_s, len(shrunk))
        in_time = back + now.cost_s("grow") + steps * 1.0
        drawn = np.where(back < wait_s, in_time, wait_s + shrunk)
        error = 4 * drawn.std() / np.sqrt(len(drawn))
        assert ways["wait"].expected_s == pytest.approx(drawn.mean(), abs=error)


def test_ways_are_within_bounds_and_there_is_always_one():
    for nodes, lost, spares, restartable in product((2, 3, 4), (0, 1, 2), (0, 1, 2), (0, 1)):
        if restartable > lost:
            continue
        replanner = _replanner(4, min_nodes=2)
        now = Remaining(nodes, lost, 500, 0.5, restartable=restartable, spares=spares)
        ways = ways_on(now, replanner)
        assert ways
        for way in ways:
            assert way.nodes <= min(4, max(now.there, now.active))
            if way.job is not None:
                assert 2 <= way.nodes == way.job.cluster.num_nodes <= now.there
