"""Grid: the numbers of a change as few whole ones, which masks can be added to and taken from.

How it works: a number is clipped to ±range and rounded, at random to one of its two neighbours and
right in the mean, to one of 2 * half + 1 equally distant values. What clipping and rounding took
away is added to the client's next change (error feedback, https://arxiv.org/abs/1901.09847). Zero
is a value of the grid. SecAgg+ adds whole numbers modulo a power of two; `modulus_bits` is the
smallest one that the sum of all clients can't reach, and `packed` gives each number so many bits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def half_of(bits: int) -> int:
    """The largest value of a grid whose values have so many bits; the least is its negative."""
    return 2 ** (bits - 1) - 1


def modulus_bits(bits: int, clients: int) -> int:
    """Bits of a masked number: of the sum of values, each moved to 0 ... 2 * half."""
    return (clients * 2 * half_of(bits)).bit_length()


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
