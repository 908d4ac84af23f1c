"""Error feedback: what compression lost so far is added to what is sent next.

With it even biased compressors (top-k, signs, low rank) converge like the exact sum
(https://arxiv.org/abs/1901.09847). Every rank keeps for every named parameter the error of what it
has sent, flat, in the order of the parameter's values and in units of the mean: the sum of all
ranks' errors is what the mean gradient is still owed. A rank's own part of a sum, which it reduces
exactly, holds the error of the mean that it sent back (`means`), in the same units; so one
buffer is enough for both ends.

Names survive a change of buckets and of the number of ranks: a rank takes over the errors of the
old ranks numbered like itself modulo the new number of ranks, so their sum stays.

Not here: the errors themselves, which the compressors write.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BufferPart(NamedTuple):
    """A parameter in a flat buffer of gradients."""

    name: str
    shape: torch.Size
    is_compressed: bool

    @property
    def num_values(self) -> int:
        """Its length in the buffer."""
        return self.shape.numel()


class ErrorFeedback:
    """The errors of one rank, by name of parameter."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._errors: dict[str, Tensor] = {}
        self._spans: dict[tuple[BufferPart, ...], Tensor] = {}

    def span(self, parts: Sequence[BufferPart], like: Tensor) -> Tensor:
        """The errors of consecutive parameters as one buffer, to be written in place.

        Args:
            parts: of the buffer, in order; what isn't compressed has room there, of zeros.
            like: gives device and dtype.

        Returns:
            (sum of num_values,); the same buffer each time, until a parameter moves to another.
        """
        key = tuple(parts)
        if key not in self._spans:
            self._spans[key] = self._move(key, like)
        return self._spans[key]

    def _move(self, parts: tuple[BufferPart, ...], like: Tensor) -> Tensor:
        """Bring the errors of these parameters together; buffers they leave are given back."""
        names = {part.name for part in parts}
        left = [key for key in self._spans if any(part.name in names for part in key)]
        for key in left:
            del self._spans[key]
        flat = like.new_zeros(sum(part.num_values for part in parts))
        for part, view in zip(parts, flat.split([p.num_values for p in parts]), strict=True):
            if not part.is_compressed:
                continue
            if part.name in self._errors:
                view.copy_(self._errors[part.name])
            self._errors[part.name] = view
        return flat

    @property
    def held(self) -> list[Tensor]:
        """The buffers that hold all errors."""
        return list(self._spans.values())

    def squared_norm(self) -> Tensor:
        """The sum of squares of this rank's errors: () fp64."""
        if not self._spans:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(self.held)).double().square().sum()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps: {rank: {name: (num_values,)}}, the live tensors."""
        return {str(self._rank): dict(self._errors)}

    def takes_over(self, saved_rank: int) -> bool:
        """Whether this rank loads what that rank saved."""
        return saved_rank % self._num_ranks == self._rank

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on with the sum of the errors of the ranks taken over, in place of those held."""
        self._spans.clear()
        self._errors.clear()
        for of_rank in state.values():
            for name, error in of_rank.items():
                held = self._errors.get(name)
                self._errors[name] = error if held is None else held + error
