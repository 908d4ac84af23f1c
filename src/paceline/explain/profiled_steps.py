"""Profiled steps: the profiled steps as (steps, ranks) tables, and what a step would gain.

Ranks meet in every step, so a step ends when the slowest one has done its work: what one rank saves
helps only as far as no other rank is then the slowest. `gain_s` says how far. It is what keeps a
wait that other ranks' work hides from counting as a gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.account import Account
from paceline.observe.terms import TERM_ID

Array = npt.NDArray[Any]

# What a rank doesn't do itself: it waits for another one, or for the link.
WAITING = ("exposed_comm", "straggler_wait", "bubble")
# What takes as long whether the step is recorded or not.
_UNTOUCHED = (*WAITING, "data_wait", "checkpoint_stall")


@dataclass(frozen=True, eq=False)
class ProfiledSteps:
    """Profiled steps; rows are steps that all ranks recorded, columns are ranks."""

    account: Account
    ranks: tuple[int, ...]
    rows: Array
    """(steps, ranks): index into `account.steps`."""

    @classmethod
    def of(cls, account: Account) -> "ProfiledSteps":
        """Bring the steps of the ranks together, by their numbers (or by order, where they differ).

        Traces of several ranks recorded at different steps share none: then the n-th steps stand
        beside each other.
        """
        of_rank = [np.flatnonzero(account.steps["rank"] == rank) for rank in account.ranks]
        numbers = [account.steps["step"][rows] for rows in of_rank]
        common = numbers[0]
        for each in numbers[1:]:
            common = np.intersect1d(common, each)
        if len(common):
            chosen = [
                rows[np.isin(each, common)] for rows, each in zip(of_rank, numbers, strict=True)
            ]
        else:
            least = min(map(len, of_rank))
            chosen = [rows[:least] for rows in of_rank]
        return cls(account, account.ranks, np.stack(chosen, axis=1))

    @cached_property
    def length_s(self) -> Array:
        """(steps, ranks), seconds of each step on each rank."""
        steps = self.account.steps[self.rows]
        return (steps["end_ns"] - steps["start_ns"]) / 1e9

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step: the median over steps of its longest rank."""
        return float(np.median(self.length_s.max(axis=1)))

    def term_s(self, *terms: str) -> Array:
        """(steps, ranks), seconds of some terms together; a prefix sums over its axes."""
        columns = [
            at
            for name, at in TERM_ID.items()
            if any(name == term or name.startswith(f"{term}.") for term in terms)
        ]
        return self.account.terms_ns[self.rows][:, :, columns].sum(axis=2) / 1e9

    def mean_s(self, *terms: str) -> float:
        """Seconds of some terms in a step, mean over steps and ranks."""
        return float(self.term_s(*terms).mean())

    @cached_property
    def busy_s(self) -> Array:
        """(steps, ranks), what a rank did itself, be it useful or not."""
        return self.length_s - self.term_s(*WAITING)

    @cached_property
    def waits_s(self) -> float:
        """Seconds of a step that recording doesn't lengthen, mean."""
        return self.mean_s(*_UNTOUCHED)

    def sum_s(self, rows: Array, column: str = "duration_ns") -> Array:
        """(steps, ranks), seconds of the rows of one of the account's tables."""
        known = _key(self.account.steps)  # rising: steps are in order of rank and step
        wanted = _key(rows)
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        is_known = known[at] == wanted
        sums = np.bincount(at[is_known], rows[column][is_known], minlength=len(known))
        return sums[self.rows] / 1e9

    def recurs(self, rows: Array) -> bool:
        """Whether rows of one of the account's tables stand in half of the steps or more.

        What stands in the first recorded steps alone happens once, however long they take.
        """
        steps = self.account.steps["step"][self.rows[:, 0]]
        is_there = np.isin(steps, rows["step"])
        return bool(2 * np.count_nonzero(is_there) >= len(steps)) and bool(
            len(steps) < 2 or is_there[len(steps) // 2 :].any()
        )

    def gain_s(self, saved_s: Array | Sequence[Array]) -> float:
        """Seconds by which a step is shorter if ranks save so much of their own work.

        Args:
            saved_s: (steps, ranks).
        """
        left_s = self.busy_s - np.asarray(saved_s)
        return float(np.mean(self.busy_s.max(axis=1) - left_s.max(axis=1)))


def _key(rows: Array) -> Array:
    """Rank and step as one number."""
    return (rows["rank"].astype(np.int64) << 40) + rows["step"]
