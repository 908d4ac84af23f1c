"""The benchmark of the planner on CPU ranks: its Jobs and figures (pure)."""

import json
from dataclasses import replace

import pytest

from benchmarks.planner_cpu import (
    CHOICES,
    MOST_FLOPS,
    Case,
    Choice,
    all_layouts,
    describe,
    random_jobs,
    rows,
    sentences,
    verdict,
    write_results,
)
from benchmarks.provenance import taken_with
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job

CPU = Device(name="here", kind="cpu", precisions=("fp64", "fp32"))
CASE = Case(2, "job-1", "h64 dp2", 0.11, 0.1, 0.01, 95.0, 100.0, {"matmul": 0.11}, {"params": 95.0})


def cluster_of(ranks: int) -> Cluster:
    return Cluster(device=CPU, devices_per_node=ranks, num_nodes=1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_jobs_can_run_and_depend_on_the_seed_alone(ranks):
    jobs = random_jobs(cluster_of(ranks), 40, seed=3)
    assert jobs == random_jobs(cluster_of(ranks), 40, seed=3)
    assert jobs != random_jobs(cluster_of(ranks), 40, seed=4)
    for job in jobs:
        assert isinstance(job, Job)
        assert job.layout.num_ranks == ranks
        tokens = job.train.global_batch * job.train.seq_len
        assert tokens * job.model.train_flops_per_token(job.train.seq_len) <= MOST_FLOPS


def test_random_jobs_use_every_technique():
    jobs = random_jobs(cluster_of(4), 150, seed=0)
    for axis in ("dp", "fsdp", "tp", "pp", "cp"):
        assert {1, 2, 4} <= {getattr(job.layout, axis) for job in jobs}
    assert {job.layout.zero for job in jobs} == {0, 1, 2, 3}
    assert {job.layout.recompute for job in jobs} == {"none", "full", "selective"}
    assert len({job.layout.schedule for job in jobs}) >= 6
    assert any(job.accumulation > 1 for job in jobs)
    assert len({describe(job) for job in jobs}) > 100


@pytest.mark.parametrize(("ranks", "most"), [(1, 4), (2, 10), (4, 10)])
def test_a_space_has_every_axis_on_all_ranks(ranks, most):
    for number in range(len(CHOICES)):
        jobs = all_layouts(cluster_of(ranks), number)
        assert len({job.name for job in jobs}) == len(jobs)
        assert most - 3 <= len(jobs) <= most
        assert len({describe(job) for job in jobs}) == len(jobs)


def test_figures_say_how_far_off_and_what_the_choice_costs(tmp_path):
    best = replace(CASE, name="job-2", layout="h64 tp2", predicted_s=0.12, measured_s=0.08)
    assert CASE.step_error == pytest.approx(0.1)
    assert CASE.memory_error == pytest.approx(-0.05)
    choice = Choice.of(0, [CASE, best])
    assert (choice.chosen, choice.best) == ("h64 dp2", "h64 tp2")
    assert choice.regret == pytest.approx(0.25)
    found = verdict([CASE, best, CASE], [choice])
    assert found == pytest.approx({"step": 0.1, "memory": 0.05, "choice": 0.25})
    assert any("choice: 25.0%, wanted 5% or less" in text for text in sentences([CASE], [choice]))
    unseen = replace(CASE, measured_bytes=None)
    assert rows([unseen])[0][-2:] == ("", "")
    about = taken_with("benchmarks.planner_cpu")
    file = write_results(tmp_path, about, [CASE, best], [choice])
    assert json.loads(file.read_text())["cases"][1]["measured_s"] == 0.08
    assert "h64 tp2" in (tmp_path / "planner_cpu.md").read_text()
