"""Core clock: how long a rank was ready to compute and had no core.

Linux counts for every thread the time that it stood in a core's queue (/proc/self/schedstat, of the
main thread, which launches and on CPUs computes). What a hypervisor gives to its other guests is in
no queue: the machine counts it as stolen, and each core's share of that is added.

Other programs, a container's quota, more threads than cores and a crowded host all show here.
Elsewhere than on Linux nothing is known, and the figure is 0.
"""

import os
import time
from pathlib import Path

import psutil

_QUEUES = Path("/proc/self/schedstat")
# Reading what is stolen takes up to a millisecond on a machine of many cores.
_LOOK_EVERY_S = 1.0


class CoreClock:
    """Counts the time without a core."""

    def __init__(self) -> None:
        self._began_s = self._looked_s = time.perf_counter()
        self._queued_s = _queued_s()
        self._stolen, self._stolen_share = StealClock(), 0.0

    def lap(self) -> float:
        """Seconds since the last lap, or the beginning, in which the main thread had no core."""
        now_s, queued_s = time.perf_counter(), _queued_s()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s, self._stolen_share = now_s, self._stolen.lap()
        queue_s, lap_s = queued_s - self._queued_s, now_s - self._began_s
        self._began_s, self._queued_s = now_s, queued_s
        # In a queue nothing can be stolen from it.
        return queue_s + self._stolen_share * max(lap_s - queue_s, 0.0)


class StealClock:
    """Counts what a hypervisor gives to its other guests."""

    def __init__(self) -> None:
        self._began_s, self._stolen_s = time.perf_counter(), _stolen_s()

    def lap(self) -> float:
        """The share of every core, on average, that was stolen since the last lap."""
        now_s, stolen_s = time.perf_counter(), _stolen_s()
        share = (stolen_s - self._stolen_s) / (now_s - self._began_s)
        self._began_s, self._stolen_s = now_s, stolen_s
        return share


def _queued_s() -> float:
    """Seconds that the main thread stood in queues since it began."""
    try:
        return int(_QUEUES.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _stolen_s() -> float:
    """Seconds that were stolen since the machine began, of each core on average."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0)) / (os.cpu_count() or 1)
