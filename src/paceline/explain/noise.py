"""Noise: how well a run's figures are known, and whether two runs differ by more than that.

Neighbouring steps are alike (a busy host stays busy for a while), so the spread of single steps
over the root of their number would promise too much. Batch means don't: the steps are cut into
stretches in a row, and the spread of the stretches' medians counts. Source: Law and Carson 1979,
"A sequential procedure for determining the length of a steady-state simulation", Operations
Research 27.

What it can't tell: runs of one Job also differ from one start to the next, by where they are placed
and who shares the machine. A repeat of either run says that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, sqrt
from statistics import median, stdev

_BATCHES = 4
"""Few and long. Simulated: of 40 steps each is nine tenths as the one before. With stretches of
four steps a third of the differences without a cause pass for real ones, with stretches of ten a
fifth. Of steps that are half as the one before 8 % pass, of steps without a memory 6 %."""
_SURE = 2.45
"""Standard errors: Student's t for 19 of 20, with the six degrees of freedom of two times four
stretches."""


@dataclass(frozen=True)
class Estimate:
    """A median, and its standard error where there are enough values (None: there aren't)."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Of values in the order in which they were measured; at least one."""
        if len(values) < 2 * _BATCHES:
            return cls(median(values))
        edges = [round(at * len(values) / _BATCHES) for at in range(_BATCHES + 1)]
        medians = [median(values[first:last]) for first, last in pairwise(edges)]
        return cls(median(values), stdev(medians) / sqrt(_BATCHES))


@dataclass(frozen=True)
class MetricChange:
    """From one run to another."""

    before: Estimate
    now: Estimate

    @property
    def difference(self) -> float:
        """Positive: more than before."""
        return self.now.value - self.before.value

    @property
    def doubt(self) -> float | None:
        """What difference is still noise; None: not known."""
        if self.before.error is None or self.now.error is None:
            return None
        return _SURE * hypot(self.before.error, self.now.error)

    @property
    def is_clear(self) -> bool | None:
        """Whether the difference is beyond the noise; None: that can't be told."""
        return None if self.doubt is None else abs(self.difference) > self.doubt
