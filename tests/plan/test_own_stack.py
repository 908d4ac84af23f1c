"""What stands behind predictions of our own runtime on a GPU that nobody measured it on."""

from collections import defaultdict
from dataclasses import replace

import pytest

from paceline.config.catalogue.own_stack import error_of, own_stack
from paceline.config.stack import Stack
from paceline.plan.answer.describe import known
from paceline.plan.points import Setting
from paceline.plan.price.step import predict
from paceline.plan.residuals import relative_error
from paceline.plan.search.choose import plan_job
from paceline.published import read_runs
from tests.plan.planned import layout, setting
from tests.plan.test_calibrate import job_on_a100
from tools.derive_own_stack import RUNS, derived


def test_like_stacks_are_in_the_constants_and_named_in_the_answer():
    one = setting(stack=own_stack("cuda"))
    found = predict(one, layout(fsdp=16))
    assert found.step_s > predict(setting(), layout(fsdp=16)).step_s
    assert "torchtitan" in found.assumptions["stack.matmul_time"]
    assert found.assumptions["stack.matmul_time"].startswith("cited")
    assert "torchtitan 1.1" in known(found)
    assert "torchtitan" not in known(predict(setting(), layout(fsdp=16)))
    assert found.interval_s[1] / found.step_s == pytest.approx(1 + relative_error(one))
    assert relative_error(one) >= (error_of(one.stack) or 0) > relative_error(setting())


def test_a_job_on_gpus_has_them_unless_its_cluster_has_a_stack():
    job = plan_job(job_on_a100(), job_on_a100().cluster).job
    assert Setting.of(job).stack == own_stack("cuda")
    measured = Stack(constants={"launch_us": 9.0})
    known = job.replace(cluster=job.cluster.replace(stack=measured))
    assert Setting.of(known).stack == measured


def test_cpus_and_what_was_measured_are_left_alone():
    assert own_stack("cpu") == Stack()
    fitted = own_stack("cuda").replace(origin="fitted to 6 steps of a test")
    assert error_of(fitted) is None


def test_the_interval_holds_four_of_five_lines_of_like_stacks():
    """Of both sources; the file's error is of each by the other."""
    within = defaultdict(list)
    for run in read_runs([RUNS]):
        work = run.work
        if not run.step_s or work is None or work.software.family != "fsdp compiled":
            continue
        plain = work.setting.stack.replace(constants={})
        seconds = replace(work, setting=replace(work.setting, stack=plain)).seconds(
            own_stack("cuda").constants
        )
        off = max(seconds / run.step_s, run.step_s / seconds) - 1
        within[run.group].append(off <= (error_of(own_stack("cuda")) or 0))
    assert set(within) == {"torchtitan", "torchao"}
    assert all(sum(some) >= 0.8 * len(some) for some in within.values())


def test_the_file_is_what_the_tool_derives():
    found = derived(read_runs([RUNS]))
    assert found["constants"] == pytest.approx(own_stack("cuda").constants, abs=0.02)
    assert found["error"] == pytest.approx(error_of(own_stack("cuda")), abs=0.02)
