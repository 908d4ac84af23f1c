"""What Python's garbage collector takes of a run: it stops every thread of the interpreter.

A full collection walks every object that Python knows, at a moment of its own choice. Those that
imports and the set-up made live as long as the run, and are hundreds of thousands: walking them
took 0.05 to 0.4 s every dozen steps. So they are frozen when the loop begins, and collections walk
what is younger. How long these take only the collector can say: no profiler shows it by itself.

Sources: https://docs.python.org/3/library/gc.html#gc.freeze and #gc.callbacks
"""

import gc
import time
from typing import Any, Self

import torch
from torch.profiler import record_function

GARBAGE_RANGE = "paceline.gc"


class GarbageCollections:
    """Spares collections what is there already, adds up their seconds, and marks them in a profile.
    Use as a context manager."""

    def __init__(self) -> None:
        self._began_s = self._sum_s = 0.0
        self._span: record_function | None = None

    def __enter__(self) -> Self:
        gc.freeze()
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_failure: object) -> None:
        gc.callbacks.remove(self._note)
        gc.unfreeze()

    def take_s(self) -> float:
        """Return the seconds that collections took since the last call."""
        taken, self._sum_s = self._sum_s, 0.0
        return taken

    def _note(self, phase: str, _info: dict[str, Any]) -> None:
        # Collections don't nest, and one ends on the thread that it began on.
        if phase == "start":
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                self._span = record_function(GARBAGE_RANGE)
                self._span.__enter__()
            self._began_s = time.perf_counter()
            return
        self._sum_s += time.perf_counter() - self._began_s
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
