"""Account: what the steps of some ranks consisted of, as columns: what "explain" reads.

`Account.read` makes it of one trace, of several, or of a Run's trace folder, with the clocks of the
ranks brought together. The terms of a step are those of `observe.accounting` and sum to the step
exactly. The other tables say what stood behind them: which kernels; which collectives over which
axis, and how much of each was exposed; where host and device waited for each other.

All times are whole nanoseconds, all tables structured numpy arrays whose `name`-like columns index
`names` (-1: not known). An empty table means that the trace had none of it, or can't say: see
`is_device`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.caveats import Caveat, TraceDevice
from paceline.observe.clocks import ClockOffset
from paceline.observe.critical_path import PATH
from paceline.observe.terms import TERM_ID

# Kernels (on a CPU: operators, by their own time), summed by step, name and launching operator.
KERNEL = np.dtype(
    [
        ("rank", "i4"),
        ("step", "i8"),
        ("name", "i4"),
        ("op", "i4"),  # the operator that launched it; on a CPU the name again
        ("term", "i1"),  # index into TERMS
        ("count", "i8"),
        ("total_ns", "i8"),  # summed durations, overlapped ones too
    ]
)
COLLECTIVE = np.dtype(
    [
        ("rank", "i4"),
        ("step", "i8"),
        ("name", "i4"),  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", ...
        ("axis", "i1"),  # index into terms.AXES, -1: not known
        ("group", "i4"),  # description of its process group
        ("group_size", "i4"),  # 0: not known
        ("bytes", "i8"),  # of this rank's larger buffer, -1: not known
        ("start_ns", "i8"),
        ("duration_ns", "i8"),
        # The part with no kernel beside it; on a CPU, that in which the main thread waited for it.
        # Several that are on their way at once share it.
        ("exposed_ns", "i8"),
        # Forward-backward passes begun before it, since its step began and since the last optimizer
        # ran; -1: unknown.
        ("micro_batch", "i4"),
        ("in_backward", "?"),  # it was asked for when the backward pass of that one had begun
        ("members", "i4"),  # its ranks as text, "[0, 1]"
        ("wait_ns", "i8"),  # from its start until the last rank came; 0 where that isn't known
    ]
)
# The device (on a CPU: the main thread) had nothing to do, and what the host was doing then.
GAP = np.dtype(
    [
        ("rank", "i4"),
        ("step", "i8"),
        ("name", "i4"),  # innermost operator or range of the host
        ("line", "i4"),  # "file.py(12): function" where stacks were recorded
        ("start_ns", "i8"),
        ("duration_ns", "i8"),
        ("term", "i1"),  # what a range of the host around it claims: data_wait, ...; else host_gap
    ]
)
# The host waited for the device, or read a value of it (`.item()`): also on a CPU.
SYNC = np.dtype(
    [
        ("rank", "i4"),
        ("step", "i8"),
        ("name", "i4"),
        ("line", "i4"),
        ("start_ns", "i8"),
        ("duration_ns", "i8"),
        ("term", "i1"),  # of its own time: says whether it was in the optimizer, in data_wait, ...
    ]
)

_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Account:
    """The steps of some ranks, and what was behind them."""

    is_device: bool
    """Whether a device's work was recorded; else the main thread of a CPU is the step."""
    steps: _Array
    """dtype `timeline.STEP`, in order of rank and step."""
    terms_ns: npt.NDArray[np.int64]
    """(num_steps, len(TERMS)); each row sums to its step exactly."""
    kernels: _Array
    collectives: _Array
    gaps: _Array
    syncs: _Array
    names: tuple[str, ...]
    clocks: Mapping[int, ClockOffset] = field(default_factory=dict)
    """Of each rank; empty for one rank."""
    path: _Array = field(default_factory=lambda: np.empty(0, PATH))
    """The critical path of each step; see `observe.critical_path`."""
    launch_delays_ns: _Array = field(default_factory=lambda: np.empty(0, np.int64))
    """Of each step, the median from the end of a kernel's launch to its start: near 0, the device
    waits for the host; -1: not known, or a CPU's."""
    caveats: tuple[Caveat, ...] = ()
    """What the traces can't say: one of each kind."""
    devices: Mapping[int, TraceDevice] = field(default_factory=dict)
    """Of each rank whose trace describes its device."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were recorded, in order."""
        return tuple(int(rank) for rank in np.unique(self.steps["rank"]))

    def caveat(self, kind: str) -> Caveat | None:
        """The caveat of a kind in `observe.caveats`, where there is one."""
        return next((one for one in self.caveats if one.kind == kind), None)

    def step_s(self, rank: int | None = None) -> float:
        """Median seconds of a step, of a rank or of all."""
        steps = self.steps if rank is None else self.steps[self.steps["rank"] == rank]
        return float(np.median(steps["end_ns"] - steps["start_ns"])) / 1e9

    def term_s(self, term: str, rank: int | None = None) -> float:
        """Mean seconds of a term in a step, of a rank or of all; a prefix sums over axes."""
        rows = self.terms_ns if rank is None else self.terms_ns[self.steps["rank"] == rank]
        columns = [
            at for name, at in TERM_ID.items() if name == term or name.startswith(f"{term}.")
        ]
        return float(rows[:, columns].sum(axis=1).mean()) / 1e9
