"""Rounds: what changes from one to the next, as the server decides it.

Where adapters are shared, one matrix of each is the same on all clients in a round and stays as it
is, and the change of the other one is summed. So the mean of the products is the product of the
mean, which it isn't where both change (https://arxiv.org/abs/2410.09432). The roles alternate: B
first, as it begins as zero and A has no gradient until it isn't. Of shared weights all that are
trained change in every round, and so does all of adapters by FedAvg or where clients tell
gradients, which go by another way (`telling`).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from paceline.federate.grid import HALF, Floats, Form, half_of, modulus_bits

Factor = Literal["a", "b", "all"]
Shares = Literal["adapters", "weights"]
TOLD = 64
"""Times that a client says how large its change is, so that rounding averages out."""
_WIDE = 3.0
"""Of a change that is spread like a Gaussian 0.3 % is beyond so many times its root mean square."""
_MOST_AT_ONCE = 4.0


def factor_of(number: int, shares: Shares = "adapters") -> Factor:
    """What is trained in a round, counted from 1: a matrix of adapters, or all."""
    if shares == "weights":
        return "all"
    return "b" if number % 2 else "a"


def with_size(change: Floats, limit: float) -> Floats:
    """A change and, behind it, its root mean square: (n + TOLD,).

    It is a number of the vector like others, so the server learns it of the sum alone.
    """
    size = float(np.sqrt(np.mean(np.square(change)))) if len(change) else 0.0
    return np.concatenate([change, np.full(TOLD, min(size, limit))])


def next_limit(limit: float, size: float) -> float:
    """The range of the next round that trains this matrix.

    Args:
        limit: that of the round before.
        size: mean of the clients' root mean squares, as it was told.
    """
    return min(max(_WIDE * size, limit / _MOST_AT_ONCE), limit * _MOST_AT_ONCE)


def limit_of_norm(norm: float, count: int) -> float:
    """The range of so many numbers whose L2 norm is stated: known to all, it need not be told."""
    return _WIDE * norm / math.sqrt(count)


def bits_of(stated: Mapping[str, Any], number: int) -> int:
    """Of a number that a client tells in a round."""
    bits = [int(each) for each in str(stated["bits"]).split()]
    return bits[min(max(number - 1, 0), stated["rounds"] - 1) * len(bits) // stated["rounds"]]


def half_told(stated: Mapping[str, Any]) -> int:
    """The largest number that a client tells; the least is its negative."""
    return half_of(bits_of(stated, 1)) if stated["tells"] == "changes" else HALF


def form_of(stated: Mapping[str, Any], number: int, count: int) -> Form:
    """How so many numbers of a client travel in a round, of which the first is Flower's factor.

    Those of a change all have the bits of their sum, of a gradient only those of its head.
    """
    head = count if stated["tells"] == "changes" else int(stated["head"])
    wide = modulus_bits(half_told(stated), int(stated["taking-part"]))
    return Form(wide, head, bits_of(stated, number), count)
