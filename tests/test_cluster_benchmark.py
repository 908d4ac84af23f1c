"""The benchmark of jobs on machines that are taken away: what is drawn, and what its page says."""

import argparse
from functools import partial

import pytest

from benchmarks.cluster.__main__ import _page
from benchmarks.cluster.trace import STEP_S, draw


def test_a_trace_is_its_seeds_and_has_what_was_asked_for():
    drawn = partial(
        draw, num_losses=50, gap_s=20.0, away_s=(10.0, 60.0), node_seconds=1000.0, lost_share=0.2
    )
    trace = drawn(3)
    assert trace == drawn(3) != drawn(4)
    assert {one.kind for one in drawn(3, lost_share=0.0).losses} == {"preempted"}
    assert len(trace.losses) == 200, "they go on"
    times = [one.at_s for one in trace.losses]
    assert times == sorted(times)
    assert 15 < times[-1] / 200 < 25
    assert {one.kind for one in trace.losses} == {"preempted", "lost"}
    arrivals = [job.arrives_s for job in trace.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    work_s = sum(job.steps for job in trace.jobs) * STEP_S
    assert work_s == pytest.approx(1000, abs=STEP_S * len(trace.jobs))


def options_of(**more: object) -> argparse.Namespace:
    asked = {"seed": 0, "losses": 5, "gap": 20.0, "away": (10, 60), "node_seconds": 100.0}
    return argparse.Namespace(**{**asked, "lost_share": 0.2, "alone": False, **more})


def outcome(contestant: str, ended_s: float, **more: object) -> dict:
    hits = [{"kind": "preempted"}] * 4 + [{"kind": "lost"}]
    given = {
        "contestant": contestant,
        "ended_s": ended_s,
        "num_left": 0,
        "hits": hits,
        "steps_again": {"job-0": 2},
        "submitted_again": [],
        "held_device_s": 900,
        "seen_device_s": 901.2,
        "ledger_device_s": 900,
        "saved": 4,
        "num_preempted": 4,
    }
    return {**given, **more}


@pytest.mark.parametrize(
    ("ours", "peer_s", "is_reached"),
    [
        ({}, 160.0, True),
        ({}, 140.0, False),
        ({"hits": [{"kind": "preempted"}] * 4}, 160.0, False),
        ({"saved": 3}, 160.0, False),
        ({"ledger_device_s": 870}, 160.0, False),
    ],
)
def test_the_goal_is_reached_by_time_ledger_and_saves_together(ours, peer_s, is_reached):
    results = [outcome("paceline", 100.0, **ours), outcome("torchx", peer_s)]
    page, found = _page(results, options_of())
    assert found is is_reached
    assert f"| torchx | {peer_s:.0f} s | {peer_s / 100:.2f} | 4 | 1 | 2 | 0 | 900 |" in page
    assert "901 were seen in squeue" in page


def test_a_peer_that_is_given_up_has_its_jobs_named():
    results = [outcome("paceline", 100.0), outcome("torchx", 160.0, num_left=3)]
    page, found = _page(results, options_of())
    assert found
    assert "| torchx | 3 jobs not, 160 s | 1.60 |" in page


@pytest.mark.parametrize(("by_sacct_s", "is_reached"), [(900, True), (899, False)])
def test_of_preemptions_alone_the_ledger_is_the_sum_of_sacct(by_sacct_s, is_reached):
    hits = [{"kind": "preempted"}] * 5
    ours = outcome("paceline", 100.0, hits=hits, saved=5, held_device_s=by_sacct_s)
    page, found = _page([ours], options_of(lost_share=0.0, alone=True))
    assert found is is_reached
    assert f"sacct has {by_sacct_s}.\n" in page
