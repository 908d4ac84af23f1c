"""Calibration: constants found again from steps that were made with them; pure functions only."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, decided, read_cluster, read_job, to_raw, to_toml
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import CONSTANTS, Stack
from paceline.observe.run import Run
from paceline.plan.calibrate import (
    FITTED,
    CalibrationSample,
    MeasuredJob,
    calibrate_from_run,
    fit,
    fit_constants,
    predicted_step_s,
    tangent,
    with_constants,
)
from paceline.plan.points import Setting
from paceline.plan.price.step import predict
from paceline.plan.search.choose import plan_job

# A made-up machine whose step is a sum of two terms: fast, and its answer is known.
WORK = {"matmul_time": 3.0, "memory_time": 1.0}


def job_on_a100() -> Job:
    one = ('cluster.device="A100-80"', "cluster.devices_per_node=1", "cluster.num_nodes=1")
    return decided(read_job(None, one).replace(layout=layout(micro_batch=4)))


def layout(micro_batch: int = 1, dp: int = 1) -> Layout:
    return Layout(dp=dp, micro_batch=micro_batch, precision="bf16")


def setting(hidden: int = 1024, stack: Stack | None = None, devices: int = 1) -> Setting:
    model = Model(
        vocab_size=32000,
        hidden_size=hidden,
        ffn_size=4 * hidden,
        num_layers=4,
        num_heads=8,
        max_seq_len=1024,
    )
    cluster = Cluster.parse({"device": "A100-80", "devices_per_node": devices, "num_nodes": 1})
    return Setting(model, cluster, 1024, 8, stack or Stack())


def two_terms(wide: float, constants: Mapping[str, float]) -> float:
    """Seconds that depend on two constants, in proportions that a network's width sets."""
    return sum(
        constants.get(name, 1.0) * share * (wide if name == "matmul_time" else 1.0)
        for name, share in WORK.items()
    )


def samples(truth: dict[str, float], noise: float = 0.0) -> list[CalibrationSample]:
    drawn = np.random.default_rng(0)
    return [
        CalibrationSample(
            partial(two_terms, wide), two_terms(wide, truth) * float(np.exp(noise * error))
        )
        for wide, error in zip((0.25, 0.5, 1, 2, 4, 8), drawn.normal(size=6), strict=True)
    ]


def test_constants_are_found_again() -> None:
    truth = {"matmul_time": 1.3, "memory_time": 1.6}
    fitted = fit_constants(samples(truth) * 20, {}, tuple(truth))
    assert fitted == pytest.approx(truth, rel=0.03)


def test_one_step_moves_all_it_depends_on_and_no_more() -> None:
    """What the steps say nothing about keeps its default."""
    fitted = fit_constants(samples({"matmul_time": 1.4})[3:4], {})
    assert 1.0 < fitted["matmul_time"] < 1.4
    for name in set(FITTED) - set(WORK):
        assert fitted[name] == pytest.approx(CONSTANTS[name].default)


@given(
    st.fixed_dictionaries({name: st.floats(0.05, 20.0) for name in WORK}),
    st.floats(0, 0.5),
)
@settings(max_examples=20, deadline=None)
def test_constants_stay_within_their_bounds(truth: dict[str, float], noise: float) -> None:
    fitted = fit_constants(samples(truth, noise), {}, tuple(WORK))
    for name, value in fitted.items():
        assert CONSTANTS[name].low * 0.999 <= value <= CONSTANTS[name].high * 1.001


def test_a_gross_error_hardly_moves_the_fit() -> None:
    truth = {"matmul_time": 1.2, "memory_time": 1.2}
    good = samples(truth) * 4
    bad = [*good, replace(good[0], step_s=good[0].step_s * 20)]
    fitted = fit_constants(bad, {}, tuple(truth))
    assert fitted == pytest.approx(truth, rel=0.08)


def test_weights_count() -> None:
    slow, fast = (samples({"matmul_time": value})[5] for value in (1.4, 0.8))
    names = ("matmul_time",)
    mostly_slow = [replace(slow, weight=9.0), replace(fast, weight=1.0)]
    mostly_fast = [replace(slow, weight=1.0), replace(fast, weight=9.0)]
    assert (
        fit_constants(mostly_slow, {}, names)["matmul_time"]
        > fit_constants(mostly_fast, {}, names)["matmul_time"] * 1.2
    )


