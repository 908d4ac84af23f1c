"""Kept state: what a rank keeps of a run from one generation to the next, and who watches it.

A run that isn't elastic has no generations: it keeps nothing, and nobody watches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.observe.run import Run
from paceline.train.checkpoint.held import HeldState
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.rank_stats import UNWATCHED, Watch


class GenerationOverError(Exception):
    """The generation ended while this rank computed."""


@dataclass
class KeptState:
    """Of one rank."""

    watch: Watch = UNWATCHED
    """Who is told where it is."""
    generation: int = 0
    """The present one; 0: there are none."""
    held: Sequence[HeldState] = ()
    """What it had in memory when the generation before ended."""
    holders: LockstepRanks | None = None
    """All that may hold a part of the state; None: those that train."""

    def must_be_newest(self, run: Run) -> None:
        """Before the Run is written to: a side of a split network that lost writes no more.

        Raises:
            GenerationOverError: a newer generation was claimed.
        """
        if self.generation and (run.path / "generations" / f"{self.generation + 1}.json").exists():
            raise GenerationOverError

    @contextmanager
    def keeping(self, held: Callable[[], Sequence[HeldState]]) -> Iterator[None]:
        """Around all that trains: keep what is held when that ends, however it does."""
        try:
            yield
        finally:
            self.held = held() or self.held
