"""Speculation: guess the next tokens, and compute several at once.

A guess that is right saves forward passes; a wrong one costs the time of its tokens. Texts don't
change: each token is chosen from the network's logits, and a guess only says which to compute.

| kind | guesses by | file |
|---|---|---|
| ngram | what followed the same tokens earlier in the text | here |
| draft | a small network | draft |
| heads | small layers that read the network's last state | head_guesser |

A kind that is named always guesses `serve.guess_tokens`. "auto" takes in each step the kind and the
numbers that promise the most tokens per second (`gain`), which may be none.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from paceline.generate.gain import Acceptance, PassTimes, best_plan
from paceline.generate.scheduler import Chunk
from paceline.generate.sequence import Sequence

_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2
_FARTHEST_BACK = 2048
_TRIED_EVERY = 16
"""Steps after which each kind in turn guesses, to see whether it pays by now."""


class Guesser:
    """One kind of guesses. What stands here is that of a kind that takes no time and no memory."""

    def most(self, sequence: Sequence, most: int) -> int:
        """How many tokens it can guess of a sequence, up to so many."""
        raise NotImplementedError

    def guess(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, tuple[int, ...]]:
        """Guess at most so many tokens of each sequence, whose blocks have room for them."""
        raise NotImplementedError

    def seconds(self, by_depth: List[int]) -> float:
        """What guessing the first, second, ... token of so many sequences takes."""
        return 0.0

    @contextmanager
    def watch(self, chunks: List[Chunk]) -> Iterator[None]:
        """Within the context the network computes chunks."""
        yield

    def computed(self, chunk: Chunk, num_right: int) -> None:
        """A chunk was computed, and so many tokens of anybody's guess of it were right."""

    def learn(self, chunk: Chunk, num_right: int) -> None:
        """So many tokens of a chunk, whose guess it made, were right."""

    def clear(self, blocks: List[int]) -> None:
        """Blocks have got new users."""

    def weights_changed(self) -> None:
        """The network has other weights."""


class NgramGuesser(Guesser):
    """What followed the last few tokens where they stood last, the longest match first
    (https://github.com/apoorvumang/prompt-lookup-decoding)."""

    def most(self, sequence: Sequence, most: int) -> int:
        """See `Guesser`."""
        return len(self._following(sequence.tokens[-_FARTHEST_BACK:], most))

    def guess(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, tuple[int, ...]]:
        """See `Guesser`."""
        return {
            sequence: self._following(sequence.tokens[-_FARTHEST_BACK:], count)
            for sequence, count in counts.items()
        }

    @staticmethod
    def _following(tokens: list[int], most: int) -> tuple[int, ...]:
        for length in range(_LONGEST_MATCH, _SHORTEST_MATCH - 1, -1):
            last = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start : start + length] == last:
                    return tuple(tokens[start + length : start + length + most])
        return ()


@dataclass(frozen=True)
class Load:
    """A step without guesses."""

    rows: int
    """Tokens of its pass."""
    room: int
    """For more of them."""


class Speculator:
    """Decides what is guessed, and learns how often it was right.

    Args:
        guessers: by kind; none: nothing is guessed.
        most: tokens that are guessed of a text at a time.
        pass_times: of the network, to guess no more than pays; None: guess as many as allowed.
    """

    def __init__(
        self, guessers: Mapping[str, Guesser], most: int, pass_times: PassTimes | None
    ) -> None:
        self._guessers, self._most, self._pass_times = guessers, most, pass_times
        self._rates = {kind: Acceptance() for kind in guessers}
        self._texts: dict[str, WeakKeyDictionary[Sequence, Acceptance]] = {
            kind: WeakKeyDictionary() for kind in guessers
        }
        self._kind = next(iter(guessers), "")
        """That guesses in this step."""
        self._num_steps = 0
        self.num_guessed = self.num_right = 0

    def counts(self, running: Collection[Sequence], load: Load) -> Mapping[Sequence, int]:
        """How many tokens of each running sequence to guess in the next step."""
        if not self._guessers:
            return {}
        ready = [one for one in running if one.num_left == 1]
        offers = {kind: self._offers(kind, ready) for kind in self._guessers}
        if self._pass_times is None:
            return {one: most for one, (_, most) in offers[self._kind].items()}
        plans = {
            kind: best_plan(
                offer, len(ready), load.rows, load.room, self._pass_times,
                self._guessers[kind].seconds,
            )
            for kind, offer in offers.items()
        }  # fmt: skip
        self._num_steps += 1
        turn, step = divmod(self._num_steps, _TRIED_EVERY)
        if step == 0 and load.room > 0:
            self._kind = [*plans][turn % len(plans)]
            tried = [*offers[self._kind]][: turn % 8 + 1][-1:]
            return plans[self._kind].counts or dict.fromkeys(tried, 1)
        self._kind = max(plans, key=lambda kind: plans[kind].tokens_per_s)
        return plans[self._kind].counts

    def guess(self, chunks: List[Chunk]) -> list[Chunk]:
        """Put guesses into chunks that have room for them."""
        counts = {chunk.sequence: chunk.num_guessed for chunk in chunks if chunk.num_guessed}
        if not counts:
            return [*chunks]
        guesses = self._guessers[self._kind].guess(counts)
        return [chunk.with_guess(guesses.get(chunk.sequence, ())) for chunk in chunks]

    @contextmanager
    def watch(self, chunks: List[Chunk]) -> Iterator[None]:
        """Within the context the network computes chunks."""
        with ExitStack() as stack:
            for guesser in self._guessers.values():
                stack.enter_context(guesser.watch(chunks))
            begun = time.perf_counter()
            yield
        if self._pass_times is not None:
            rows = sum(chunk.num_tokens for chunk in chunks)
            self._pass_times.took(rows, time.perf_counter() - begun)

    def learn(self, chunk: Chunk, num_right: int) -> None:
        """So many tokens of a chunk's guess were right."""
        for guesser in self._guessers.values():
            guesser.computed(chunk, num_right)
        if not chunk.guess:
            return
        self.num_guessed += len(chunk.guess)
        self.num_right += num_right
        self._guessers[self._kind].learn(chunk, num_right)
        for seen in (self._rates[self._kind], self._of_text(self._kind, chunk.sequence)):
            seen.saw(len(chunk.guess), num_right)

    def clear(self, blocks: List[int]) -> None:
        """Blocks have got new users."""
        for guesser in self._guessers.values():
            guesser.clear(blocks)

    def weights_changed(self) -> None:
        """The network has other weights."""
        for guesser in self._guessers.values():
            guesser.weights_changed()

    def _offers(self, kind: str, ready: Iterable[Sequence]) -> dict[Sequence, tuple[float, int]]:
        """Of each sequence that a kind has guesses for: how likely they are right, how many."""
        mosts = {one: self._most_of(self._guessers[kind], one) for one in ready}
        return {one: (self._of_text(kind, one).rate, most) for one, most in mosts.items() if most}

    def _most_of(self, guesser: Guesser, sequence: Sequence) -> int:
        # A grammar's state is that of the text, not of a guess.
        left = sequence.most_tokens - len(sequence.tokens) - 1
        if sequence.matcher is not None or left < 1:
            return 0
        return guesser.most(sequence, min(self._most, left))

    def _of_text(self, kind: str, sequence: Sequence) -> Acceptance:
        texts = self._texts[kind]
        if sequence not in texts:
            texts[sequence] = Acceptance(self._rates[kind].rate)
        return texts[sequence]
