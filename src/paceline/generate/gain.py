"""Gain: how many tokens it pays to guess of each text.

How it works: the next guess of a text is right with some probability, its acceptance a; the k-th in
a row then gives a^k tokens more. It costs a row of the network's pass, and what guessing takes. The
likeliest guesses are added one by one, and the number with the most tokens per second is taken:
none where no guess pays, as in a full batch, where each row costs as much as a token.

Acceptance and seconds are running estimates of what was seen. Texts don't depend on them.

Paper: expected tokens of a guess https://arxiv.org/abs/2211.17192 (equation 1).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

_NEWEST, _OTHERS = 0.1, 0.05
"""The weight of a measurement in the estimate of its number of rows, and in those of others."""
_KEPT = 0.9
"""Of what was seen of a text's guesses, each time that more is seen."""
_PRIOR = 2.0
"""So many guesses of a text weighs what was seen of all others."""


@dataclass(frozen=True)
class Plan(Generic[T]):
    """How many tokens are guessed, and what is expected of it."""

    counts: Mapping[T, int]
    tokens_per_s: float


def best_plan(
    offers: Mapping[T, tuple[float, int]],
    num_texts: int,
    rows: int,
    room: int,
    pass_s: Callable[[int], float],
    guess_s: Callable[[Sequence[int]], float],
) -> Plan[T]:
    """The plan with the most tokens per second.

    Args:
        offers: of each text its acceptance, and how many tokens can be guessed.
        num_texts: that get their next token in this pass, with those that have no offer.
        rows: tokens of the pass without guesses.
        room: that it has for more of them.
        pass_s: seconds of a pass of so many tokens.
        guess_s: seconds of guessing the first, second, ... token of so many texts.
    """
    gains = sorted(
        ((rate**depth, -depth, text) for text, (rate, most) in offers.items()
         for depth in range(1, most + 1)),
        key=lambda gain: gain[:2],
        reverse=True,
    )  # fmt: skip
    counts: dict[T, int] = {}
    by_depth: list[int] = []
    tokens = float(num_texts)
    best = Plan[T]({}, tokens / pass_s(rows))
    for number, (gain, minus_depth, text) in enumerate(gains[: max(0, room)], 1):
        tokens += gain
        counts[text] = depth = -minus_depth
        by_depth += [0] * (depth - len(by_depth))
        by_depth[depth - 1] += 1
        rate = tokens / (pass_s(rows + number) + guess_s(by_depth))
        if rate > best.tokens_per_s:
            best = Plan({**counts}, rate)
    return best


class Acceptance:
    """How often guesses are right: of one text, or of all."""

    def __init__(self, rate: float = 0.5) -> None:
        self._right, self._tried = _PRIOR * rate, _PRIOR

    @property
    def rate(self) -> float:
        """The probability that the next guess is right."""
        return self._right / self._tried

    def saw(self, num_guessed: int, num_right: int) -> None:
        """Of so many guesses in a row so many were right; those after a wrong one don't count."""
        self._right = _KEPT * self._right + num_right
        self._tried = _KEPT * self._tried + min(num_guessed, num_right + 1)


class PassTimes:
    """Seconds of passes by their number of rows.

    Args:
        measured: first estimates, of numbers of rows that increase.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._rows, self._logs = [*measured], [math.log(s) for s in measured.values()]

    def __call__(self, rows: int) -> float:
        """Estimate: between two numbers of rows on a line, and beyond the last one as it went."""
        if len(self._rows) == 1 or rows <= self._rows[0]:
            return math.exp(self._logs[0])
        right = min(bisect_right(self._rows, rows), len(self._rows) - 1)
        first, last = math.exp(self._logs[right - 1]), math.exp(self._logs[right])
        start, stop = self._rows[right - 1 : right + 1]
        return max(first, first + (last - first) * (rows - start) / (stop - start))

    def took(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long.

        Estimates of other numbers of rows follow half as fast: the machine has become faster or
        slower for them, too.
        """
        off = math.log(seconds / self(rows))
        near = {min(range(len(self._rows)), key=lambda place: abs(self._rows[place] - rows))}
        for place, (start, stop) in enumerate(pairwise(self._rows)):
            if start <= rows <= stop:
                near = {place, place + 1}
        for place in range(len(self._rows)):
            self._logs[place] += (_NEWEST if place in near else _OTHERS) * off
