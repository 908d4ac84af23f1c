"""Stragglers, failures, price and scaling efficiency (pure; goodput against drawn failures)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster, ClusterSpec
from paceline.plan.scale import (
    LARGE_RUN_MTBF,
    bill,
    blocking_save_s,
    checkpoint_bytes,
    daly_interval_s,
    device_mtbf_hours,
    goodput,
    job_mtbf_s,
    resilience,
    storage_usd_per_month,
    straggler_wait_s,
)


def _cluster(**prices: float) -> Cluster:
    device = {
        "name": "X",
        "kind": "cuda",
        "power_watts": {"value": 700.0, "origin": "assumed", "source": "test"},
    }
    return Cluster.parse(
        {"device": device, "devices_per_node": 8, "num_nodes": 8, "prices": prices}
    )


@pytest.mark.parametrize("num_ranks", [2, 8, 100, 1024])
def test_the_slowest_of_many_ranks_is_as_late_as_drawn_ones(num_ranks):
    drawn = np.random.default_rng(0).normal(size=(4000, num_ranks)).max(axis=1)
    error = 4 * drawn.std() / math.sqrt(len(drawn))
    assert straggler_wait_s(3.0, num_ranks) == pytest.approx(3 * drawn.mean(), abs=3 * error)


def test_the_expected_maximum_is_its_integral():
    x, dx = np.linspace(-9, 9, 40_001, retstep=True)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    below = (np.cumsum(density) - density / 2) * dx
    for n in 2.0 ** np.arange(21):
        mean = np.sum(x * n * density * below ** (n - 1)) * dx
        assert straggler_wait_s(1.0, n) == pytest.approx(mean, abs=1e-3)


def test_one_rank_waits_for_nobody_and_more_ranks_wait_longer():
    waits = straggler_wait_s(1.0, 2 ** np.arange(18))
    assert waits[0] == 0
    assert (np.diff(waits) > 0).all()
    assert (waits[1:] <= np.sqrt(2 * np.log(2.0 ** np.arange(1, 18)))).all()


def test_a_large_run_fails_as_often_as_published():
    hours = job_mtbf_s(LARGE_RUN_MTBF.value, 16384) / 3600
    assert hours == pytest.approx(3.1, abs=0.05)


def _kept_share(interval: float, save: float, restart: float, mtbf: float) -> tuple[float, float]:
    """Work kept over wall time of a job that is drawn failure by failure, and its error.

    Failures come at random moments, also while it saves and restarts.
    """
    rng = np.random.default_rng(1)
    intervals = 20_000
    wall = np.zeros(intervals)
    for index in range(intervals):
        failure = rng.exponential(mtbf)
        while failure < interval + save:  # work since the last checkpoint is lost
            wall[index] += failure
            repair = rng.exponential(mtbf)
            while repair < restart:  # it fails again before it works
                wall[index] += repair
                repair = rng.exponential(mtbf)
            wall[index] += restart
            failure = rng.exponential(mtbf)
        wall[index] += interval + save
    return interval / wall.mean(), interval * wall.std() / wall.mean() ** 2 / math.sqrt(intervals)


@pytest.mark.parametrize(
    ("interval", "save", "restart", "mtbf"),
    [(600, 20, 300, 11_160), (200, 5, 600, 1400), (3000, 60, 900, 2000), (10, 10, 10, 10)],
)
def test_goodput_is_that_of_drawn_failures(interval, save, restart, mtbf):
    kept, error = _kept_share(interval, save, restart, mtbf)
    assert goodput(interval, save, restart, mtbf) == pytest.approx(kept, abs=4 * error)


def test_goodput_is_the_readable_line_where_everything_is_short():
    tau, save, restart, mtbf = 600.0, 20.0, 300.0, 30_000.0
    line = 1 - save / tau - (tau / 2 + restart) / mtbf
    assert goodput(tau, save, restart, mtbf) == pytest.approx(line, abs=0.003)
    assert goodput(100.0, 1.0, 1e7, 10.0) == 0  # never comes back: no overflow, no NaN


@given(save=st.floats(0.1, 100), mtbf=st.floats(1000, 1e6), restart=st.floats(0, 2000))
def test_dalys_interval_is_the_best_one(save, mtbf, restart):
    best = daly_interval_s(save, mtbf)  # D up to a tenth of M
    kept = goodput(best, save, restart, mtbf)
    others = goodput(best * np.array([0.5, 0.8, 0.95, 1.05, 1.25, 2.0]), save, restart, mtbf)
    assert (others <= kept * 1.0005).all()
    assert 0 < kept <= 1


def test_daly_agrees_with_young_where_saving_is_quick():
    assert daly_interval_s(1.0, 1e6) == pytest.approx(np.sqrt(2 * 1e6), rel=1e-3)
    assert daly_interval_s(600.0, 1000.0) == 1000.0  # D >= M / 2


@given(num_devices=st.integers(1, 131_072), num_params=st.floats(1e8, 2e12))
def test_goodput_falls_with_devices_and_stays_a_share(num_devices, num_params):
    one = resilience(_cluster(), [num_devices, 2 * num_devices], checkpoint_bytes(num_params))
    assert one is not None
    assert (one.goodput > 0).all()
    assert (one.goodput <= 1).all()
    # More devices fail more often, though each copies less.
    assert one.mtbf_s[1] == one.mtbf_s[0] / 2
    assert one.save_s[1] <= one.save_s[0]


def test_a_slow_storage_stretches_the_interval():
    state = checkpoint_bytes(405e9)
    fast = resilience(_cluster(), 16384, state)
    slow = resilience(_cluster(), 16384, state, storage_bytes_per_s=1e9)
    assert slow.interval_s == state / 1e9 > fast.interval_s
    assert slow.goodput < fast.goodput


def test_reliability_is_given_or_published_or_unknown():
    cluster = _cluster()
    assert device_mtbf_hours(cluster) == LARGE_RUN_MTBF
    own = Cluster.parse({**cluster.__dict__, "device_mtbf_hours": 1000})
    one = {"devices_per_node": 1, "num_nodes": 1}
    assert device_mtbf_hours(own).value == 1000
    cpu = Cluster.parse({"device": {"name": "cpu", "kind": "cpu"}, **one})
    assert device_mtbf_hours(cpu) is None
    assert resilience(cpu, 4, 1e9) is None


def test_a_save_blocks_for_the_copy_of_a_share():
    assert blocking_save_s(160e9, 8) == 3.0
    assert checkpoint_bytes(70e9) == 840e9


def test_a_bill_is_device_hours_times_the_price_over_goodput():
    run = bill(_cluster(usd_per_device_hour=2.5), 64, 1.8, num_steps=1000, goodput=0.9)
    assert run.device_hours == pytest.approx(64 * 0.5 / 0.9)
    assert run.usd == pytest.approx(80 / 0.9)
    assert run.energy_kwh == pytest.approx(64 * 0.5 / 0.9 * 0.7)
    site = bill(_cluster(power_overhead=1.5), 64, 1.8, num_steps=1000, goodput=0.9)
    assert site.energy_kwh == pytest.approx(1.5 * run.energy_kwh)


def test_what_is_unknown_stays_unknown():
    device = {"name": "X", "kind": "cuda"}
    unknown = Cluster.parse({"device": device, "devices_per_node": 8, "num_nodes": 2})
    run = bill(unknown, [8, 16], 1.0)
    assert run.usd is None
    assert run.energy_kwh is None
    assert storage_usd_per_month(unknown, 1e12) is None


@pytest.mark.parametrize(
    ("prices", "words"),
    [
        (
            {"usd_per_device_hour": -2},
            "usd_per_device_hour.value = -2 can't be used: it must be greater than or equal to 0",
        ),
        ({"usd_per_gb_month": float("nan")}, "nan can't be used: it must be a finite number"),
        ({"power_overhead": 0}, "0.0 was given; give a finite number above 0"),
        ({"usd_per_device_hours": 2}, "did you mean usd_per_device_hour"),
        ({"usd_per_gb_month": "cheap"}, "can't be used"),
    ],
)
def test_prices_that_cant_be_are_refused_in_one_sentence(prices, words):
    with pytest.raises(InputError) as error:
        ClusterSpec.parse({"prices": prices}, "cluster")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plain_number_is_a_price_without_a_source():
    figure = _cluster(usd_per_gb_month=0.1).prices.usd_per_gb_month
    assert figure.origin == "assumed"
    full = {"value": 0.1, "origin": "cited", "source": "the contract"}
    stated = ClusterSpec.parse({"prices": {"usd_per_gb_month": full}}).prices
    assert stated.usd_per_gb_month.origin == "cited"


def test_storage_of_checkpoints():
    # 30 of 420 GB at 0.02 USD per GB-month.
    assert storage_usd_per_month(_cluster(usd_per_gb_month=0.02), 420e9, 30) == pytest.approx(252)


def test_scalars_and_columns_agree():
    sizes = np.array([8, 1024, 131_072])
    together = resilience(_cluster(), sizes, 1e12)
    alone = [resilience(_cluster(), size, 1e12).goodput for size in sizes]
    assert together.goodput == pytest.approx(alone)
