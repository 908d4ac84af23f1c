"""Guesses by heads: from the network's last state of each text (`models.heads`).

How it works: while the network computes a pass, the states that its own head reads are taken note
of. Of each text that of its last token is kept; the heads go on from there, all texts together.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.generate.choice import Place, choose
from paceline.generate.gain import PassTimes
from paceline.generate.scheduler import Chunk
from paceline.generate.sequence import Sequence
from paceline.generate.speculation import Guesser
from paceline.models.heads import GuessHeads


class HeadGuesser(Guesser):
    """Guesses by heads.

    Args:
        heads: of the network that makes the texts.
        most_texts: at a time.
        is_timed: measure what they take.
    """

    def __init__(self, heads: GuessHeads, most_texts: int, *, is_timed: bool) -> None:
        self._heads = heads
        self._states: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()
        """Of each text (hidden,), from which its last token was chosen."""
        self._rows: dict[Chunk, Tensor] = {}
        """Of a chunk of this pass: (num_choices, hidden)."""
        self._times = PassTimes(self._measured(most_texts)) if is_timed else None

    def most(self, sequence: Sequence, most: int) -> int:
        """See `Guesser`."""
        return min(most, len(self._heads.heads)) if sequence in self._states else 0

    def seconds(self, by_depth: List[int]) -> float:
        """See `Guesser`."""
        assert self._times is not None
        return sum(map(self._times, by_depth))

    @torch.inference_mode()
    def guess(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, tuple[int, ...]]:
        """See `Guesser`."""
        guesses: dict[Sequence, tuple[int, ...]] = dict.fromkeys(counts, ())
        state = torch.stack([self._states[sequence] for sequence in counts])
        for number in range(1, max(counts.values()) + 1):
            begun = time.perf_counter()
            last = [(*sequence.tokens[-1:], *guesses[sequence])[-1] for sequence in counts]
            state = self._heads.next_state(number, state, torch.tensor(last, device=state.device))
            places = [Place(sequence, guess) for sequence, guess in guesses.items()]
            chosen = choose(self._heads.logits(state), places)
            for sequence, token in zip(counts, chosen, strict=True):
                guesses[sequence] += (token,)
            if self._times is not None:
                self._times.took(len(counts), time.perf_counter() - begun)
        return {one: guess[: counts[one]] for one, guess in guesses.items()}

    @contextmanager
    def watch(self, chunks: List[Chunk]) -> Iterator[None]:
        """See `Guesser`."""
        seen: list[Tensor] = []
        norm = self._heads.trunk.norm
        assert norm is not None
        hook = norm.register_forward_hook(lambda _module, _args, states: seen.append(states[0]))
        try:
            yield
        finally:
            hook.remove()
        (states,) = seen
        sizes = [chunk.num_told + chunk.num_choices for chunk in chunks]
        if len(states) != sum(sizes):  # an exact pass computes all rows, and more than there are
            sizes = [chunk.num_tokens for chunk in chunks]
        stops = itertools.accumulate(sizes)
        parts = [
            states[stop - chunk.num_choices : stop]
            for chunk, stop in zip(chunks, stops, strict=True)
        ]
        self._rows = dict(zip(chunks, parts, strict=True))

    def computed(self, chunk: Chunk, num_right: int) -> None:
        """See `Guesser`."""
        if chunk.num_choices:
            self._states[chunk.sequence] = self._rows[chunk][num_right].clone()

    def weights_changed(self) -> None:
        """See `Guesser`."""
        self._states.clear()

    @torch.inference_mode()
    def _measured(self, most_texts: int) -> dict[int, float]:
        """Seconds of a head for 1, 2, 4, ... texts."""
        hidden, first = self._heads.model.trunk.hidden_size, next(self._heads.parameters())
        times: dict[int, float] = {}
        for size in (2**power for power in range(8)):
            if size > most_texts:
                break
            state = first.new_zeros(size, hidden)
            tokens = torch.zeros(size, dtype=torch.long, device=first.device)
            for _ in range(2):
                begun = time.perf_counter()
                made = self._heads.next_state(1, state, tokens)
                self._heads.logits(made).argmax(-1).tolist()
                times[size] = min(time.perf_counter() - begun, times.get(size, 1e9))
        return times
