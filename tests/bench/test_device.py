"""Rates of a device: the grid and its curves with a clock that knows (pure), then a real one."""

import time
from collections.abc import Callable
from itertools import product

import pytest
import torch

from paceline.bench.clock import RankTimer
from paceline.bench.device import DeviceBench, SizeGrid, measure_device, num_measurements
from paceline.comm.rendezvous import Ranks
from paceline.config.hardware import Device, Figure

TINY = SizeGrid(
    m=(8, 64), n=(16, 32), k=(16, 32), seq_len=(16, 32), head_dim=(8, 16), tokens=64,
    bytes=(1024, 65536), optimizer_params=4096,
)  # fmt: skip
CPU = Device(name="here", kind="cpu", precisions=("fp64", "fp32"))
REAL = RankTimer(Ranks(), block_s=1e-3, num_blocks=3)


class Knowing(RankTimer):
    """Calls once, and says that it took a fixed time."""

    def seconds(self, *calls: Callable[[], object]) -> float:
        for call in calls:
            call()
        return 1e-3


def test_a_product_is_what_the_curve_is_over():
    bench = DeviceBench(Knowing(Ranks()), TINY, "test")
    seconds = bench.products(torch.float32)
    assert seconds == [1e-3] * 8
    device = CPU.replace(
        peak_flops={"fp32": Figure(value=1e9, origin="assumed", source="this test")}
    )
    curve = bench.curve(device, "fp32", seconds)
    wanted = [2 * m * n * k / 1e-3 / 1e9 for m, n, k in product((8, 64), (16, 32), (16, 32))]
    assert curve.share == pytest.approx(wanted)


def test_the_host_is_taken_off_but_never_all_of_a_time():
    assert DeviceBench(Knowing(Ranks()), TINY, "test", 4e-4).seconds(int) == pytest.approx(6e-4)
    assert DeviceBench(Knowing(Ranks()), TINY, "test", 1.0).seconds(int) == pytest.approx(2e-4)


def test_a_known_peak_stays_and_an_unknown_one_is_the_best_product():
    said: list[str] = []
    rates = measure_device(Knowing(Ranks()), CPU, TINY, "test", said.append)
    peak = rates.device.peak("fp32")
    assert peak is not None
    assert peak.value == pytest.approx(2 * 64 * 32 * 32 / 1e-3, rel=0.1)  # less the host
    assert peak.origin == "measured"
    assert len(said) == num_measurements(TINY, CPU)
    known = CPU.replace(peak_flops={"fp32": Figure(value=7.0, origin="cited", source="a page")})
    again = measure_device(Knowing(Ranks()), known, TINY, "test", said.append)
    assert again.device.peak("fp32") == known.peak("fp32")


def test_a_real_device_is_measured_into_whole_curves():
    rates = measure_device(REAL, CPU, TINY, "a test", lambda _what: None)
    curves = rates.device.curves
    assert curves is not None
    assert curves.memory is not None
    assert max(curves.matmul["fp32"].share) == pytest.approx(1)
    assert all(0 < share <= 1 for share in curves.matmul["fp32"].share)
    assert "fp64" not in curves.matmul
    assert len(curves.attention["flash"].backward) == 4
    assert [*curves.attention] == ["flash"]
    assert curves.memory.bytes[-1] == pytest.approx(65536, rel=1e-3)
    assert curves.memory.source == "a test"
    assert 1e-8 < rates.launching.forward_s < 1e-1
    assert 0 < rates.optimizer_s_per_param < 1e-5


def test_a_block_has_as_many_calls_as_fill_it():
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        torch.ones(1000)

    seconds = RankTimer(Ranks(), block_s=5e-3, num_blocks=2).seconds(call)
    assert 1e-8 < seconds < 1e-1
    assert calls > 2


def test_a_block_isn_t_chosen_by_calls_that_get_their_memory_for_the_first_time(monkeypatch):
    calls, now_s = 0, 0.0

    def call() -> None:
        nonlocal calls, now_s
        calls += 1
        now_s += 0.03 if calls <= 2 else 1e-6

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    RankTimer(Ranks(), block_s=5e-3, num_blocks=2).seconds(call)
    assert calls > 10


def test_a_cpu_s_attention_is_measured_in_each_arithmetic_it_trains_in():
    both, said = CPU.replace(precisions=("fp32", "bf16")), []
    curves = measure_device(Knowing(Ranks()), both, TINY, "test", said.append).device.curves
    assert curves is not None
    assert [*curves.attention] == ["flash", "flash.bf16"]
    assert len(said) == num_measurements(TINY, both)
    assert "attention to 32 tokens in bf16" in said
