"""A CPU's speed: measured once, kept for this machine, and what a plan says by it."""

import json
import math
import time

import pytest

from paceline.config.catalogue.devices import CATALOGUE
from paceline.config.hardware import Device
from paceline.config.job import read_job
from paceline.machine import cpu_speed
from paceline.machine.cpu_speed import CpuWorkers, with_speed
from paceline.machine.discovery import this_machine
from paceline.train.start import with_measured_speed
from paceline.train.this_machine import resolve_on_this_machine

CPU = Device(name="a CPU", kind="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Two sizes, a cache of its own, and measuring switched on."""
    monkeypatch.setattr(cpu_speed, "_ROWS", (64, 128))
    monkeypatch.setattr(cpu_speed, "_BLOCK_S", 0.001)
    monkeypatch.setattr(cpu_speed, "_LENGTHS", (1 << 10, 1 << 14))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(cpu_speed.SWITCH)


def test_it_is_measured_once_and_kept_and_a_damaged_file_is_measured_again(tmp_path):
    said = []
    first = with_speed(CPU, 2, said.append, may_measure=True)
    assert first.peak("fp32").value > 1e6
    assert first.peak("fp32").origin == "measured"
    assert max(first.curves.matmul["fp32"].share) == 1
    (file,) = tmp_path.rglob("*.json")
    assert len(said) == 1
    assert str(file) in said[0]
    assert with_speed(CPU, 2, said.append, may_measure=False) == first
    assert len(said) == 1
    for damaged in ("", "[1", "null", "[]", "3", "\x00\xff", '{"name": "x", "kind": "cpu"}'):
        file.write_text(damaged)
        assert with_speed(CPU, 2, said.append, may_measure=False) == CPU
    assert with_speed(CPU, 2, said.append, may_measure=True).peak("fp32") is not None
    assert len(said) == 2
    assert json.loads(file.read_text())["name"] == CPU.name
    assert not list(tmp_path.rglob("*.tmp*"))


def test_what_is_known_stays_and_a_switch_turns_it_off(monkeypatch):
    known = with_speed(CPU, 1, lambda _: None, may_measure=True)
    for device in (known, CATALOGUE["H100-SXM"]):
        assert with_speed(device, 4, pytest.fail, may_measure=True) == device
    monkeypatch.setenv(cpu_speed.SWITCH, "off")
    assert with_speed(CPU, 1, pytest.fail, may_measure=True) == CPU


def test_ranks_that_share_cores_share_the_peak(monkeypatch):
    assert CpuWorkers.of(8, 2) == (8, 2, 1)
    assert CpuWorkers.of(2, 8) == (2, 2, 4)
    monkeypatch.setattr(cpu_speed, "_fastest_s", lambda call, barrier, clock: 1e-3)
    one, four = (
        cpu_speed.measure(CPU, CpuWorkers(ranks, 1, 1)).peak("fp32").value for ranks in (1, 4)
    )
    assert math.isclose(one, 4 * four)


@pytest.mark.parametrize(("by_wall_s", "by_core_s"), [(1.0, 1e-3), (1e-3, 1.0)])
def test_several_threads_are_no_slower_than_one(monkeypatch, by_wall_s, by_core_s):
    """The wall's clock counts what others do with the cores, that of one thread doesn't."""

    def of_clock(call, barrier, clock):
        return by_core_s if clock is time.thread_time else by_wall_s

    monkeypatch.setattr(cpu_speed, "_fastest_s", of_clock)
    found = cpu_speed.measure(CPU, CpuWorkers(1, 1, 2))
    assert found.curves.memory.seconds == (1e-3, 1e-3)
    # Of each size three products, stored as in the three passes of a layer.
    largest = 6 * math.prod(max(getattr(found.curves.matmul["fp32"], size)) for size in "mnk")
    assert found.peak("fp32").value == largest / 1e-3


def test_rules_choose_the_layout_and_the_plan_predicts_it_with_a_wide_interval():
    before = resolve_on_this_machine(read_job(None))
    after = with_measured_speed(before, lambda _: None)
    assert not before.ranked
    assert after.job.layout == before.job.layout
    assert "`paceline bench`" in after.notes[0]
    (expected,) = after.ranked
    low, high = expected.interval_s
    assert low <= expected.step_s / 2
    assert high >= expected.step_s * 2
    assert 0 < expected.mfu < 1
    again = resolve_on_this_machine(after.job)
    assert again.job == after.job
    assert again.ranked[0].step_s == pytest.approx(expected.step_s)
    assert this_machine().device.peak("fp32") is None
