"""What failures leave of a run: the formula against a run that is drawn event by event (pure)."""

import io
import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.config.comm import LocalUpdates
from paceline.config.elastic import Elastic
from paceline.config.hardware import Cluster
from paceline.config.job import JobOnCluster
from paceline.plan import scale
from paceline.plan.answer.answer import Answer, to_json
from paceline.plan.answer.describe import goodput_sentences
from paceline.plan.answer.find import answer
from paceline.plan.answer.page import render
from paceline.plan.answer.show import show
from paceline.plan.goodput import (
    Exposure,
    Policy,
    best_spares,
    goodput_of,
    goodput_outlook,
    lost_with_its_copy_s,
)
from tests.plan.answers import eight, job, small_answer

HOUR = 3600.0
DISK = Policy("disk", True, 900.0, 20.0, 60.0, grow_s=10.0)
COPIES = Policy("copies", True, 4.0, 0.05, 5.0, grow_s=5.0)
AGAIN = Policy("again", False, 900.0, 20.0, 600.0)


def _exposure(num: int, mtbf_hours: float, return_hours: float, batch: int | None = None):
    """N nodes of one data rank each; a batch of so many micro-batches, or any."""
    counts = [
        max((k for k in range(1, n + 1) if (batch or k) % k == 0), default=0)
        for n in range(num + 1)
    ]
    counts = counts if batch else list(range(num + 1))
    return Exposure(num, mtbf_hours * HOUR, return_hours * HOUR, tuple(counts), tuple(counts))


@dataclass
class _Run:
    """A run that is drawn: nodes fail and return, each for itself, at any time."""

    exposure: Exposure
    policy: Policy

    def used(self, there: int) -> int:
        some = min(there, self.exposure.num_nodes)
        least = self.policy.min_nodes if self.policy.is_elastic else self.exposure.num_nodes
        return self.exposure.nodes_used[some] if some >= least else 0

    def simulated(self, rng: np.random.Generator, end_s: float) -> dict[str, float]:
        """Parts of the time by what was done in it."""
        exposure, policy = self.exposure, self.policy
        total = exposure.num_nodes + policy.spares
        there, now, stands_until = total, 0.0, 0.0
        whole, found = policy.interval_s + policy.save_s, dict.fromkeys(_PARTS, 0.0)
        left, pending = whole, [0.0, 0.0]  # of the interval; seconds and progress not yet kept
        while now < end_s:
            fails = there / exposure.node_mtbf_s
            returns = (total - there) / exposure.return_s
            until = now + rng.exponential(1 / (fails + returns))
            used = self.used(there)
            if not used:
                found["waiting"] += until - now
            else:
                stands = max(0.0, min(until, stands_until) - now)
                found["going_on"] += stands
                works = until - now - stands
                speed = used / exposure.num_nodes
                if works >= left:
                    more, rest = divmod(works - left, whole)
                    done = left + more * whole
                    share = policy.interval_s / whole
                    found["ratio"] += (pending[0] + done) * share
                    found["progress"] += (pending[1] + done * speed) * share
                    found["saving"] += (1 + more) * policy.save_s
                    works, left, pending = rest, whole, [0.0, 0.0]
                left -= works
                pending = [pending[0] + works, pending[1] + works * speed]
            now = until
            if rng.random() < fails / (fails + returns):
                is_used = rng.random() < used / there
                there -= 1
                if is_used:
                    found["again"] += pending[0]
                    left, pending = whole, [0.0, 0.0]
                    stands_until = now + policy.restart_s
            else:
                there += 1
                if self.used(there) > used:
                    pause = policy.grow_s if used else policy.restart_s
                    stands_until = max(stands_until, now + pause)
        return {name: value / now for name, value in found.items()}


_PARTS = ("ratio", "progress", "saving", "again", "going_on", "waiting")

