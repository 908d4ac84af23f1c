"""Lattice: numbers rounded sixteen at a time, which costs fewer bits than one by one.

It is the Barnes-Wall lattice, the densest that is known in 16 dimensions: whole numbers whose
parities are a word of the Reed-Muller code RM(1,4), and of which what is left, halved, has an even
sum (Conway and Sloane, Sphere Packings, Lattices and Groups, 3rd ed., chapters 4 and 20).

What is gained: its points are sqrt(8) apart, where a grid's of as many points are 1.68. So a sum
that is known modulo a multiple of the lattice may be spread further before it is taken for another
one; and what lies nearest to a point is nearly a ball, so rounding errs less (table 2.3 there).
"""

import numpy as np

from paceline.federate.grid import Floats, Ints

DIMENSION = 16
STEP = 2**0.75
"""Of a grid with as many points, where points of the lattice are whole numbers."""
SECOND_MOMENT = 0.068299
"""Mean square error of a number by rounding, in squared steps; of a grid it is 1 / 12."""


def _bases() -> tuple[Ints, Ints]:
    """Rows that span the code, and rows that span the lattice: (5, 16), (16, 16)."""
    place = np.arange(DIMENSION)
    digits = [place >> bit & 1 for bit in range(4)]
    code = np.stack([*digits, (1 + sum(digits)) % 2])
    lattice = 2 * np.eye(DIMENSION, dtype=np.int64)
    lattice[:, -1] += 2  # so that halves have an even sum; of the last one it is a four
    lattice[[1, 2, 4, 8, 0]] = code  # each is the only one with a one in its place
    return code, lattice


_CODE, _BASIS = _bases()
_WORDS = (np.arange(32)[:, None] >> np.arange(5) & 1) @ _CODE % 2
_INVERSE = np.linalg.inv(_BASIS)


def nearest(points: Floats) -> Floats:
    """The point of the lattice that is nearest to each: (n, 16) to (n, 16)."""
    best, found = np.full(len(points), np.inf), np.empty_like(points)
    rows = np.arange(len(points))
    for word in _WORDS:
        halves = (points - word) / 2
        whole = np.rint(halves)
        off = halves - whole
        worst = np.abs(off).argmax(1)
        # Where the sum is odd, the number that was rounded the furthest is rounded the other way.
        other = (whole.sum(1) % 2) * np.where(off[rows, worst] < 0, -1, 1)
        whole[rows, worst] += other
        off[rows, worst] -= other
        distance = np.square(off).sum(1)
        nearer = distance < best
        best[nearer] = distance[nearer]
        found[nearer] = 2 * whole[nearer] + word
    return found


def coordinates(points: Floats) -> Ints:
    """Of points of the lattice, in a basis: any whole numbers are those of a point. (n, 16)."""
    return np.rint(points @ _INVERSE).astype(np.int64)


def points_of(found: Ints) -> Floats:
    """The points that have such coordinates: (n, 16)."""
    return (found @ _BASIS).astype(np.float64)


def dithers(stream: np.random.Generator, count: int) -> Floats:
    """Random points, evenly spread over what lies nearest to one of the lattice's: (count, 16).

    They are so but for a point of the lattice, which rounding takes away again: it repeats itself
    every 4 in each dimension.
    """
    return stream.random((count, DIMENSION)) * 4
