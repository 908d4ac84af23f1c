"""Draft: a small network with the same tokens guesses what the large one will choose.

How it works: it runs as the large one does, with keys and values in memory of its own, whose blocks
have the numbers of the large one's. So what happens to a text's blocks (sharing, preemption) holds
for both. What a draft lacks in them is computed when it guesses. It chooses its tokens as the
request wants them, by the random number of their place: so drawn tokens are often the same, too.

Paper: https://arxiv.org/abs/2211.17192 (Leviathan et al.).
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as List

import numpy as np

from paceline.generate.choice import Place, choose
from paceline.generate.gain import PassTimes
from paceline.generate.paged import KeyShape, Memory
from paceline.generate.runner import Runner
from paceline.generate.scheduler import Chunk
from paceline.generate.sequence import Sequence
from paceline.generate.speculation import Guesser
from paceline.models.decoder import Decoder


class DraftGuesser(Guesser):
    """Guesses by a small network.

    Args:
        draft: knows the same tokens as the network.
        num_blocks: of the network's memory; `block_size` likewise.
        most_tokens: of a pass of the draft.
        is_timed: measure what its passes take.
    """

    def __init__(
        self, draft: Decoder, num_blocks: int, block_size: int, most_tokens: int, *, is_timed: bool
    ) -> None:
        first = next(draft.parameters())
        self._memory = Memory(KeyShape.of(draft), num_blocks, block_size, first.dtype, first.device)
        self._runner = Runner(draft, self._memory)
        self._longest, self._most_tokens = draft.model.max_seq_len, most_tokens
        self._times = PassTimes(self._runner.times(most_tokens)) if is_timed else None
        self._num_there = np.zeros(num_blocks, np.int64)
        """Tokens of each block whose keys and values the draft has."""

    def most(self, sequence: Sequence, most: int) -> int:
        """See `Guesser`."""
        return max(0, min(most, self._longest - len(sequence.tokens)))

    def seconds(self, by_depth: List[int]) -> float:
        """See `Guesser`."""
        assert self._times is not None
        return sum(map(self._times, by_depth))

    def guess(self, counts: Mapping[Sequence, int]) -> Mapping[Sequence, tuple[int, ...]]:
        """See `Guesser`."""
        chunks = self._missing(counts)
        guesses: dict[Sequence, tuple[int, ...]] = {
            chunk.sequence: () for chunk in chunks if chunk.num_choices
        }
        while chunks:
            begun = time.perf_counter()
            logits = self._runner.logits(chunks)
            ready = [chunk.sequence for chunk in chunks if chunk.num_choices]
            chosen = choose(logits, [Place(sequence, guesses[sequence]) for sequence in ready])
            if self._times is not None:
                rows = sum(chunk.num_tokens for chunk in chunks)
                self._times.took(rows, time.perf_counter() - begun)
            chunks = []
            for sequence, token in zip(ready, chosen, strict=True):
                guesses[sequence] += (token,)
                if len(guesses[sequence]) < counts[sequence]:
                    place = len(sequence.tokens) + len(guesses[sequence]) - 1
                    chunks.append(Chunk(sequence, place, place, 1, guess=(token,)))
        return guesses

    def learn(self, chunk: Chunk, num_right: int) -> None:
        """See `Guesser`: it has the keys and values of its right guesses, but of its last one."""
        self._mark(chunk.sequence, chunk.stop + min(num_right, len(chunk.guess) - 1))

    def clear(self, blocks: List[int]) -> None:
        """See `Guesser`."""
        self._memory.clear(blocks)
        self._num_there[blocks] = 0

    def _missing(self, sequences: Mapping[Sequence, int]) -> list[Chunk]:
        """What it lacks of each sequence, as far as a pass has room."""
        chunks, room = [], self._most_tokens
        for sequence in sequences:
            start, whole = self._num_known(sequence), len(sequence.tokens)
            stop = min(whole, start + room)
            if stop > start:
                chunks.append(Chunk(sequence, start, stop, int(stop == whole)))
                room -= stop - start
                self._mark(sequence, stop)
        return chunks

    def _num_known(self, sequence: Sequence) -> int:
        """Tokens at its beginning whose keys and values the draft has; never the last one."""
        there = self._num_there[sequence.blocks]
        (partly,) = np.nonzero(there < self._memory.block_size)
        num = there[: partly[0] + 1].sum() if len(partly) else there.sum()
        return min(int(num), len(sequence.tokens) - 1)

    def _mark(self, sequence: Sequence, num_tokens: int) -> None:
        """It has the keys and values of so many tokens of a sequence."""
        size, blocks = self._memory.block_size, sequence.blocks
        there = np.clip(num_tokens - size * np.arange(len(blocks)), 0, size)
        self._num_there[blocks] = np.maximum(self._num_there[blocks], there)
