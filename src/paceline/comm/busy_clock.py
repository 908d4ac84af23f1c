"""Busy clock: how long a rank was at work, and not held up by other ranks.

Ranks that meet in collectives take equal time for a step, whoever was late. What differs is how
long each was held up: the late one hardly at all. So a rank's busy time is the time that passed
less what its main thread waited, and the rank with the most of it is the one the others wait for,
whatever made it late: computation, the loader, a slow disk, the interpreter.

Waits are counted where Python asks for them: `Work.wait` (FSDP2, pipelines, every collective that
isn't asynchronous), `wait_tensor` (DTensor), and what a caller puts into `waiting`. DDP waits in
C++: for buffers as a forward pass begins, which is counted where Python asks for that, and for
gradients; `parallel.exposed_all_reduce` tells of those. torch counts no waits of gloo itself (2.13:
only the store's).

On CUDA the host doesn't wait for collectives, it launches them. There busy time is the host's, so
it names the rank whose host is late and not the one whose device is slow; a profile does that.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function


class BusyClock:
    """Counts the waits of the thread that enters it, for as long as the context lasts."""

    def __init__(self) -> None:
        self._thread = 0
        self._depth = 0
        self._wait_began_s = 0.0
        self._waited_s = 0.0
        self._lap_began_s = time.perf_counter()
        self._before: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for_buffers = DistributedDataParallel._sync_buffers
        self._before = (Work.wait, functional.wait_tensor, for_buffers)
        Work.wait = self._counted(Work.wait)  # type: ignore[method-assign]
        functional.wait_tensor = self._counted(functional.wait_tensor)
        DistributedDataParallel._sync_buffers = self._counted(for_buffers)  # type: ignore[method-assign]
        self.lap()
        return self

    def __exit__(self, *_failure: object) -> None:
        assert self._before is not None
        Work.wait, functional.wait_tensor, for_buffers = self._before  # type: ignore[method-assign]
        DistributedDataParallel._sync_buffers = for_buffers  # type: ignore[method-assign]

    def lap(self) -> float:
        """Seconds at work since the last lap, or since the clock was entered."""
        now_s = time.perf_counter()
        busy_s = now_s - self._lap_began_s - self._waited_s
        self._lap_began_s, self._waited_s = now_s, 0.0
        return busy_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done within waits for other ranks, or for this rank's device."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self) -> None:
        """From here on this rank waits; a wait within a wait is part of it."""
        if self._depth == 0:
            self._wait_began_s = time.perf_counter()
        self._depth += 1

    def end_wait(self) -> float:
        """It goes on; returns the seconds since the outermost wait began."""
        self._depth -= 1
        waited_s = time.perf_counter() - self._wait_began_s
        if self._depth == 0:
            self._waited_s += waited_s
        return waited_s

    def _counted(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wait(*args, **kwargs)
            # A span costs more than counting does, so there is one only where it is recorded.
            recorded = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            with self.waiting(), record_function("paceline.wait") if recorded else nullcontext():
                return wait(*args, **kwargs)

        return counted
