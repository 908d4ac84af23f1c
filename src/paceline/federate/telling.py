"""Telling: how clients tell a server the sum of their gradients or changes in few bits.

A gradient is that of a client's batch, for an optimizer of the server's. A change is what some
steps of its own come to, times the samples of each, so that the mean is weighed by samples
(FedAvg, https://arxiv.org/abs/1602.05629). "Found" is either here.

How few bits a number needs: what was found is divided by the sizes of its tensors and lines
(`scale`), of gradients what follows from the rest is left out (`adapter_pairs`), and it is turned
(`rotation`), so that all its numbers are spread alike. Each sixteen of them are moved by a dither,
which is drawn for this client and round alone, and rounded to a point of a lattice (`lattice`); the
server draws the same dithers and takes them off the sum. So a number is told right in the mean,
with an error that is the same whatever the number is (https://arxiv.org/abs/2006.03262), and
nothing is left for later rounds. Points are told modulo 2^bits times the lattice. Its step is one
with which the *sum* of all clients stays within the modulus, as large as the rounds before showed
it to be. What clients don't have in common cancels in the sum, and takes no bits.

Round 0 tells the sizes alone.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paceline.federate import lattice
from paceline.federate.adapter_pairs import Reduction, adapters_of
from paceline.federate.grid import Floats, Ints, centred
from paceline.federate.rotation import Rotation
from paceline.federate.rounds import bits_of
from paceline.federate.scale import ALIKE_AT_FIRST, Scale, Understood, line_of, step_of
from paceline.federate.shared_file import Tensors

_PARTS = 256  # of a power of two, in which sizes are told
_NO_SIZE = -64 * _PARTS
_LONGEST = 4.0  # times the size that was expected
_FAINT = 1e-6
"""Of the largest size: what tensors are told at whose size isn't known. AdamW's and Lion's first
steps are of one length whatever the size, so they take it."""
_ALIKE = 1e-3
"""What marks may differ by: they are sums of many numbers, and differ by some if one vector of a
decomposition has another direction."""


class Told(NamedTuple):
    """What a client tells."""

    values: Ints
    """(num_head + num_told,) the latter modulo 2^bits, around zero."""
    meant: Floats
    """(n,) what they stand for."""


class Telling:
    """How what clients found is told in a round.

    Args:
        tensors: what it is of, as all have it in this round.
        number: of the round.
        scale: of the round.
        share: of the turned numbers that are told.
        bits: of such a number.
        is_change: whether changes are told; else gradients are.
    """

    def __init__(
        self,
        tensors: Tensors,
        number: int,
        scale: Scale,
        share: float,
        bits: int,
        is_change: bool = False,
    ) -> None:
        self._number, self._bits, self._scale = number, bits, scale
        self._is_change = is_change
        self._counts = np.array([each.size for each in tensors.values()])
        self._starts = np.cumsum([0, *self._counts[:-1]])
        self._lines = scale.lines[line_of(tensors)]
        self._sizes = np.where(scale.sizes > 0, scale.sizes, _FAINT * (scale.sizes.max() or 1.0))
        self._pairs = [] if is_change else adapters_of(tensors)
        lines = np.split(self._lines, self._starts[1:])
        scaled = [
            each * by.reshape(each.shape) for each, by in zip(tensors.values(), lines, strict=True)
        ]
        self._reduction = Reduction(scaled, self._pairs, self._sizes)
        self._rotation = Rotation(self._reduction.count, number, share)
        self.num_told = self._rotation.num_kept if number else 0
        """Numbers that a client tells behind the head."""
        self._num_turned = self._rotation.num_kept / self._rotation.share
        expected = float(self._counts @ (scale.sizes > 0)) / self._num_turned
        self.step = step_of(bits, scale.square * (expected or 1.0))
        """Of the lattice, in turned numbers."""
        self._unit = self.step / lattice.STEP

    @classmethod
    def of_round(
        cls, stated: Mapping[str, Any], tensors: Tensors, number: int, scale: Scale
    ) -> "Telling":
        """As the federation's settings say."""
        share, bits = float(stated["told"]), bits_of(stated, number)
        return cls(tensors, number, scale, share, bits, stated["tells"] == "fedavg")

    @property
    def num_head(self) -> int:
        """Numbers before them: samples, and a size for each tensor."""
        return 1 + len(self._counts)

    @cached_property
    def mark(self) -> float:
        """Another number where what is told is turned or moved in another way.

        With other versions of NumPy or LAPACK, say, of which a server would learn nothing.
        """
        probe = np.random.default_rng(self._number).standard_normal(self._counts.sum())
        return float((self._turned(probe) * self._dithers(0)).sum()) if self.num_told else 0.0

    def must_have(self, mark: float) -> None:
        """Check that the server would understand what is told here.

        Args:
            mark: the server's.

        Raises:
            ValueError: it would not.
        """
        if abs(self.mark - mark) > _ALIKE:
            raise ValueError(
                f"round {self._number}: the server would not understand how numbers are turned "
                f"here (mark {self.mark:.6f}, {mark:.6f} there): install the server's versions of "
                "NumPy and torch"
            )

    def told(self, found: Floats, samples: int, node: int) -> Told:
        """What a client tells.

        Args:
            found: (n,) sum over the samples, or the change times these.
            samples: of the sum, or of each step.
            node: a number that no other client has; at least 0.
        """
        found = found / self._lines
        squares = np.add.reduceat(np.square(found), self._starts) / self._counts
        sizes, known = np.sqrt(squares) / self._grown(samples), self._scale.sizes
        head = np.concatenate([[samples], _as_parts(np.where(sizes > 0, sizes, known))])
        if not self.num_told:
            return Told(head.astype(np.int64), np.zeros_like(found))
        longest = np.where(known > 0, _LONGEST, 1.0) * self._sizes
        fits = np.minimum(1.0, longest / np.maximum(sizes, 1e-300))
        for a, b in self._pairs:
            fits[[a, b]] = fits[[a, b]].min()
        turned = self._turned(found * np.repeat(fits / self._sizes, self._counts))
        dither = self._dithers(node)
        points = lattice.nearest(turned / self._unit + dither)
        values = centred(lattice.coordinates(points).reshape(-1), self._bits)
        meant = self._turned_back(points - dither, self._sizes)
        return Told(np.concatenate([head.astype(np.int64), values]), meant)

    def understood(self, sums: Ints, nodes: Sequence[int]) -> Understood:
        """What the server learns of the sum of what clients told.

        Args:
            sums: (num_head + num_told,) the latter modulo 2^bits.
            nodes: the clients.
        """
        samples, parts = int(sums[0]), sums[1 : self.num_head] / len(nodes)
        # The geometric mean; 0: there is none.
        sizes = np.where(parts > _NO_SIZE / 2, np.exp2(parts / _PARTS), 0.0)
        apart = len(nodes) * self._grown(samples / len(nodes)) ** 2
        if not self.num_told:
            nothing = np.zeros(int(self._counts.sum()))
            return Understood(nothing, samples, sizes, apart, ALIKE_AT_FIRST)
        found = lattice.points_of(sums[self.num_head :].reshape(-1, lattice.DIMENSION))
        for node in nodes:
            found -= self._dithers(node)
        found = self._within_modulus(found)
        # Of a tensor of which nobody found anything there is rounding's noise alone.
        mean = self._turned_back(found, np.where(sizes > 0, self._sizes, 0.0)) / samples
        noise = len(nodes) * lattice.SECOND_MOMENT * lattice.STEP**2
        square = (np.square(found).mean() - noise) * self._unit**2
        unlike = np.square(np.minimum(sizes / self._sizes, _LONGEST)) @ self._counts
        alike = square * self._num_turned / (apart * unlike) if unlike else 1.0
        return Understood(mean, samples, sizes, apart, max(1.0, alike))

    def as_known(self, total: Floats) -> Floats:
        """What a server makes of a sum of what clients meant, (n,), which may leave the modulus.

        It is exact where numbers fill whole blocks of a rotation; else what fills up the last block
        is missing in the sum.
        """
        found = total / self._lines / np.repeat(self._sizes, self._counts)
        found = self._turned(found) * (self._rotation.share / self._unit)
        return self._turned_back(self._within_modulus(found), self._sizes)

    def _grown(self, samples: float) -> float:
        """How much larger is what is found of so many samples than of one: gradients of samples
        have little in common."""
        return samples if self._is_change else math.sqrt(samples)

    def _within_modulus(self, found: Floats) -> Floats:
        return found - lattice.nearest(found / 2**self._bits) * 2**self._bits

    def _turned(self, found: Floats) -> Floats:
        turned = self._rotation.turned(self._reduction.reduced(found))
        return turned.reshape(-1, lattice.DIMENSION)

    def _turned_back(self, found: Floats, sizes: Floats) -> Floats:
        told = self._rotation.turned_back(found.reshape(-1) * (self._unit / self._rotation.share))
        return self._reduction.restored(told) * np.repeat(sizes, self._counts) * self._lines

    def _dithers(self, node: int) -> Floats:
        stream = np.random.default_rng([self._number, node])
        return lattice.dithers(stream, self.num_told // lattice.DIMENSION)


def _as_parts(sizes: Floats) -> Floats:
    found = np.full(sizes.shape, float(_NO_SIZE))
    known = sizes > 0
    found[known] = np.rint(np.log2(sizes[known]) * _PARTS).clip(_NO_SIZE + 1, -_NO_SIZE)
    return found