def test_a_slow_host_is_found_though_no_gradient_leads_there() -> None:
    """By default the host is faster than the device needs: then its pace is no matter."""

    def seconds(constants: Mapping[str, float]) -> float:
        return max(1.0, constants["launch_us"] / 20)

    fitted = fit_constants([CalibrationSample(seconds, 2.0)] * 6, {}, ("launch_us",))
    assert fitted["launch_us"] == pytest.approx(40.0, rel=0.05)


def test_the_planner_finds_its_own_constants_again() -> None:
    def priced(one: Setting, at: Layout, constants: Mapping[str, float]) -> float:
        return predicted_step_s(replace(one, stack=with_constants(one.stack, constants)), at)

    truth = {"matmul_time": 1.3, "launch_us": 25.0}
    made = [(setting(hidden), layout(size)) for hidden in (256, 2048) for size in (1, 8)]
    slow = [priced(one, at, truth) for one, at in made]
    cases = [MeasuredJob(one, at, seconds) for (one, at), seconds in zip(made, slow, strict=True)]
    fitted = fit(cases * 3, Stack(), "a slow host")
    again = [priced(one, at, fitted.constants) for one, at in made]
    assert again == pytest.approx(slow, rel=0.03)


def test_the_fit_says_where_it_comes_from_and_keeps_the_features() -> None:
    stack = Stack(attention="unfused", constants={"launch_us": 9.0})
    cases = [MeasuredJob(setting(), layout(), 0.5), MeasuredJob(setting(512), layout(), 0.3)]
    fitted = fit(cases, stack, "a test")
    assert fitted.attention == "unfused"
    assert fitted.origin == "fitted to 2 steps of a test"
    assert set(fitted.constants) == set(FITTED)


def test_the_short_way_to_seconds_is_that_of_predict() -> None:
    for made, at in ((setting(), layout()), (setting(devices=2), layout(dp=2))):
        assert predicted_step_s(made, at) == pytest.approx(predict(made, at).step_s, rel=1e-12)


def test_tangents_agree_near_the_start() -> None:
    near = {"matmul_time": 1.05, "memory_time": 0.97}
    for sample in samples({"matmul_time": 1.2}):
        line = tangent(sample, {}, tuple(WORK))
        assert line.seconds(near) == pytest.approx(sample.seconds(near), rel=0.003)
        assert line.step_s == sample.step_s


def test_intervals_are_narrower_once_constants_are_fitted() -> None:
    def width(stack: Stack) -> float:
        low, high = predict(setting(stack=stack), layout()).interval_s
        return high / low

    fitted = Stack(constants={"launch_us": 6.0}, origin="fitted to 6 steps of a test")
    assert 1 < width(fitted) < width(Stack())


def test_nothing_to_fit_to_is_refused() -> None:
    with pytest.raises(InputError, match="no measured step"):
        fit([], Stack(), "nothing")
    with pytest.raises(InputError, match="above 0 s"):
        fit([MeasuredJob(setting(), layout(), 0.0)], Stack(), "nothing")


def test_a_run_calibrates_the_cluster_it_ran_on(tmp_path) -> None:
    job = job_on_a100()
    plan = plan_job(job, job.cluster)
    (predicted,) = plan.ranked
    run = Run(tmp_path / "slow")
    run.path.mkdir()
    run.write("job.toml", to_toml(plan.job))
    lines = [{"step": step, "step_time_s": 1.5 * predicted.step_s} for step in range(1, 9)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    calibrated = calibrate_from_run(run)
    assert calibrated.stack is not None
    assert "6 steps of slow" in calibrated.stack.origin
    again = predict(Setting.of(plan.job.replace(cluster=calibrated)), plan.job.layout)
    assert again.step_s == pytest.approx(1.5 * predicted.step_s, rel=0.1)
    written = tmp_path / "cluster.toml"
    written.write_text(tomli_w.dumps(to_raw(calibrated)))
    assert read_cluster(written) == calibrated


def test_a_run_without_steps_is_refused(tmp_path) -> None:
    run = Run(tmp_path / "new")
    run.path.mkdir()
    run.write("job.toml", to_toml(plan_job(job_on_a100(), job_on_a100().cluster).job))
    with pytest.raises(InputError, match="has no finished step"):
        calibrate_from_run(run)
