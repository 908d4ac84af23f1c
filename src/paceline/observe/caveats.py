"""Caveats: what a trace can't say, and the devices it was recorded on.

A reader of traces meets files that lack something: kernels of replayed graphs, steps, the end of
the file. What was read is still worth reading, but its terms mean less. Each such fact is one
Caveat, made where it is seen; `observe.account` carries them, and rules look at them before they
conclude anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Kinds of caveats, and what each means for the terms.
GRAPH_KERNELS_MISSING = "graph-kernels-missing"
"""Graphs were replayed and few or none of their kernels recorded: idle time and `host_gap` are
upper bounds, what kernels did is a lower one."""
NO_KERNELS = "no-kernels"
"""Work was given to a device whose kernels were not recorded: only the host's side is known."""
NO_STEPS = "no-steps"
"""Nothing marks the steps: the whole trace counts as one."""
CUT = "cut"
"""The file ends early: only steps that have all of their work are counted."""
EVENTS_LEFT_OUT = "events-left-out"
"""Some events can't be those of a profiler and are not counted."""
INFERENCE = "inference"
"""An engine that serves a model: there is no backward pass, and steps are its iterations."""


@dataclass(frozen=True)
class Caveat:
    """One thing that a trace can't say, or that its reader must know."""

    kind: str
    sentence: str
    """For people, ending in a full stop; where it holds for several ranks, of the first."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the sentence says, for rules."""
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The sentence, with the number of further ranks that it holds for."""
        others = len(self.ranks) - 1
        if others < 1:
            return self.sentence
        return f"{self.sentence} ({others} more {'rank is' if others == 1 else 'ranks are'} alike.)"


@dataclass(frozen=True)
class TraceDevice:
    """The device of a rank, as the trace's header describes it."""

    name: str
    """"NVIDIA H100 80GB HBM3"; empty where the trace doesn't say."""
    capability: tuple[int, int]
    """Compute capability; of AMD's devices 9.4 is gfx94x."""
    memory_bytes: int
    """0: not known."""
    is_amd: bool


def joined(caveats: Iterable[Caveat]) -> tuple[Caveat, ...]:
    """Make one caveat of those of one kind, with the ranks of all."""
    found: dict[str, Caveat] = {}
    for one in caveats:
        first = found.setdefault(one.kind, replace(one, ranks=()))
        found[one.kind] = replace(first, ranks=(*first.ranks, *one.ranks))
    return tuple(found.values())


def device_of(properties: Any, number: int) -> TraceDevice | None:
    """Return a device by its number in a header's `deviceProperties`; None where it isn't there.

    Where the list has no such number (processes see their own device as 0), the first counts.
    """
    if not isinstance(properties, Sequence) or isinstance(properties, str):
        return None
    known = [each for each in properties if isinstance(each, dict)]
    if not known:
        return None
    one = next((each for each in known if each.get("id") == number), known[0])
    name = one.get("name")
    return TraceDevice(
        name if isinstance(name, str) else "",
        (_whole(one, "computeMajor"), _whole(one, "computeMinor")),
        _whole(one, "totalGlobalMem"),
        _whole(one, "warpSize") == 64,
    )


def _whole(properties: Mapping[str, Any], name: str) -> int:
    value = properties.get(name)
    return value if isinstance(value, int) and value > 0 else 0
