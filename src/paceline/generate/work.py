"""Work: what a step computes, in the numbers that its time depends on, and how long it took."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.model import Model
from paceline.generate.scheduler import Chunk


@dataclass(frozen=True)
class Work:
    """Of one forward pass."""

    choices: int
    """Tokens whose logits are wanted."""
    single: int = 0
    """Tokens that are computed alone, one of a sequence."""
    blocks: float = 0.0
    """Of keys and values, that these read, each for itself; mean over layers."""
    parts: int = 0
    """Parts of prompts, of more than one token."""
    in_parts: int = 0
    """Tokens of these parts."""
    keys: int = 0
    """That parts read from blocks: those behind a prompt's beginning."""
    pairs: int = 0
    """Of queries and keys, in attention of these parts; masked ones too where they are computed."""

    @property
    def rows(self) -> int:
        """Tokens that are computed."""
        return self.single + self.in_parts


class WorkCounter:
    """Counts the work of a network's passes.

    Args:
        model: says which tokens its layers see.
        block_size: tokens of a block.
    """

    def __init__(self, model: Model, block_size: int) -> None:
        self._block_size = block_size
        windows = Counter(model.window(layer) for layer in range(model.num_layers))
        self._shares = [(window, n / model.num_layers) for window, n in windows.items()]

    def __call__(self, chunks: Sequence[Chunk]) -> Work:
        """The work of a pass over these chunks."""
        single = [chunk.start for chunk in chunks if chunk.num_tokens == 1]
        parts = [(chunk.start, chunk.num_tokens) for chunk in chunks if chunk.num_tokens > 1]
        return Work(
            choices=sum(chunk.num_choices for chunk in chunks),
            single=len(single),
            blocks=sum(map(self._blocks, single)),
            parts=len(parts),
            in_parts=sum(count for _, count in parts),
            keys=sum(first + count for first, count in parts if first),
            pairs=sum(_pairs(first, count) for first, count in parts),
        )

    def _blocks(self, position: int) -> float:
        """Blocks that a token sees, mean over layers."""
        seen, last = 0.0, position // self._block_size
        for window, share in self._shares:
            oldest = 0 if window is None else max(0, position - window + 1)
            seen += share * (last - oldest // self._block_size + 1)
        return seen


def _pairs(first: int, count: int) -> int:
    """A prompt's beginning leaves out what its causal mask hides; a later part computes it all."""
    return count * (first + count) if first else count * (count + 1) // 2


@dataclass(frozen=True)
class Step:
    """What a step computed, and when it did so by `time.perf_counter`."""

    chunks: Sequence[Chunk]
    begun_s: float
    pass_begun_s: float
    pass_ended_s: float
    ended_s: float

    @property
    def pass_s(self) -> float:
        """Seconds of the forward pass."""
        return self.pass_ended_s - self.pass_begun_s

    @property
    def host_s(self) -> float:
        """Seconds before and after it: which tokens to compute, and which come next."""
        return self.ended_s - self.begun_s - self.pass_s
