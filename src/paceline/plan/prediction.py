"""Prediction: what the planner says about one layout, by the terms of the vocabulary.

Time and memory are split into terms that sum to the whole, as measurements are. A number that
nothing is known about is None, never invented.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config.device import Device
from paceline.config.layout import Layout

MEMORY_TERMS = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "logits",
    "gather_buffers",
    "comm_buffers",
    "allocator_slack",
    "context",
    "unattributed",
)


_MOVING = ("activations", "logits", "gather_buffers", "comm_buffers")
# Of torchtitan's published peaks that leave least (`plan.memory.buffers.SLACK_SHARE`).
_LEAST_SLACK = 0.07


def needed_bytes(terms: Mapping[str, Any]) -> Any:
    """What must be there, of the terms of MEMORY_TERMS (numbers, or arrays of one shape).

    Torch reserves more than tensors take as long as there is more. Before it gives up, it returns
    each segment that holds none, and asks again
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management). What is left are holes
    beside tensors: of what comes and goes the least part that published peaks show.
    """
    moving = sum(terms[name] for name in _MOVING if name in terms)
    slack = terms.get("allocator_slack", 0.0)
    return sum(terms.values()) - slack + np.minimum(slack, _LEAST_SLACK * moving)


@dataclass(frozen=True)
class Memory:
    """Peak memory of one pipeline rank by term of MEMORY_TERMS, as the allocator reserves it."""

    rank: int
    """Index along pp."""
    terms: Mapping[str, float]
    checkpoint_spike_bytes: float = 0.0
    """What saving a checkpoint holds on the host besides, per device."""

    @property
    def total_bytes(self) -> float:
        """All terms."""
        return sum(self.terms.values())

    @property
    def needed_bytes(self) -> float:
        """See `needed_bytes`."""
        return float(needed_bytes(self.terms))


@dataclass(frozen=True)
class Prediction:
    """Time and memory of one layout."""

    layout: Layout
    step_s: float
    time_s: Mapping[str, float]
    """Seconds by term of `observe.terms.TERMS`, of the pipeline rank with the most work; they sum
    to step_s."""
    memory: tuple[Memory, ...]
    """Of every pipeline rank."""
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs per second over the devices' peak at the layout's precision; None: unknown."""
    interval_s: tuple[float, float]
    """The step's seconds, from the residuals of measured steps like it."""
    assumptions: Mapping[str, str] = field(default_factory=dict)
    """What the figures rest on: name of a constant -> "measured ...", "cited ...", "assumed"."""

    @property
    def peak_memory_bytes(self) -> float:
        """Of the heaviest rank."""
        return self.heaviest.total_bytes

    @property
    def needed_bytes(self) -> float:
        """Of the rank that needs most."""
        return max(each.needed_bytes for each in self.memory)

    def fits(self, device: Device) -> bool | None:
        """Whether each rank has the memory that it needs; None: the device's isn't known."""
        memory = device.memory_bytes
        return None if memory is None else self.needed_bytes <= memory.value

    @property
    def heaviest(self) -> Memory:
        """The rank whose memory decides whether the layout fits."""
        return max(self.memory, key=lambda memory: memory.total_bytes)
