"""Gradients: what a client tells of a batch, where the server makes the steps.

One optimizer, the server's, gets the mean gradient of all batches of a round. So a federation does
what one process does that has these batches, but for rounding.

How few bits a number needs: a gradient is divided by its tensors' sizes and turned (`rotation`), so
that all its numbers are spread alike. Each is moved by a dither, which is drawn for this client and
round alone, and rounded to whole steps of a grid; the server draws the same dithers and takes them
off the sum. So a number is told right in the mean, with an error that is spread evenly over a step
whatever the number is (https://arxiv.org/abs/2006.03262), and nothing is left for later rounds.
Numbers are told modulo 2^bits, and the step is the one with which the *sum* of all clients stays
within the modulus: half of it is `_sure` times what the sum's numbers are spread by, as the rounds
before showed. What single batches have of noise cancels in the sum, and takes no bits.

Round 0 tells the sizes alone.
"""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.federate.grid import Floats, Ints, centred
from paceline.federate.rotation import Rotation

HALF = 2**15 - 1
"""The largest number that a client tells, before it is cut to its lowest bits."""
_PARTS = 256  # of a power of two, in which sizes are told
_NO_SIZE = -64 * _PARTS
_LONGEST = 4.0  # times the size that was expected
_MOST_GROWTH = 2.0
_FAINT = 1e-6
"""Of the largest size: what tensors are told at whose size isn't known. AdamW's and Lion's first
steps are of one length whatever the size, so they take it."""
_ALIKE_AT_FIRST = 8.0  # 4 to 9 in the first rounds of benchmarks/federated.py, imitated
_MOST_NOISE = 0.5
"""Of the mean square of a sum's numbers."""


class Scale(NamedTuple):
    """By what all divide in a round."""

    sizes: Floats
    """(tensors,) root mean squares that numbers of a client's gradient are expected to have, over
    the square root of its samples; 0: it is not known, so the direction is told, as if it were
    `_FAINT`."""
    step: float
    """Of the grid, in these sizes."""

    @property
    def divisors(self) -> Floats:
        """(tensors,) sizes, all above 0."""
        return np.where(self.sizes > 0, self.sizes, _FAINT * (self.sizes.max() or 1.0))

    def as_json(self) -> str:
        """As it goes to clients."""
        return json.dumps([self.sizes.tolist(), self.step])

    @classmethod
    def of_json(cls, text: str) -> "Scale":
        """What `as_json` gave."""
        sizes, step = json.loads(text)
        return cls(np.array(sizes, np.float64), float(step))


class Telling:
    """How a gradient is told in a round.

    Args:
        counts: numbers of each tensor.
        number: of the round.
        share: of the numbers of a turned gradient that are told.
    """

    def __init__(self, counts: Sequence[int], number: int, share: float) -> None:
        self._counts, self._number = np.array(counts), number
        self._starts = np.cumsum([0, *counts[:-1]])
        self._rotation = Rotation(int(self._counts.sum()), number, share)
        self.num_told = self._rotation.num_kept if number else 0
        """Numbers of the gradient that a client tells."""

    @property
    def num_head(self) -> int:
        """Numbers before them: samples, and a size for each tensor."""
        return 1 + len(self._counts)

    def told(self, gradient: Floats, samples: int, scale: Scale, node: int) -> Ints:
        """What a client tells: (num_head + num_told,).

        Args:
            gradient: (n,) sum over the samples.
            samples: of the sum.
            scale: of the round.
            node: a number that no other client has; at least 0.
        """
        sizes = self._sizes(gradient) / math.sqrt(samples)
        head = np.concatenate([[samples], _as_parts(np.where(sizes > 0, sizes, scale.sizes))])
        longest = np.where(scale.sizes > 0, _LONGEST, 1.0)
        factor = np.minimum(1 / scale.divisors, longest / np.maximum(sizes, 1e-300))
        turned = self._rotation.turned(gradient * np.repeat(factor, self._counts))
        values = turned[: self.num_told] / scale.step + self._dither(node)
        return np.concatenate([head, np.rint(values).clip(-HALF, HALF)]).astype(np.int64)

    def meant(
        self, sums: Ints, nodes: Sequence[int], scale: Scale, bits: int | None = None
    ) -> Floats:
        """The sum of gradients, (n,), that the sum of what clients told stands for.

        Args:
            sums: (num_head + num_told,)
            nodes: the clients.
            scale: of the round.
            bits: numbers of gradients are known modulo 2^bits; None: as they are.
        """
        if not self.num_told:
            return np.zeros(int(self._counts.sum()))
        found = sums[self.num_head :].astype(np.float64)
        for node in nodes:
            found -= self._dither(node)
        if bits is not None:
            found = centred(found, bits)
        total = self._rotation.turned_back(found * (scale.step / self._rotation.share))
        # Of a tensor without gradients there is the grid's noise alone.
        factors = np.where(self._sizes_in(sums, len(nodes)) > 0, scale.divisors, 0.0)
        return total * np.repeat(factors, self._counts)

    def understood(self, sums: Ints, nodes: Sequence[int], scale: Scale, bits: int) -> "Understood":
        """What the server learns of the sum of what clients told.

        Args:
            sums: (num_head + num_told,) the latter modulo 2^bits.
            nodes: the clients.
            scale: of the round.
            bits: of a masked number of the gradient.
        """
        samples, sizes = int(sums[0]), self._sizes_in(sums, len(nodes))
        total = self.meant(sums, nodes, scale, bits)
        alike, known = _ALIKE_AT_FIRST, (sizes > 0) & (scale.sizes > 0) & (self.num_told > 0)
        if known.any():
            noise = len(nodes) / 12 * np.square(scale.step * scale.divisors)
            own = self._rotation.share * np.square(self._sizes(total)) - noise
            ratios = own[known] / (samples * np.square(sizes[known]))
            alike = max(1.0, np.average(ratios, weights=self._counts[known]))
        return Understood(total / samples, samples, sizes, alike)

    def _dither(self, node: int) -> Floats:
        return np.random.default_rng([self._number, node]).random(self.num_told) - 0.5

    def _sizes_in(self, sums: Ints, answered: int) -> Floats:
        """The geometric mean of what so many clients told of sizes; 0: there is none."""
        parts = sums[1 : self.num_head] / answered
        return np.where(parts > _NO_SIZE / 2, np.exp2(parts / _PARTS), 0.0)

    def _sizes(self, gradient: Floats) -> Floats:
        return np.sqrt(np.add.reduceat(np.square(gradient), self._starts) / self._counts)


