"""Integers of five levels, three in a word of seven bits: between four bits and one.

A block's root mean square is the scale, not its largest magnitude: of five levels, four would
otherwise be spent on a few large values. What lies beyond the last level is cut to it, so this is
for callers that keep the error and send it later (error feedback). Zero is a level: with an even
number of levels a value that is nothing would be sent as noise, as large as its neighbours.

How words are packed: three integers from -2 to 2 are the digits of a number from -62 to 62, which
takes 7 bits. Of eight runs of words, seven lie in the low bits of as many runs of bytes, and the
eighth, bit by bit, in the bytes' highest bits. So a block of 256 values is 77 bytes, and all
operators pass over long rows.

Levels in proportion to a Gaussian's deviation: J. Max, Quantizing for minimum distortion, 1960.
"""

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from paceline.kernels.quantize.schemes import Scheme

_MEAN_SQUARE = 1.25
"""Of a block, in units of its scale. Steps of 0.89 root mean squares were the best for gradients of
a decoder (measured: the rest is 11 % of the squares; of a Gaussian 0.84 would be, with 8 %)."""
_DIGITS, _BASE = 3, 5
_OFFSET: Final = (_BASE**_DIGITS - 1) // 2
_WORD_BITS = 7
_RUNS = 8
"""Of words in a block; the last one is spread over the bytes of the others."""


class Quinary(Scheme):
    """Integers from -2 to 2.

    A block's third k is digit k of its words: the value j of a third belongs to word j.
    """

    largest = 2
    is_stochastic = False

    def num_bytes(self, block: int) -> int:
        """Seven for 24 values."""
        return _num_words(block) // _RUNS * _WORD_BITS

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """In proportion to the root mean square, whose square x's type must be able to hold."""
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return norms / math.sqrt(_MEAN_SQUARE * x.shape[1])

    def write(self, levels: Tensor, codes: Tensor, noise: Tensor | None) -> None:
        """Round, cut, and write."""
        assert noise is None, "nothing is drawn where values are cut"
        levels.round_().clamp_(-self.largest, self.largest)
        words = _words(levels)  # (m, words)
        lower = words[:, : codes.shape[1]].unflatten(1, (_WORD_BITS, -1))  # (m, 7, run)
        spread = words[:, None, codes.shape[1] :] >> _places(codes.device)  # (m, 7, run)
        torch.bitwise_or(lower, spread << _WORD_BITS, out=codes.unflatten(1, (_WORD_BITS, -1)))

    def read(self, codes: Tensor, levels: Tensor) -> None:
        """As `Scheme`."""
        words = levels.new_empty(len(codes), _num_words(levels.shape[1]), dtype=torch.float32)
        words[:, : codes.shape[1]] = codes & (2**_WORD_BITS - 1)
        highest = codes.unflatten(1, (_WORD_BITS, -1)) >> _WORD_BITS
        words[:, codes.shape[1] :] = (highest << _places(codes.device)).sum(1, dtype=torch.uint8)
        _split(words.sub_(_OFFSET), levels)


def _num_words(block: int) -> int:
    """Words of a block: whole runs of them."""
    return -(-block // (_DIGITS * _RUNS)) * _RUNS


def _words(levels: Tensor) -> Tensor:
    """Integers (m, block) as words (m, words) uint8; thirds are filled up with zeros."""
    first, second, third = levels.to(torch.int8).split(_num_words(levels.shape[1]), dim=1)
    words = torch.add(first, second, alpha=_BASE)
    words[:, : third.shape[1]].add_(third, alpha=_BASE**2)
    return words.add_(_OFFSET).view(torch.uint8)


def _split(words: Tensor, levels: Tensor) -> None:
    """The digits of words (m, words) fp32, which become the lowest, into levels (m, block).

    What the lower digits add to a word is less than half of a step of the next one.
    """
    first, second, third = levels.split(words.shape[1], dim=1)
    digit = torch.mul(words, 1 / _BASE**2).round_()
    third.copy_(digit[:, : third.shape[1]])
    words.sub_(digit, alpha=_BASE**2)
    torch.mul(words, 1 / _BASE, out=digit).round_()
    second.copy_(digit)
    first.copy_(words.sub_(digit, alpha=_BASE))


@lru_cache
def _places(device: torch.device) -> Tensor:
    """Which bit of a word each run of bytes holds: (7, 1) uint8."""
    return torch.arange(_WORD_BITS, device=device, dtype=torch.uint8).view(-1, 1)
