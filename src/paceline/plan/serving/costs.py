"""Costs: the seconds of an engine's step by what it computes, in terms that sum to the step.

A step is the host's part (which tokens to compute, which come next) and a forward pass. Its time
is taken to be a sum: that of all layers' products by rows, of the head's by the rows whose logits
are wanted, of attention by the blocks that single tokens read and by the pairs that parts of
prompts have, and of exchanges between ranks by rows. Whether they were measured or follow from a
device's curves makes no difference here.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.generate.work import Work


class Curve:
    """Seconds by a size: 0 at 0, straight between points, and straight on behind the last.

    Args:
        at: sizes above 0, increasing. seconds: of each.
    """

    def __init__(self, at: Sequence[float], seconds: Sequence[float]) -> None:
        self.at, self.seconds = (0.0, *at), (0.0, *seconds)

    def __call__(self, size: float) -> float:
        """Seconds of this size."""
        right = min(max(bisect_left(self.at, size), 1), len(self.at) - 1)
        share = (size - self.at[right - 1]) / (self.at[right] - self.at[right - 1])
        before, after = self.seconds[right - 1 : right + 1]
        return before + share * (after - before)

    @property
    def least_per_one(self) -> float:
        """Seconds of one, at the size where it takes least."""
        return min(s / at for at, s in zip(self.at[1:], self.seconds[1:], strict=True))


NOTHING = Curve((1,), (0,))


class Terms(NamedTuple):
    """Seconds of steps, by what takes them."""

    host: float = 0.0
    """Choosing tokens before and after the pass, and the device's waits for the host in it."""
    weights: float = 0.0
    """What products take with one row: the weights are read, however few rows there are."""
    products: float = 0.0
    """What they take longer, with the rows that there are."""
    attention: float = 0.0
    exchange: float = 0.0
    """Between ranks that share the network."""

    @property
    def total(self) -> float:
        """All together."""
        return sum(self)

    def __add__(self, other: "Terms") -> "Terms":  # type: ignore[override]
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepCosts:
    """Of one network on one device, or on several that share it."""

    body: Curve
    """Of all layers but their attention, by rows."""
    head: Curve
    """By rows whose logits are wanted."""
    block_s: float = 0.0
    """Of a single token's look at one block, in all layers."""
    part_s: float = 0.0
    """Of a part of a prompt, whatever its size."""
    key_s: float = 0.0
    """Of a key that such a part reads from a block, in all layers."""
    pair_s: float = 0.0
    """Of a query and a key in such a part, in all layers."""
    host_s: float = 0.0
    """Of a step, beside its pass."""
    text_s: float = 0.0
    """Of each token that is chosen."""
    launch_s: float = 0.0
    """That the host takes to launch a pass, while the device works."""
    exchange: Curve = NOTHING
    """By rows."""

    def terms(self, work: Work) -> Terms:
        """The seconds of a step."""
        products = self.body(work.rows) + self.head(work.choices)
        weights = min(products, self.body(1) + (self.head(1) if work.choices else 0.0))
        attention = (
            self.block_s * work.blocks
            + self.part_s * work.parts
            + self.key_s * work.keys
            + self.pair_s * work.pairs
        )
        exchange = self.exchange(work.rows)
        late = max(0.0, self.launch_s - products - attention - exchange)
        host = self.host_s + self.text_s * work.choices + late
        return Terms(host, weights, products - weights, attention, exchange)

    def least_s(self, num_in: float, num_out: float) -> float:
        """What a request takes of the device at least, in the best of company."""
        of_rows = (num_in + num_out) * (self.body.least_per_one + self.exchange.least_per_one)
        return of_rows + num_out * (self.head.least_per_one + self.text_s)