class Understood(NamedTuple):
    """What a server learns in a round."""

    mean: Floats
    """(n,) gradient, of all samples."""
    samples: int
    """Of those who told theirs."""
    sizes: Floats
    """(tensors,) that clients' gradients had, over the square root of their samples, in the
    geometric mean; 0: it is not known."""
    alike: float
    """Mean square of the sum's numbers, over what it is where gradients of single samples have
    nothing in common; at least 1."""

    def next_scale(self, before: Floats | None, scale: Scale, bits: int) -> Scale:
        """That of the next round.

        Sizes may go on growing as they did. One that was not known grows the most, as A of an
        adapter does once B is no longer zero, unless nothing has been changed yet. The step
        is what this round would have needed, or, where that is finer, the geometric mean of it and
        the round's: who answers, and how alike gradients are, changes from round to round.

        Args:
            before: (tensors,) sizes of the round before; None: this is the first.
            scale: of the round.
            bits: of a masked number.
        """
        step = _step(bits, self.alike * self.samples)
        if before is None:
            return Scale(self.sizes, step)
        growth = np.full_like(self.sizes, _MOST_GROWTH)
        np.divide(self.sizes, before, out=growth, where=before > 0)
        step = max(step, math.sqrt(scale.step * step))
        return Scale(self.sizes * growth.clip(1.0, _MOST_GROWTH), step)


def _step(bits: int, square: float) -> float:
    """Of the grid on which a sum whose numbers have this mean square is within the modulus."""
    return _sure(bits) * math.sqrt(square) / 2 ** (bits - 1)


def _sure(bits: int) -> float:
    """How far the modulus reaches, in what the sum's numbers are spread by.

    With 4 bits 4.0: 6e-5 of numbers that are spread like a Gaussian are beyond, and more where
    gradients are suddenly larger. A number beyond is wrong by the modulus, as if badly rounded.
    Both errors together are about the least so. With more bits there is room to spare.
    """
    return min(max(3.0, bits), 8.0)


def least_bits(clients: int) -> int:
    """With which rounding adds no more than `_MOST_NOISE` to the sum of so many clients."""
    bits = 2
    while clients / 12 * _step(bits, 1.0) ** 2 > _MOST_NOISE:
        bits += 1
    return bits


def _as_parts(sizes: Floats) -> Floats:
    found = np.full(sizes.shape, float(_NO_SIZE))
    known = sizes > 0
    found[known] = np.rint(np.log2(sizes[known]) * _PARTS).clip(_NO_SIZE + 1, -_NO_SIZE)
    return found
