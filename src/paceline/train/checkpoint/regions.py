"""Regions: rectangular parts of a tensor, and what others cover of one. Pure.

Pieces of one state may come from layouts that cut it differently, and overlap in any way; so who
gives what is found by taking rectangles away from rectangles.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Region(NamedTuple):
    """A part of a tensor, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(sizes: Iterable[int]) -> "Region":
        """All of a tensor of this shape."""
        shape = tuple(sizes)
        return Region((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)

    def within(self, other: "Region") -> tuple[slice, ...]:
        """The index of this part in a tensor that holds another one, around it."""
        starts = [mine - base for mine, base in zip(self.offsets, other.offsets, strict=True)]
        return tuple(slice(at, at + n) for at, n in zip(starts, self.sizes, strict=True))

    def overlap(self, other: "Region") -> "Region | None":
        """What lies in both; None: nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if min(sizes, default=1) > 0 else None

    def without(self, other: "Region") -> list["Region"]:
        """What of it does not lie in the other, as regions that don't overlap."""
        shared = self.overlap(other)
        if shared is None:
            return [self]
        rest, offsets, sizes = [], list(self.offsets), list(self.sizes)
        for dim, (start, length) in enumerate(zip(*shared, strict=True)):
            end, last = start + length, offsets[dim] + sizes[dim]
            for at, n in ((offsets[dim], start - offsets[dim]), (end, last - end)):
                if n > 0:
                    place, shape = offsets.copy(), sizes.copy()
                    place[dim], shape[dim] = at, n
                    rest.append(Region(tuple(place), tuple(shape)))
            offsets[dim], sizes[dim] = start, length
        return rest

    def is_covered(self, by: Iterable["Region"]) -> bool:
        """Whether the others hold each of its elements."""
        rest = [self] if self.numel else []
        for other in by:
            if not rest:
                break
            rest = [left for part in rest for left in part.without(other)]
        return not rest

    def rows(self, limit: int) -> Iterator["Region"]:
        """It, cut along its first dimension into parts of about so many elements at most."""
        if self.numel <= limit or not self.sizes:
            yield self
            return
        (first, *offsets), (length, *sizes) = self.offsets, self.sizes
        each = max(1, limit * length // self.numel)
        for at in range(0, length, each):
            yield Region((first + at, *offsets), (min(each, length - at), *sizes))
