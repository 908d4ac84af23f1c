"""Recording: one rank's trace, read into columns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.caveats import Caveat, TraceDevice, device_of
from paceline.observe.kineto.cpu import ThreadPieces
from paceline.observe.kineto.engine import Iterations
from paceline.observe.kineto.events import Trace
from paceline.observe.kineto.host import HostEvents

_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Recording:
    """One rank's trace, read."""

    rank: int
    trace: Trace
    host: HostEvents
    main: int
    """Index of the main thread."""
    python: _Array
    """Events of Python functions, where stacks were recorded."""
    device: _Array
    """Kernels and copies in order of start; empty for a CPU."""
    terms: _Array
    """Of each of those."""
    launch: _Array
    """The host event that launched each of those, or NONE."""
    marked: _Array
    """The steps as the host's ranges mark them, dtype `timeline.STEP`; empty: nothing does."""
    windows: _Array
    """The steps that count, the device's: dtype `timeline.STEP`."""
    pieces: ThreadPieces | None
    """The main thread's time by what ran, waits among them (owner NONE); None for a device."""
    gloo: ThreadPieces
    """The collectives on gloo's threads."""
    asked: _Array
    """The operator that started each of those, or NONE."""
    engine: Iterations | None = None
    """The iterations of an engine that serves a model."""
    phases: _Array | None = None
    """Of such an engine: the term of each event of the device by what it is for."""
    caveats: tuple[Caveat, ...] = ()
    """What the trace can't say."""

    @property
    def device_properties(self) -> TraceDevice | None:
        """The device that most kernels ran on, where the trace's header describes it."""
        threads = self.device["thread"]
        process = self.trace.threads[int(np.bincount(threads).argmax())][0] if len(threads) else 0
        number = process if isinstance(process, int) else 0
        return device_of(self.trace.about.get("deviceProperties"), number)

    @property
    def host_name(self) -> str | None:
        """The machine that it was recorded on, where the trace says so."""
        return self.trace.about.get("host_name")