CASES = {
    "elastic from disk": (_exposure(8, 20, 1), DISK),
    "elastic from copies": (_exposure(8, 20, 1), COPIES),
    "many nodes": (_exposure(64, 100, 2), COPIES),
    "spares": (_exposure(8, 20, 1), replace(COPIES, spares=2)),
    "spares from disk": (_exposure(8, 20, 1), replace(DISK, spares=1)),
    "started again": (_exposure(4, 50, 1), AGAIN),
    "started again, with spares": (_exposure(4, 50, 1), replace(AGAIN, spares=2)),
    "a batch that few numbers divide": (_exposure(8, 20, 1, batch=8), COPIES),
    "at least six of eight": (_exposure(8, 20, 1), replace(COPIES, min_nodes=6)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_drawn_runs_come_to(name):
    """Within four standard errors of 40 runs, and half a thousandth for what the formula leaves
    out (intervals that begin with one node more than they end with)."""
    exposure, policy = CASES[name]
    rng = np.random.default_rng(3)
    mean_s = exposure.node_mtbf_s / exposure.num_nodes
    runs = [_Run(exposure, policy).simulated(rng, 150 * mean_s) for _ in range(40)]
    expected = goodput_of(exposure, policy)
    for part in _PARTS:
        drawn = np.array([run[part] for run in runs])
        error = 4 * drawn.std(ddof=1) / math.sqrt(len(drawn)) + 5e-4
        assert getattr(expected, part) == pytest.approx(drawn.mean(), abs=error), part


def test_without_a_node_ever_away_it_is_dalys():
    exposure = _exposure(8, 20, 1e-9)
    for policy in (DISK, AGAIN, COPIES):
        policy = replace(policy, grow_s=0.0)
        mtbf = exposure.node_mtbf_s / 8
        daly = scale.goodput(policy.interval_s, policy.save_s, policy.restart_s, mtbf)
        found = goodput_of(exposure, policy)
        assert found.goodput == pytest.approx(float(daly), rel=1e-6)
        assert found.per_node == pytest.approx(float(daly), rel=1e-6)


@given(
    num=st.integers(1, 200),
    mtbf=st.floats(5, 1e5),
    back=st.floats(0.01, 50),
    spares=st.integers(0, 20),
    policy=st.sampled_from([DISK, COPIES, AGAIN]),
)
def test_parts_of_the_time_are_parts_and_sum_to_it(num, mtbf, back, spares, policy):
    found = goodput_of(_exposure(num, mtbf, back), replace(policy, spares=spares))
    parts = [found.ratio, found.saving, found.again, found.going_on, found.waiting]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) > -1e-9
    assert 0 <= found.per_node <= found.progress * (1 + 1e-9)
    assert found.ratio <= found.goodput <= 1
    assert found.progress <= found.ratio * (1 + 1e-9)


def test_elasticity_copies_and_spares_each_keep_more():
    exposure = _exposure(256, 6000, 1)
    kept = [goodput_of(exposure, each).progress for each in (AGAIN, DISK, COPIES)]
    assert kept == sorted(kept)
    assert goodput_of(exposure, replace(COPIES, spares=2)).progress > kept[-1]


def test_as_many_spares_pay_as_give_most_for_what_is_paid():
    even = best_spares(_exposure(256, 6000, 1), COPIES)
    assert even.policy.spares == 0  # 255 nodes are nearly as fast as 256: none pays
    uneven = best_spares(_exposure(256, 6000, 1, batch=256), COPIES)
    assert uneven.policy.spares >= 1  # 255 nodes work as 128
    others = [
        goodput_of(_exposure(256, 6000, 1, batch=256), replace(COPIES, spares=num)).per_node
        for num in range(20)
    ]
    assert uneven.per_node == max(others)


def test_pairs_of_losses_are_as_rare_as_drawn_ones():
    exposure, window = _exposure(16, 10, 1), 60.0
    rng = np.random.default_rng(0)
    mean_s = exposure.node_mtbf_s / exposure.num_nodes
    losses = rng.exponential(mean_s, 400_000).cumsum()
    nodes = rng.integers(0, exposure.num_nodes, len(losses))
    close = np.diff(losses) < window
    pairs = np.count_nonzero(close & (nodes[1:] == (nodes[:-1] + 1) % exposure.num_nodes))
    expected = losses[-1] / lost_with_its_copy_s(exposure, window)
    assert pairs == pytest.approx(expected, abs=4 * math.sqrt(expected))


# ---- in the planner's answers --------------------------------------------------------------------


def _given(**more: object) -> JobOnCluster:
    reliability = {"device_mtbf_hours": 50677.0, **more}
    return job(on=Cluster.parse({**vars(eight()), "num_nodes": 16, **reliability}))


def _shown(found: Answer) -> str:
    out = io.StringIO()
    show(found, Console(file=out, width=80, highlight=False), 3)
    return out.getvalue()


def test_without_a_rate_of_failures_nothing_of_it_is_told():
    found = small_answer()
    assert found.goodput is None
    assert "goodput" not in to_json(found)
    assert "node_return_hours" not in json.dumps(to_json(found))
    assert "failures leave" not in _shown(found) + render(found)


def test_with_one_it_is_told_everywhere_in_the_same_figures():
    found = answer(_given())
    assert found.goodput is not None
    told = json.loads(json.dumps(to_json(found)))["goodput"]
    assert told["node_mtbf_s"] == pytest.approx(50677 * 3600 / 8)
    assert told["return_s"] == 3600
    names = [one["policy"]["name"] for one in told["found"]]
    assert names[0] == "started again"
    assert names[-1].startswith("elastic")
    text = " ".join(_shown(found).split())
    page = render(found)
    for words in ("failures are met by", "started again", "elastic.spares = "):
        assert words in text
        assert words in page
    assert max(map(len, _shown(found).splitlines())) <= 80


def test_a_later_return_costs_more_and_asked_spares_are_among_the_rows():
    soon, late = answer(_given()), answer(_given(node_return_hours=48.0))
    assert soon.goodput is not None
    assert late.goodput is not None
    assert late.goodput.found[0].ratio < soon.goodput.found[0].ratio
    asked = _given().replace(elastic=Elastic(min_nodes=8, spares=3))
    assert soon.best is not None
    found = goodput_outlook(asked, soon.best, 1e9)
    assert found is not None
    assert {3} <= {one.policy.spares for one in found.found if one.policy.is_elastic}
    assert all(one.policy.min_nodes == 8 for one in found.found if one.policy.is_elastic)


def test_a_batch_that_one_node_fewer_cannot_share_is_told():
    best = small_answer().best
    assert best is not None
    layout = best.layout.replace(dp=128, fsdp=1, tp=1, pp=1, cp=1, ep=1, micro_batch=1)
    one, told = replace(best, layout=layout), []
    for batch, train in ((128, 8), (120 * 128, 15)):
        asked = _given()
        asked = asked.replace(train=asked.train.replace(global_batch=batch))
        found = goodput_outlook(asked, one, 1e9)
        assert found is not None
        assert found.one_fewer == train
        told.append("share out the micro-batches" in " ".join(goodput_sentences(found)))
    assert told == [True, False]


def test_a_node_takes_the_whole_worker_of_local_updates_out():
    best = small_answer().best
    assert best is not None
    layout = best.layout.replace(dp=8, fsdp=16, tp=1, pp=1, cp=1, ep=1, micro_batch=1)
    asked = _given()
    asked = asked.replace(
        train=asked.train.replace(global_batch=112 * 128),
        comm=asked.comm.replace(local=LocalUpdates(method="diloco")),
    )
    found = goodput_outlook(asked, replace(best, layout=layout), 1e9)
    assert found is not None
    assert found.one_fewer == 14


def test_replicas_on_other_nodes_need_no_copies():
    best = small_answer().best
    assert best is not None
    ways = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
    for layout, holds in (
        ({"dp": 128, "fsdp": 1}, True),
        ({"dp": 16, "fsdp": 8}, True),
        ({"dp": 1, "fsdp": 128}, False),
        ({"dp": 2, "fsdp": 4, "pp": 16}, False),  # both replicas of a stage on one node
    ):
        one = replace(best, layout=best.layout.replace(**{**ways, **layout}))
        found = goodput_outlook(_given(), one, 1e9)
        assert found is not None
        assert (found.lost_with_its_copy_s is None) == holds
