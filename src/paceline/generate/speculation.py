"""Speculation: guess the next tokens, and compute several at once.

A guess that is right saves forward passes; a wrong one costs the time of its tokens. Texts don't
change: each token is chosen from the network's logits, and a guess only says which to compute.

"ngram": what followed the last tokens where they stood before, in prompt or text
(https://github.com/apoorvumang/prompt-lookup-decoding). It needs no network.
"""

from collections.abc import Callable
from typing import Literal

from paceline.generate.sequence import Sequence

Guess = Callable[[Sequence, int], tuple[int, ...]]
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2
_MOST_TOKENS = 6
_FARTHEST_BACK = 2048


def guess_of(kind: Literal["off", "ngram"]) -> Guess:
    """The function that guesses at most so many tokens of a sequence."""
    return _no_guess if kind == "off" else ngram_guess


def _no_guess(sequence: Sequence, most: int) -> tuple[int, ...]:
    return ()


def ngram_guess(sequence: Sequence, most: int) -> tuple[int, ...]:
    """What followed the last few tokens where they stood last, the longest match first."""
    if sequence.matcher is not None:
        return ()
    tokens = sequence.tokens[-_FARTHEST_BACK:]
    for length in range(_LONGEST_MATCH, _SHORTEST_MATCH - 1, -1):
        last = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == last:
                following = tokens[start + length : start + length + min(most, _MOST_TOKENS)]
                return tuple(following)
    return ()
