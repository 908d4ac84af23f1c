"""Exact sums of numbers: the same bits whoever holds which of them, and in whatever order.

A number in fp64 is an integer times 2^-1074. It is kept as digits of 30 bits of that integer, in 70
places, so that sums are sums of integers and nothing is rounded (a superaccumulator: Kulisch,
https://doi.org/10.1515/9783110203189). Positive and negative numbers are kept apart, and what isn't
finite in a place of its own, as a floating-point sum: it stays inf or becomes NaN.

Bounds: a rank adds up at most 2^33 numbers, in int64. What ranks exchange are digits up to 2^30 in
fp64, which all-reduces sum up exactly for up to 2^23 ranks, by whatever algorithm.
"""

import torch
from torch import Tensor

_BITS, _PLACES = 30, 70
_MASK = (1 << _BITS) - 1
_LOWEST = -1074
"""Exponent of the smallest number of fp64."""
_MANTISSA = 53
WIDTH = 2 * _PLACES + 1
"""Digits of positive numbers, of negative ones, and the place of what isn't finite."""
# Numbers whose squares are in memory at once: 8 MiB.
_CHUNK = 2**20


def exact_sums(values: Tensor) -> Tensor:
    """Digits of sums.

    Args:
        values: (sums, numbers) fp64.

    Returns:
        (sums, WIDTH) fp64, to be added to those of other ranks and read by `read_sums`.
    """
    is_finite = torch.isfinite(values)
    rest = torch.where(is_finite, 0.0, values).sum(-1, keepdim=True)
    values = torch.where(is_finite, values, 0.0)
    # An integer of 53 bits, and where its lowest bit stands; what stands too low ends in zeros.
    fraction, exponent = torch.frexp(values.abs())
    mantissa = (fraction * 2.0**_MANTISSA).to(torch.int64)
    bit = torch.where(values == 0, 0, exponent.to(torch.int64) - _MANTISSA - _LOWEST)
    mantissa >>= (-bit).clamp(min=0)
    bit = bit.clamp(min=0)
    place, shift = bit // _BITS, bit % _BITS
    place += torch.where(values < 0, _PLACES, 0)
    low, high = (mantissa & _MASK) << shift, (mantissa >> _BITS) << shift
    # The highest number fills place 68, so that nothing runs over into the negative ones.
    digits = torch.zeros(len(values), 2 * _PLACES + 2, dtype=torch.int64, device=values.device)
    parts = low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS
    for offset, part in enumerate(parts):
        digits.scatter_add_(1, place + offset, part)
    return torch.cat([_canonical(digits[:, : 2 * _PLACES]).double(), rest], -1)


def read_sums(digits: Tensor) -> Tensor:
    """The sums (n,) fp64 of digits (n, WIDTH) that were added up over ranks.

    They are off the exact ones by a few units in the last place, and always by the same.
    """
    places = _canonical(digits[:, :-1].to(torch.int64)).double().unflatten(1, (2, _PLACES))
    powers = torch.arange(_PLACES, dtype=torch.float64, device=digits.device) * _BITS + _LOWEST
    positive, negative = (places * powers.exp2()).sum(-1).unbind(1)
    return positive - negative + digits[:, -1]


def row_squares(x: Tensor) -> Tensor:
    """Sums of squares of rows.

    They don't depend on how many rows there are, as those of torch's reductions do: halves are
    added until one number is left.

    Args:
        x: (rows, ...) of any floating type.

    Returns:
        (rows,) fp64
    """
    sums = x.new_zeros(len(x), dtype=torch.float64)
    if not x.numel():
        return sums
    rows = x.reshape(len(x), -1)
    size = max(1, _CHUNK // rows.shape[1])
    for part, into in zip(rows.split(size), sums.split(size), strict=True):
        squares = part.double().square()
        while (width := squares.shape[1]) > 1:
            half = (width + 1) // 2
            squares[:, : width - half] += squares[:, half:]
            squares = squares[:, :half]
        into.copy_(squares[:, 0])
    return sums


def _canonical(digits: Tensor) -> Tensor:
    """The same integers with every digit below 2^30, the highest aside: (n, 2 * places) int64."""
    digits = digits.unflatten(1, (2, _PLACES))
    for _ in range(3):  # a carry has at most 33 bits, then 4, then 1
        carry = digits >> _BITS
        carry[..., -1] = 0
        digits = digits - (carry << _BITS)
        digits[..., 1:] += carry[..., :-1]
    # Now a digit is 2^30 at most, and a carry runs through those that are one less.
    places = torch.arange(_PLACES, device=digits.device)
    stops = torch.where(digits == _MASK, -1, places).cummax(-1).values
    carries = (stops >= 0) & (digits.gather(-1, stops.clamp(min=0)) > _MASK)
    digits[..., 1:] += carries[..., :-1].to(torch.int64)
    digits[..., :-1] &= _MASK
    return digits.flatten(1)
