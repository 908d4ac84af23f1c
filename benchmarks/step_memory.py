"""The most bytes that tensors held during a training step, on a CPU.

What training holds in tensors counts, not what the process has: the interpreter, its libraries and
malloc's spare pages are no matter of layouts. The profiler notes every allocation and release, from
before anything was built, and their running sum has its peak in some step.

gloo's own threads sometimes release a buffer unseen. Such a buffer would count for ever, but the
allocator soon gives its bytes out again: an allocation that overlaps another says that the other is
gone. What is still counted too much until then can only raise a peak, so the least of a few steps
is taken.

A process whose allocations were watched stays slower: take times in another.
"""

import json
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from paceline.bench.step import PreparedJob, prepared
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.train.families import task_without_data

_MARK = "paceline.watched"


def step_peak_bytes(job: Job, ranks: Ranks, times: int = 3) -> float:
    """The most bytes that this rank holds in a step of a Job, besides its samples.

    Args:
        job: concrete.
        ranks: this process's place; every rank must call it.
        times: how many steps are watched.
    """
    task = task_without_data(job, ranks)
    batch = next(task.steps_from(0))
    made: list[PreparedJob] = []
    return peak_bytes(
        lambda: made.append(prepared(job, ranks, task, batch)),
        lambda: made[0].trainer.step(1, batch)(),
        times,
    )


def peak_bytes(before: Callable[[], object], watched: Callable[[], object], times: int) -> float:
    """The most bytes held while `watched` runs, of all that it and `before` allocated.

    Args:
        before: builds what is used.
        watched: a step, which leaves behind what it found.
        times: how often it runs; the least of its peaks counts.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        before()
        for _ in range(times):
            with record_function(_MARK):
                watched()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    starts = sorted(event["ts"] for event in events if event.get("name") == _MARK)
    return float(min(peaks(_changes(events), starts)))


class MemoryChange(NamedTuple):
    """An allocation, or with negative bytes a release."""

    at: float
    address: int
    num_bytes: int


def _changes(events: Iterable[dict[str, Any]]) -> list[MemoryChange]:
    found = sorted(
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Addr"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    return [MemoryChange(at, address, num_bytes) for at, _, address, num_bytes in found]


def peaks(changes: Iterable[MemoryChange], starts: list[float]) -> list[int]:
    """The most bytes held from each start to the next; what came before the first counts as held.

    Args:
        changes: in the order of time.
        starts: increasing.
    """
    heap, highest, index = AddressRanges(), [0] * len(starts), -1
    for change in changes:
        while index + 1 < len(starts) and change.at >= starts[index + 1]:
            index += 1
            highest[index] = heap.held_bytes
        heap.note(change)
        if index >= 0:
            highest[index] = max(highest[index], heap.held_bytes)
    return highest


class AddressRanges:
    """Which ranges of addresses are in use."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._addresses: list[int] = []
        self._sizes: dict[int, int] = {}

    def note(self, change: MemoryChange) -> None:
        """Follow an allocation or a release."""
        if change.num_bytes < 0:
            self._release(change.address)
            return
        for address in list(self._overlapped(change)):
            self._release(address)
        insort(self._addresses, change.address)
        self._sizes[change.address] = change.num_bytes
        self.held_bytes += change.num_bytes

    def _overlapped(self, change: MemoryChange) -> Iterator[int]:
        """Ranges that must have been released before this allocation, which nobody saw."""
        index = bisect_left(self._addresses, change.address)
        if index:
            previous = self._addresses[index - 1]
            if previous + self._sizes[previous] > change.address:
                yield previous
        end = change.address + change.num_bytes
        while index < len(self._addresses) and self._addresses[index] < end:
            yield self._addresses[index]
            index += 1

    def _release(self, address: int) -> None:
        if address in self._sizes:
            del self._addresses[bisect_left(self._addresses, address)]
            self.held_bytes -= self._sizes.pop(address)
