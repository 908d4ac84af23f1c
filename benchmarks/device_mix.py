"""What a device's streams were doing at each moment: computing, communicating, copying, or nothing.

This is the coarse view of HolisticTraceAnalysis, to compare with its figures
(https://github.com/facebookresearch/HolisticTraceAnalysis): where things overlap, all of them
count, while `observe.accounting` gives each instant to one term.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.config.errors import InputError
from paceline.observe.accounting import union
from paceline.observe.timeline import COMM, COPY, HOST, PROCESSOR, Timeline

_KINDS = {"compute": PROCESSOR, "communication": COMM, "copy": COPY}


@dataclass(frozen=True, eq=False)
class DeviceMix:
    """How long which kinds of work ran at once."""

    ns: Mapping[frozenset[str], int]
    """Nanoseconds of each combination of "compute", "communication" and "copy"; the empty one is
    idle time. They sum to the time between the device's first and last span."""

    @classmethod
    def of(cls, timeline: Timeline, rank: int) -> "DeviceMix":
        """Look at the device of a rank.

        As HolisticTraceAnalysis does, the last step is left out where there are several: its
        kernels are often cut off.

        Raises:
            InputError: this rank has no device spans.
        """
        spans = timeline.spans[timeline.spans["rank"] == rank]
        streams = np.array([label.startswith("device") for label in timeline.streams], bool)
        spans = spans[streams[spans["stream"]] & (spans["layer"] < HOST)]
        steps = timeline.steps[timeline.steps["rank"] == rank]
        if len(steps) > 1:
            spans = spans[spans["start_ns"] < np.sort(steps["end_ns"])[-2]]
        if not len(spans):
            raise InputError(f"rank {rank} has no device spans; give a trace of a device.")
        kinds = [
            union(chosen["start_ns"], chosen["start_ns"] + chosen["duration_ns"])
            for layer in _KINDS.values()
            for chosen in (spans[spans["layer"] == layer],)
        ]
        edges = [edge for kind in kinds for edge in kind]
        bits = [sign << k for k in range(len(kinds)) for sign in (1, -1)]
        at = np.concatenate(edges)
        order = np.argsort(at, kind="stable")
        running = np.cumsum(np.repeat(bits, [len(edge) for edge in edges])[order])
        sums = np.zeros(1 << len(kinds), np.int64)
        np.add.at(sums, running[:-1], np.diff(at[order]))
        return cls(
            {
                frozenset(name for k, name in enumerate(_KINDS) if code >> k & 1): ns
                for code, ns in enumerate(sums.tolist())
            }
        )

    def with_kind(self, *kinds: str) -> int:
        """Return the nanoseconds in which all of some kinds ran, whatever ran beside them."""
        return sum(ns for running, ns in self.ns.items() if running.issuperset(kinds))

    def shares(self) -> dict[str, float]:
        """Return shares of 1: "compute", "non_compute" (only something else ran) and "idle"."""
        whole, compute = sum(self.ns.values()), self.with_kind("compute")
        idle = self.ns[frozenset()]
        parts = {"compute": compute, "non_compute": whole - compute - idle, "idle": idle}
        return {name: ns / whole for name, ns in parts.items()}

    def busy_shares(self) -> dict[frozenset[str], float]:
        """Return the share of each combination in the time in which anything ran."""
        at_work = {running: ns for running, ns in self.ns.items() if running and ns}
        return {running: ns / sum(at_work.values()) for running, ns in at_work.items()}

    def overlap(self) -> float | None:
        """Return the share of communication with computation beside it; None: there is none."""
        communication = self.with_kind("communication")
        if not communication:
            return None
        return self.with_kind("communication", "compute") / communication
