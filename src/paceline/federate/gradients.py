"""Gradients: what a client tells of a batch, where the server makes the steps.

One optimizer, the server's, gets the mean gradient of all batches of a round. So a federation does
what one process does that has these batches, but for rounding.

How few bits a number needs: a gradient is divided by its tensors' sizes and turned (`rotation`), so
that all its numbers are spread alike; a share of them is rounded to whole steps of a grid, and told
modulo 2^bits. The step is the one with which the *sum* of all clients stays within the modulus:
half of it is `_sure` times what the sum's numbers are spread by, as the round before showed. What
single batches have of noise cancels in the sum, and no bits are spent on it. What rounding and
the share leave out stays with the client and is added to its next gradient (error feedback,
https://arxiv.org/abs/1901.09847).

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
steps are of one length whatever the size, so they take it; the rest stays with the client."""
_ALIKE_AT_FIRST = 2.0  # 1.2 to 2.1 in the first rounds of benchmarks/federated.py, imitated
_COARSEST = 3.0
"""Times the size of a client's numbers: on a coarser grid nearly all would be zero."""


class Scale(NamedTuple):
    """By what all divide in a round."""

    sizes: Floats
    """(tensors,) root mean squares that numbers of a client's gradient are expected to have; 0: it
    is not known, so the direction is told, as if it were `_FAINT`."""
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
        self._counts = np.array(counts)
        self._starts = np.cumsum([0, *counts[:-1]])
        self._share = share
        self._rotation = Rotation(int(self._counts.sum()), number, share)
        self.num_told = self._rotation.num_kept if number else 0
        """Numbers of the gradient that a client tells."""

    @property
    def num_head(self) -> int:
        """Numbers before them: samples, and a size for each tensor."""
        return 1 + len(self._counts)

    def told(self, gradient: Floats, samples: int, scale: Scale) -> tuple[Ints, Floats]:
        """What a client tells, (num_head + num_told,), and what of the gradient it doesn't, (n,).

        Args:
            gradient: (n,) sum over the samples, with what wasn't told before.
            samples: of the sum.
            scale: of the round.
        """
        sizes = self._sizes(gradient)
        head = np.concatenate([[samples], _as_parts(np.where(sizes > 0, sizes, scale.sizes))])
        if not self.num_told:
            return head, np.zeros_like(gradient)
        longest = np.where(scale.sizes > 0, _LONGEST, 1.0)
        factor = np.minimum(1 / scale.divisors, longest / np.maximum(sizes, 1e-300))
        turned = self._rotation.turned(gradient * np.repeat(factor, self._counts))
        values = np.rint(turned / scale.step).clip(-HALF, HALF)
        is_told = (scale.sizes > 0) | (sizes > 0)
        error = gradient - self._back(values, scale) * np.repeat(is_told, self._counts)
        return np.concatenate([head, values]).astype(np.int64), error

    def understood(self, sums: Ints, answered: int, scale: Scale, bits: int) -> "Understood":
        """What the server learns of the sum of what so many clients told.

        Args:
            sums: (num_head + num_told,) the latter modulo 2^bits.
            answered: clients that it is the sum of.
            scale: of the round.
            bits: of a masked number of the gradient.
        """
        samples, parts = int(sums[0]), sums[1 : self.num_head] / answered
        sizes = np.where(parts > _NO_SIZE / 2, np.exp2(parts / _PARTS), 0.0)
        total = self._back(centred(sums[self.num_head :], bits).astype(np.float64), scale)
        total = total * np.repeat(sizes > 0, self._counts)  # the grid's noise is no gradient
        known = (sizes > 0) & (scale.sizes > 0) & (self.num_told > 0)
        alike = _ALIKE_AT_FIRST
        if known.any():
            own = np.square(self._sizes(total)[known] / sizes[known]) / self._share
            alike = max(1.0, np.average(own, weights=self._counts[known]) / answered)
        return Understood(total / samples, sizes, alike)

    def _back(self, values: Floats, scale: Scale) -> Floats:
        if not self.num_told:
            return np.zeros(int(self._counts.sum()))
        turned_back = self._rotation.turned_back(values * scale.step)
        return turned_back * np.repeat(scale.divisors, self._counts)

    def _sizes(self, gradient: Floats) -> Floats:
        return np.sqrt(np.add.reduceat(np.square(gradient), self._starts) / self._counts)


class Understood(NamedTuple):
    """What a server learns in a round."""

    mean: Floats
    """(n,) gradient, of all samples."""
    sizes: Floats
    """(tensors,) that clients' gradients had, in the geometric mean; 0: it is not known."""
    alike: float
    """Mean square of the sum's numbers over what it is where gradients have nothing in common, the
    clients times the square of one's size: from 1 to the clients, where all are the same."""

    def next_scale(self, before: Floats, asked: int, bits: int) -> Scale:
        """That of the next round.

        Sizes may go on growing as they did. One that was not known grows the most, as A of an
        adapter does once B is no longer zero, unless nothing has been changed yet.

        Args:
            before: (tensors,) sizes of the round before; 0: unknown.
            asked: clients of a round, of whom each may answer.
            bits: of a masked number.
        """
        new = np.full_like(before, np.inf if before.any() else 1.0)
        growth = np.divide(self.sizes, before, where=before > 0, out=new)
        sizes = self.sizes * growth.clip(1.0, _MOST_GROWTH)
        return Scale(sizes, _step(self.alike, asked, bits))


def _step(alike: float, clients: int, bits: int) -> float:
    """Of the grid on which the sum of so many clients is within the modulus."""
    return _sure(bits) * math.sqrt(alike * clients) / 2 ** (bits - 1)


def _sure(bits: int) -> float:
    """How far the modulus reaches, in what the sum's numbers are spread by.

    With 4 bits 5.5: 4e-8 of numbers that are spread like a Gaussian are beyond, and more where
    gradients are suddenly larger. A number beyond is wrong by the modulus, as if badly rounded.
    With more bits than 5 there is room to spare.
    """
    return min(8.0, 1.375 * bits)


def least_bits(clients: int) -> int:
    """With which the step is no longer than numbers of one client's gradient, mostly."""
    bits = 2
    while _step(_ALIKE_AT_FIRST, clients, bits) > _COARSEST:
        bits += 1
    return bits


def _as_parts(sizes: Floats) -> Floats:
    found = np.full(sizes.shape, float(_NO_SIZE))
    known = sizes > 0
    found[known] = np.rint(np.log2(sizes[known]) * _PARTS).clip(_NO_SIZE + 1, -_NO_SIZE)
    return found
