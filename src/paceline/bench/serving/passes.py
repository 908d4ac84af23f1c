"""Passes: what an engine's forward passes take, by what they compute, and its host beside them.

How it works: the passes are put together by hand, so that rows, contexts and parts of prompts come
in combinations that tell their costs apart. The blocks that they read were filled by passes before,
which no untouched memory could stand for: it is one page of zeros. The host's part is taken from
steps of the engine as it is.
"""

import time
from collections.abc import Sequence as List
from dataclasses import dataclass
from statistics import median

import torch

from paceline.config.sampling import Sampling
from paceline.generate.engine import Engine
from paceline.generate.scheduler import Chunk
from paceline.generate.sequence import Sequence
from paceline.generate.work import Step, WorkCounter
from paceline.plan.serving.measured import MeasuredPass

_MOST_FILLED = 12_288
"""Tokens whose keys and values are computed first: seconds."""
_SHORT = 15
_HOST_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    """A pass: the place of each single token, and first token and number of each part."""

    single: tuple[int, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()


class PassMeter:
    """Times passes of an idle engine.

    Args:
        most_tokens: of a pass.
        sampling: of the texts by which the host is measured.
    """

    def __init__(self, engine: Engine, most_tokens: int, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._size = engine.serving.block_size
        self._most_tokens = most_tokens
        self._most_texts = engine.serving.max_sequences
        self._count = WorkCounter(engine.decoder.model, self._size)
        self._lengths = self._filled_lengths()
        self.shapes = self._shapes()
        self.host_sizes = sorted({1, min(8, self._most_texts), self._most_texts})

    def fill(self) -> None:
        """Compute keys and values for all passes to read."""
        for place, length in enumerate(self._lengths):
            for first in range(0, length, self._most_tokens):
                stop = min(length, first + self._most_tokens)
                self._engine.compute([self._chunk(place, first, stop)])

    def passes(self) -> list[MeasuredPass]:
        """Those that are measured, without times."""
        works = [self._count(self._chunks(shape)) for shape in self.shapes]
        return [MeasuredPass(**vars(work)) for work in works]

    def pass_s(self, shape: Shape) -> float:
        """Seconds of a pass; a call before it warms up."""
        chunks = self._chunks(shape)
        self._engine.compute(chunks)
        _wait()
        begun_s = time.perf_counter()
        self._engine.compute(chunks)
        _wait()
        return time.perf_counter() - begun_s

    def host_s(self, num_texts: int) -> float:
        """Seconds of the host's part of a step in which so many texts get a token each."""
        engine, seconds = self._engine, list[float]()

        def tell(step: Step) -> None:
            if len(step.chunks) == num_texts and all(c.num_tokens == 1 for c in step.chunks):
                seconds.append(step.host_s)

        sampling = self._sampling.replace(max_tokens=_HOST_TOKENS, ignore_end=True)
        for text in range(num_texts):
            engine.submit([text % 2, *range(2)], sampling, salt=str(text).encode())
        engine.tell_step = tell
        while not engine.is_idle:
            engine.step()
        engine.tell_step = None
        return median(seconds)

    def _filled_lengths(self) -> list[int]:
        """Tokens of each text that passes read: one as long as can be, the others alike."""
        blocks, longest = self._engine.numbers()["blocks"], self._engine.longest - 1
        room = min(_MOST_FILLED, blocks * self._size - longest)
        others = min(longest, room // max(1, self._most_texts - 1)) // self._size * self._size
        return [longest, *(max(others, 1) for _ in range(self._most_texts - 1))]

    def _shapes(self) -> list[Shape]:
        found = []
        for count in _doubled(1, self._most_texts):
            lengths = self._lengths[:count]
            found += [
                Shape(tuple(min(most, length) - 1 for length in lengths))
                for most in (_SHORT, self._lengths[-1], self._lengths[0])
            ]
        longest = self._lengths[0]
        for count in _doubled(16, min(self._most_tokens, longest)):
            firsts = {0, (longest - count) // 2, longest - count} if count < longest else {0}
            found += [Shape(parts=((first, count),)) for first in sorted(firsts)]
        most = min(self._most_tokens, longest)
        for texts in {self._most_texts // 4, self._most_texts - 1} - {0}:
            for count in (most // 4, most - texts):
                if count > 1:
                    single = tuple(length - 1 for length in self._lengths[1 : texts + 1])
                    found.append(Shape(single, ((0, count),)))
        return list(dict.fromkeys(found))

    def _chunks(self, shape: Shape) -> list[Chunk]:
        """A part takes the longest text; single tokens beside it the others."""
        begin = len(shape.parts)
        return [
            *(self._chunk(begin + n, at, at + 1) for n, at in enumerate(shape.single)),
            *(self._chunk(n, first, first + count) for n, (first, count) in enumerate(shape.parts)),
        ]

    def _chunk(self, place: int, first: int, stop: int) -> Chunk:
        tokens = [0] * stop
        text = Sequence(tokens, self._sampling, 0, stop, stop + 1)
        begin = sum(-(-length // self._size) for length in self._lengths[:place])
        text.blocks = [*range(begin, begin + -(-stop // self._size))]
        return Chunk(text, first, stop, 1)


def _doubled(first: int, most: int) -> List[int]:
    """first, its double and so on, and the most that may be."""
    sizes = [min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


def _wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
