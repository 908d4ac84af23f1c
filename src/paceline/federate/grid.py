"""Grid: the numbers of a change as few whole ones, which masks can be added to and taken from.

How it works: a number is clipped to ±range and rounded, at random to one of its two neighbours and
right in the mean, to one of 2 * half + 1 equally distant values. What clipping and rounding took
away is added to the client's next change (error feedback, https://arxiv.org/abs/1901.09847). Zero
is a value of the grid. SecAgg+ adds whole numbers modulo a power of two; `modulus_bits` is the
smallest one that the sum of all clients can't reach, and `packed` gives each number so many bits.

Numbers of a gradient need fewer. What clients tell may be known modulo any smaller power of two,
for masks cancel there as well; so each number gets bits for the *likely* size of the sum, not for
the largest of all (`Form`). `centred` finds the sum again, if it was no larger.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HALF = 2**15
"""The largest number that a client tells of a gradient; the least is its negative."""


def half_of(bits: int) -> int:
    """The largest value of a grid whose values have so many bits; the least is its negative."""
    return 2 ** (bits - 1) - 1


def modulus_bits(half: int, clients: int) -> int:
    """Bits of a masked number: of the sum of values, each moved to 0 ... 2 * half."""
    return (clients * 2 * half).bit_length()


class OnGrid(NamedTuple):
    """A change on the grid."""

    values: Ints
    """(n,) -half ... half."""
    error: Floats
    """(n,) what was asked for and is not told."""


def on_grid(change: Floats, limit: float, bits: int, stream: np.random.Generator) -> OnGrid:
    """Round a change to the grid.

    Args:
        change: (n,) with the error of the change before.
        limit: numbers beyond ± this are clipped; above 0.
        bits: of a value.
        stream: decides who is rounded up.
    """
    step = limit / half_of(bits)
    values = np.floor(change.clip(-limit, limit) / step + stream.random(change.shape))
    values = values.clip(-half_of(bits), half_of(bits)).astype(np.int64)
    return OnGrid(values, change - values * step)


class Form(NamedTuple):
    """How many bits a client's masked numbers get."""

    wide_bits: int
    """Of the first ones: those of the modulus that SecAgg+ adds by."""
    num_wide: int
    bits: int
    """Of all others."""
    num: int
    """Numbers in all."""

    def packed(self, values: Ints) -> bytes:
        """Numbers of 0 ... 2^wide_bits - 1, the others cut to their lowest bits."""
        wide, others = values[: self.num_wide], values[self.num_wide :]
        return packed(wide, self.wide_bits) + packed(others, self.bits)

    def unpacked(self, raw: bytes) -> Ints:
        """What is left of `packed`'s numbers: (num,).

        Raises:
            ValueError: as `unpacked`.
        """
        end = (self.num_wide * self.wide_bits + 7) // 8
        wide = unpacked(raw[:end], self.wide_bits, self.num_wide)
        others = unpacked(raw[end:], self.bits, self.num - self.num_wide)
        return np.concatenate([wide, others])


def centred(sums: Ints, bits: int) -> Ints:
    """Sums that are known modulo 2^bits, as the numbers nearest to zero that they can be."""
    half = 1 << (bits - 1)
    return (sums + half) % (1 << bits) - half


def packed(values: Ints, bits: int) -> bytes:
    """Whole numbers 0 ... 2^bits - 1 one after the other, each in so many bits."""
    each = (values[:, None] >> np.arange(bits)) & 1
    return np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpacked(raw: bytes, bits: int, count: int) -> Ints:
    """What `packed` was given: (count,).

    Raises:
        ValueError: these are not as many bytes as so many numbers take.
    """
    if len(raw) != (count * bits + 7) // 8:
        raise ValueError(f"{len(raw)} bytes are not {count} numbers of {bits} bits")
    found = np.unpackbits(np.frombuffer(raw, np.uint8), count=count * bits, bitorder="little")
    return found.reshape(count, bits).astype(np.int64) @ (1 << np.arange(bits))
