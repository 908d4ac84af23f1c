"""Prediction: what the planner says about one layout, by the terms of the vocabulary.

Time and memory are split into terms that sum to the whole, as measurements are. A number that
nothing is known about is None, never invented.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    def heaviest(self) -> Memory:
        """The rank whose memory decides whether the layout fits."""
        return max(self.memory, key=lambda memory: memory.total_bytes)
