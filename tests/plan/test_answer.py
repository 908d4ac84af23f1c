"""The planner's answer as data: what was found, why, what the run takes, plan.json (pure)."""

import json
import math
import re
from itertools import pairwise

import pytest

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, Device, device
from paceline.config.job import Job, JobSpec
from paceline.config.layout import Layout, LayoutSpec
from paceline.config.links import network, usual_tiers
from paceline.plan.answer.answer import to_json
from paceline.plan.answer.find import answer
from paceline.plan.answer.options import bounds_of, budget_of, cluster_of, clusters_of, lengthened
from paceline.plan.answer.outlook import outlook
from paceline.plan.collectives import tiers_of
from paceline.plan.prediction import MEMORY_TERMS
from paceline.plan.search.space import SearchConstraints
from tests.plan.answers import IMAGES, cramped, eight, job, small_answer


def test_the_answer_keeps_what_the_search_found():
    found = small_answer()
    assert found.best is found.ranked[0]
    first, *others = [one.step_s for one in found.ranked]
    assert others == sorted(others)  # after the choice, which is the simplest of the fastest
    assert first <= 1.03 * others[0]
    assert all(one.peak_memory_bytes <= found.limit_bytes for one in found.ranked)
    assert found.binding.term in found.best.time_s
    assert isinstance(found.best_job, Job)
    assert found.best_job.layout == found.best.layout


def test_no_layout_of_the_front_is_beaten_by_another():
    front = small_answer().front
    assert len(front) > 1
    for faster, leaner in pairwise(front):
        assert faster.step_s <= leaner.step_s
        assert leaner.peak_memory_bytes < faster.peak_memory_bytes


def test_the_run_costs_its_device_hours():
    found = small_answer()
    run = found.outlook
    assert run.train_s == pytest.approx(1000 * found.best.step_s)
    assert run.amount == 1000 * 64 * 2048
    assert run.device_hours == pytest.approx(8 * run.train_s / 3600 / run.goodput)
    assert run.usd == pytest.approx(2.0 * run.device_hours)
    assert run.usd_per_step == pytest.approx(run.usd / 1000)
    assert run.checkpoint_bytes == 12 * found.job.model.num_params
    assert run.storage_usd_per_month == pytest.approx(
        0.02 * run.num_checkpoints * run.checkpoint_bytes / 1e9
    )


def test_checkpoints_that_stay_are_counted():
    best = small_answer().best
    every = {"every": 100, "keep_last": 2}
    assert outlook(job(checkpoint=every), best, 1e9).num_checkpoints == 2
    assert outlook(job(checkpoint={**every, "keep_every": 200}), best, 1e9).num_checkpoints == 7
    assert outlook(job(checkpoint={"every": 0}), best, 1e9).num_checkpoints == 1


def test_what_is_unknown_stays_unknown():
    run = outlook(job(), small_answer().best, 1e9)
    assert run.usd is None
    assert run.storage_usd_per_month is None
    silent = outlook(job(on=eight(power_watts=None)), small_answer().best, 1e9)
    assert silent.energy_kwh is None


def test_plan_json_is_complete_and_plain():
    found = small_answer()
    plain = json.loads(json.dumps(to_json(found, num=3), allow_nan=False))
    assert len(plain["layouts"]) == 3
    first = plain["layouts"][0]
    assert Layout.parse(first["layout"]) == found.best.layout
    assert sum(first["time_s"].values()) == pytest.approx(first["step_s"])
    terms = first["memory"][0]["terms_bytes"]
    assert set(terms) <= set(MEMORY_TERMS)
    assert sum(terms.values()) == pytest.approx(first["memory"][0]["total_bytes"])
    assert plain["flips"][0]["text"]
    assert plain["margin"]["slower_by"] >= 0
    assert plain["assumptions"] == dict(found.best.assumptions)
    assert set(plain["versions"]) == {"paceline", "python", "numpy"}


def test_what_does_not_fit_is_said_with_what_would():
    found = answer(job(on=cramped()))
    assert found.best is None
    assert found.outlook is None
    assert found.shortage.lacks_bytes > 0
    plain = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert plain["layout"] is None
    assert plain["shortage"]["nearest"]["peak_memory_bytes"] > 0.96 * 1.5e9


def test_a_concrete_layout_is_predicted_or_refused_by_name():
    concrete = small_answer().best_job
    found = answer(concrete)
    assert found.counts.points == 1
    assert found.best.step_s == pytest.approx(small_answer().best.step_s)
    with pytest.raises(InputError, match="asks for 8 ranks but the cluster has 16"):
        answer(concrete.replace(cluster=concrete.cluster.replace(num_nodes=2)))


def test_images_are_planned_with_replicas():
    found = answer(job(IMAGES))
    assert found.unit == "images"
    assert found.best.layout.dp == 8
    assert found.counts.points == 2 * 7, "eager or compiled, 1 to 64 images"
    assert found.outlook.amount == 512_000
    assert "102 MB of gradients" in found.notes[0]
    exposed = found.best.time_s["exposed_comm.dp"]
    assert f"{exposed * 1e3:.3g} ms are exposed" in found.notes[0]
    assert "images_per_s" in to_json(found)["layouts"][0]
    fixed = answer(job(IMAGES, layout={"micro_batch": 16, "compile": False}))
    assert fixed.counts.points == 1


@pytest.mark.parametrize(
    ("layout", "constraints", "words"),
    [
        ({"tp": 2}, {}, "replicas only"),
        ({"dp": 4}, {}, "dp = 8"),
        ({"micro_batch": 48}, {}, "divides the 64 images"),
        ({}, {"free": ("offload",)}, "offload has no effect"),
    ],
)
def test_images_refuse_what_has_no_effect(layout, constraints, words):
    given = job(IMAGES, layout=layout)
    with pytest.raises(InputError, match=words):
        answer(given, SearchConstraints(layout=given.layout, **constraints))


