"""Memory over a profiled window: recorded while its trace is, for `observe.snapshot` to read.

On CUDA the allocator keeps a history of what it gave and took, with the Python line of each, and
the window leaves torch's own snapshot, `memory/rank<k>-step<n>.pickle`, which
https://docs.pytorch.org/memory_viz opens as well. What was there before the window has no line; its
owners are asked instead and written to the JSON file of the same name. On a CPU there is no such
allocator: the resident memory of the process is looked at every few milliseconds, into the same
JSON file.

The history costs about 2 us for each allocation and is off outside of windows.

Source: torch.cuda.memory, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil
import torch

from paceline.observe.run import write_atomic

Held = Mapping[str, Sequence[tuple[int, int]]]
"""Category ("params", "optimizer") -> address and bytes of each storage."""

# Of a window; beyond it the oldest are lost, and the reader begins where the history does.
_MOST_EVENTS = 200_000
_LOOK_EVERY_S = 0.005


class MemoryRecorder(Protocol):
    """Records what a window does with memory."""

    def begin(self) -> None:
        """A window begins."""

    def end(self, name: str | None) -> None:
        """It ends: write files of this name; None: forget it.

        Raises:
            OSError: they can't be written.
        """


def memory_recorder(folder: Path, device: torch.device, held: Callable[[], Held]) -> MemoryRecorder:
    """The recorder for this kind of device.

    Args:
        folder: where files go; made when the first one is written.
        device: of this rank.
        held: says where long-lived tensors are at this moment.
    """
    return AllocatorHistory(folder, held) if device.type == "cuda" else ResidentMemory(folder)


class AllocatorHistory:
    """CUDA's caching allocator, event by event."""

    def __init__(self, folder: Path, held: Callable[[], Held]) -> None:
        self._folder, self._held = folder, held

    def begin(self) -> None:
        """Switch the history on."""
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks="python", max_entries=_MOST_EVENTS, clear_history=True
        )

    def end(self, name: str | None) -> None:
        """Write torch's snapshot and whose the long-lived blocks are, and switch it off."""
        try:
            if name is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.pickle"))
                write_atomic(self._folder / f"{name}.json", json.dumps({"held": self._held()}))
        finally:
            torch.cuda.memory._record_memory_history(None)


class ResidentMemory:
    """The resident memory of this process, looked at by a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[tuple[float, int]] = []

    def begin(self) -> None:
        """Start to look."""
        self._samples = []
        self._over.clear()
        self._thread = threading.Thread(target=self._look, name="resident-memory", daemon=True)
        self._thread.start()

    def end(self, name: str | None) -> None:
        """Stop, and write (seconds since the window began, bytes) as JSON."""
        self._over.set()
        assert self._thread is not None, "begin comes first"
        self._thread.join()
        if name is not None:
            write_atomic(self._folder / f"{name}.json", json.dumps({"resident": self._samples}))

    def _look(self) -> None:
        began_s = time.perf_counter()
        while True:
            resident = self._process.memory_info().rss
            self._samples.append((round(time.perf_counter() - began_s, 6), resident))
            if self._over.wait(_LOOK_EVERY_S):
                return
