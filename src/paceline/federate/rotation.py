"""Rotation: a vector turned at random, so that its numbers are alike and any part of them is fair.

How it works: signs and order are drawn, and blocks of the result go through a Hadamard transform,
which keeps lengths. Each number is then a sum of thousands, so all are spread like a Gaussian of
one width, whichever numbers the vector had (https://arxiv.org/abs/1611.00429). A grid of few values
fits all of them, and the first numbers of each block are a random part of the whole.
"""

import math

import numpy as np

from paceline.federate.grid import Floats
from paceline.federate.lattice import DIMENSION

_BLOCK = 4096


class Rotation:
    """One rotation, the same for all who know its seed.

    Args:
        count: numbers of a vector; at least 1.
        seed: of signs and order.
        share: of the numbers of a turned vector that are kept; above 0.
    """

    def __init__(self, count: int, seed: int, share: float) -> None:
        self._count = count
        self._block = min(_BLOCK, max(DIMENSION, 1 << (count - 1).bit_length()))
        padded = -(-count // self._block) * self._block
        stream = np.random.default_rng(seed)
        self._signs = stream.choice([-1.0, 1.0], padded)
        self._order = stream.permutation(padded)
        self._kept = DIMENSION * max(1, round(share * self._block / DIMENSION))

    @property
    def share(self) -> float:
        """That is kept: `share`, in whole sixteens of a block."""
        return self._kept / self._block

    @property
    def num_kept(self) -> int:
        """Numbers of a turned vector."""
        return len(self._signs) // self._block * self._kept

    def turned(self, vector: Floats) -> Floats:
        """(count,) to (num_kept,)."""
        padded = np.zeros_like(self._signs)
        padded[: self._count] = vector
        return self._hadamard((padded * self._signs)[self._order])[:, : self._kept].reshape(-1)

    def turned_back(self, kept: Floats) -> Floats:
        """(num_kept,) to (count,): what was not kept counts as zero."""
        blocks = np.zeros((len(self._signs) // self._block, self._block))
        blocks[:, : self._kept] = kept.reshape(-1, self._kept)
        found = np.empty_like(self._signs)
        found[self._order] = self._hadamard(blocks).reshape(-1)
        return (found * self._signs)[: self._count]

    def _hadamard(self, numbers: Floats) -> Floats:
        """Its own inverse, of each block: (blocks, block)."""
        found, width = numbers.reshape(-1, self._block), 1
        while width < self._block:
            pairs = found.reshape(len(found), -1, 2, width)
            sums, differences = pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]
            found = np.stack([sums, differences], 2).reshape(len(found), -1)
            width *= 2
        return found / math.sqrt(self._block)