def test_a_model_of_ones_own_is_refused():
    with pytest.raises(InputError, match="says nothing about its layers"):
        answer(job({**IMAGES, "model": {"family": "custom"}}))


def test_a_model_without_family_is_asked_for_it():
    with pytest.raises(InputError, match=r"^model\.family is missing: say which kind of model"):
        JobSpec.parse({**IMAGES, "model": {"depth": 50}})


# ---- what a person says in words -----------------------------------------------------------------


def test_clusters_are_named_by_nodes_and_devices():
    two = cluster_of("2x8xH100-SXM")
    assert (two.num_nodes, two.devices_per_node, two.device.name) == (2, 8, "H100-SXM")
    assert cluster_of("4xA100-80").num_nodes == 1


@pytest.mark.parametrize("text", ["H100", "8H100-SXM", "0x8xH100-SXM", "8x0xH100-SXM", "8xH1000"])
def test_other_names_of_clusters_are_refused(text):
    with pytest.raises(InputError):
        cluster_of(text)


@pytest.mark.parametrize(
    ("text", "most", "instead"),
    [
        ("1024xH100-SXM", 8, "128x8xH100-SXM"),
        ("2x16xH200", 8, "4x8xH200"),
        ("144xGB200", 72, "2x72xGB200"),
        ("12xMI300X", 8, "2x6xMI300X"),
        ("32xRTX-4090", 16, "2x16xRTX-4090"),
    ],
)
def test_no_node_is_larger_than_any_that_is_built(text, most, instead):
    with pytest.raises(InputError, match=rf"has more than {most}: write {instead} "):
        cluster_of(text)


@pytest.mark.parametrize("text", ["8xH100-SXM", "72xGB200", "2x72xGB300", "16xV100", "256xTPUv5e"])
def test_the_largest_nodes_and_racks_can_be_asked_for(text):
    assert cluster_of(text).num_devices == math.prod(int(n) for n in re.findall(r"(\d+)x", text))


def test_a_node_of_a_job_is_no_larger_either_unless_its_links_are_described():
    vast = Cluster(device=device("H100-SXM"), devices_per_node=1024, num_nodes=1)
    with pytest.raises(InputError, match="set num_nodes = 128 and devices_per_node = 8, or"):
        usual_tiers(vast)
    described = vast.replace(tiers=(network("nvlink", 1024, 3600, 1.0),))
    assert tiers_of(described)[0].num_devices == 1024


def test_prices_of_the_job_count_for_named_clusters():
    given = job(on=small_answer().job.cluster)
    (named,) = clusters_of(given, ["2x8xH100-SXM"], [], eight)
    assert named.prices == given.cluster.prices
    first, second = clusters_of(given, ["8xH100-SXM", "8xA100-80"], [3.0, 1.5], eight)
    assert first.prices.usd_per_device_hour.value == 3.0
    assert second.prices.usd_per_device_hour.value == 1.5
    assert second.prices.usd_per_gb_month.value == 0.02
    both = clusters_of(given, ["8xH100-SXM", "8xA100-80"], [4.0], eight)
    assert [each.prices.usd_per_device_hour.value for each in both] == [4.0, 4.0]
    for wrong in ([1.0, 2.0, 3.0], [-1.0], [float("nan")]):
        with pytest.raises(InputError, match="--price"):
            clusters_of(given, ["8xH100-SXM", "8xA100-80"], wrong, eight)


def test_an_unmeasured_machine_names_both_ways_out():
    cpu = Device(name="My CPU", kind="cpu")
    unmeasured = Cluster(device=cpu, devices_per_node=2, num_nodes=1)
    given = JobSpec.parse({**IMAGES, "cluster": {"num_nodes": 1}})
    with pytest.raises(InputError, match=r"`paceline bench`.*--cluster 8xH100-SXM"):
        clusters_of(given, [], [], lambda: unmeasured)


def test_bounds_are_the_most_and_must_not_contradict():
    assert bounds_of(["tp=4", "pp = 2"], LayoutSpec()) == {"tp": (1, 4), "pp": (1, 2)}
    for text in ("tp", "tp=0", "tp=-1", "=4", "tp=x"):
        with pytest.raises(InputError, match="--most"):
            bounds_of([text], LayoutSpec())
    with pytest.raises(InputError, match=r"forbids layout\.tp = 8"):
        bounds_of(["tp=4"], LayoutSpec(tp=8))


@pytest.mark.parametrize(
    ("text", "usd", "days"),
    [
        ("30000 USD, 10 days", 30000, 10),
        ("30,000 USD and 2 weeks", 30000, 14),
        ("12 hours", None, 0.5),
        ("$3.5M", 3.5e6, None),
        ("1e6 usd; 1 day", 1e6, 1),
        ("20k dollars", 20e3, None),
    ],
)
def test_budgets_are_understood(text, usd, days):
    assert budget_of(text) == (usd, days)


@pytest.mark.parametrize(
    "text",
    ["", "much", "30000", "30000 EUR", "10 days, 3 days", "0 USD", "-5 USD", "$5 days", "5 USD ca"],
)
def test_other_budgets_are_refused(text):
    with pytest.raises(InputError, match="is not of the form"):
        budget_of(text)


def test_tokens_become_steps():
    assert lengthened(job(), None) == job()
    assert lengthened(job(), 2e9).train.steps == -(-2_000_000_000 // (64 * 2048))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="--tokens"):
            lengthened(job(), wrong)
    with pytest.raises(InputError, match=r"set train\.steps"):
        lengthened(job(IMAGES), 1e9)
