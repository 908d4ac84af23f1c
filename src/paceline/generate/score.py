"""Score: how likely a network holds texts that are given, by the passes that make texts.

How it works: texts follow one another through passes of as many tokens as there are when texts are
made, so a long one is cut and short ones go together. Every token's logits are wanted, and a text
gives its blocks back when its last token is computed.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.generate.blocks import Blocks
from paceline.generate.paged import Memory
from paceline.generate.runner import Runner
from paceline.generate.scheduler import Chunk
from paceline.generate.sequence import Sequence


@dataclass(frozen=True)
class Given:
    """A text, and what follows each of its tokens."""

    tokens: List[int]
    targets: List[int]


class Score(NamedTuple):
    """How a text was expected."""

    losses: Tensor
    """-log p of its targets: (num_tokens,) fp32, in nats."""
    are_likeliest: Tensor
    """Whether no other token was likelier: (num_tokens,) bool."""


class Scorer:
    """Scores with the memory of an engine that makes no texts meanwhile.

    Args:
        most_tokens: of a pass.
    """

    def __init__(self, runner: Runner, memory: Memory, blocks: Blocks, most_tokens: int) -> None:
        self._runner, self._memory, self._blocks = runner, memory, blocks
        self._most_tokens = most_tokens

    def scores(self, texts: Iterable[Given]) -> Iterator[Score]:
        """Of each text, in order.

        Raises:
            InputError: a text is longer than all blocks.
        """
        longest = self._blocks.num_blocks * self._memory.block_size
        under_way: list[_Scored] = []
        room = self._most_tokens
        for given in texts:
            if len(given.tokens) > longest:
                raise InputError(
                    f"A text has {len(given.tokens)} tokens, and there is memory for the keys and "
                    f"values of {longest}: raise serve.kv_gb, or shorten it."
                )
            scored = _Scored(given)
            under_way.append(scored)
            while scored.num_left:
                planned = self._plan(scored, room)
                room -= planned
                if not room or not planned:
                    yield from self._pass(under_way)
                    room = self._most_tokens
        yield from self._pass(under_way)

    def _plan(self, scored: "_Scored", room: int) -> int:
        """Let a text's next tokens be computed in this pass; how many: as blocks are left."""
        sequence, size = scored.sequence, self._memory.block_size
        start = sequence.num_computed
        most = (len(sequence.blocks) + self._blocks.num_free) * size
        stop = min(start + room, len(sequence.tokens), most)
        if stop == start:
            return 0
        for _ in range(-(-stop // size) - len(sequence.blocks)):
            sequence.blocks.append(self._blocks.take())
        sequence.num_computed = stop
        scored.chunk = Chunk(sequence, start, stop, stop - start)
        return stop - start

    def _pass(self, under_way: list["_Scored"]) -> Iterator[Score]:
        """Compute what was planned; the scores of texts that are complete, which are taken out."""
        planned = [(scored, scored.chunk) for scored in under_way if scored.chunk is not None]
        if not planned:
            return
        self._memory.clear(self._blocks.newly_taken())
        chunks = [chunk for _, chunk in planned]
        rows = self._runner.logits(chunks).split([chunk.num_tokens for chunk in chunks])
        for (scored, chunk), logits in zip(planned, rows, strict=True):
            scored.take(chunk, logits)
        while under_way and not under_way[0].num_left:
            done = under_way.pop(0)
            for block in done.sequence.blocks:
                self._blocks.give_back(block)
            yield Score(torch.cat(done.losses), torch.cat(done.are_likeliest))


class _Scored:
    """A text, as far as it is scored."""

    def __init__(self, given: Given) -> None:
        tokens = [*given.tokens]
        self.sequence = Sequence(tokens, Sampling(), 0, len(tokens), len(tokens))
        self._targets = torch.tensor(given.targets)
        self.losses: list[Tensor] = []
        self.are_likeliest: list[Tensor] = []
        self.chunk: Chunk | None = None
        """That the next pass computes."""

    @property
    def num_left(self) -> int:
        return self.sequence.num_left

    def take(self, chunk: Chunk, logits: Tensor) -> None:
        """Of a chunk: (num_tokens, vocab)."""
        targets = self._targets[chunk.start : chunk.stop].to(logits.device)
        log = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        self.losses.append(-log.cpu())
        self.are_likeliest.append((logits.argmax(-1) == targets).cpu())
        self.chunk = None
