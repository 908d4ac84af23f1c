"""What a rank waits for a core: two busy processes on one core, then what a hypervisor takes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.machine import core_clock
from paceline.machine.core_clock import CoreClock

_MEASURED = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from paceline.machine.core_clock import CoreClock
burn = [sys.executable, "-c", "while True: pass"]
burners = [subprocess.Popen(burn) for _ in range(int(sys.argv[1]))]
clock, used_s = CoreClock(), time.process_time()
began = time.perf_counter()
while time.perf_counter() - began < 1.0:
    pass
wall_s = time.perf_counter() - began
print(clock.lap() / wall_s, (time.process_time() - used_s) / wall_s)
for each in burners:
    each.kill()
"""


@pytest.mark.skipif(not core_clock._QUEUES.exists(), reason="this system doesn't count queues")
def test_a_core_shared_with_others_is_waited_for():
    """Who computes without a pause has the core, or waits for it: the rest of the time."""
    command = [sys.executable, "-c", _MEASURED, "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    waited, used = map(float, printed.split())
    assert waited > 0.5, "of four processes on a core each waits three quarters of the time"
    assert waited == pytest.approx(1 - used, abs=0.1)


def test_stolen_time_is_a_share_of_each_core(monkeypatch: pytest.MonkeyPatch):
    now, stolen = [100.0], [40.0]
    monkeypatch.setattr(core_clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(core_clock.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(core_clock, "_queued_s", lambda: now[0] / 1000)
    monkeypatch.setattr(core_clock.psutil, "cpu_times", lambda: SimpleNamespace(steal=stolen[0]))
    clock = CoreClock()
    now[0] += 2
    stolen[0] += 4  # two of eight seconds of the four cores: half a second of each second
    assert clock.lap() == pytest.approx(0.002 + 0.5 * 1.998)
    now[0] += 0.5
    assert clock.lap() == pytest.approx(0.0005 + 0.5 * 0.4995)  # too soon to look again
    now[0] += 0.5
    assert clock.lap() == pytest.approx(0.0005)


def test_where_nothing_is_counted_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(core_clock, "_QUEUES", tmp_path / "none")
    monkeypatch.setattr(core_clock.psutil, "cpu_times", lambda: SimpleNamespace(user=1.0))
    assert CoreClock().lap() == 0
