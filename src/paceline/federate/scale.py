"""Scale: by what clients divide what they found in a round, as the rounds before showed.

How large that is follows from its samples: a gradient is expected to grow as their root, and a
change, which is multiplied by them, as they do.
"""

import json
import math
from typing import NamedTuple

import numpy as np

from paceline.federate.adapter_pairs import adapters_of, is_of_inputs
from paceline.federate.grid import Floats, Ints
from paceline.federate.lattice import SECOND_MOMENT
from paceline.federate.shared_file import Tensors

ALIKE_AT_FIRST = 8.0  # 4 to 9 in the first rounds of benchmarks/federated.py, imitated
_MOST_GROWTH = 2.0
_LINES_KEPT = 0.8
"""Of what is known of lines, from round to round."""
_LEAST_LINE = 0.1
"""Mean square of a line's numbers over its tensor's: lines with less noise of their own than that
are told as if they had it."""
_MOST_NOISE = 0.5
"""Of the mean square of a sum's numbers."""


class Scale(NamedTuple):
    """By what all divide in a round."""

    sizes: Floats
    """(tensors,) root mean squares that a client's numbers, divided by lines, are expected to have
    of one sample; 0: it is not known, and the direction is told."""
    lines: Floats
    """(lines,) how large the numbers of a line are, over those of its tensor: see `line_of`."""
    square: float
    """Mean square that numbers of the sum are expected to have, over those of lines and sizes."""
    samples: int
    """The most that a sum was of so far."""

    @classmethod
    def at_first(cls, tensors: Tensors) -> "Scale":
        """Where nothing is known."""
        lines = np.ones(int(line_of(tensors)[-1]) + 1)
        return cls(np.zeros(len(tensors)), lines, ALIKE_AT_FIRST, 0)

    def as_json(self) -> str:
        """As it goes to clients."""
        return json.dumps([self.sizes.tolist(), self.lines.tolist(), self.square, self.samples])

    @classmethod
    def of_json(cls, text: str) -> "Scale":
        """What `as_json` gave."""
        sizes, lines, square, samples = json.loads(text)
        return cls(np.array(sizes, float), np.array(lines, float), float(square), int(samples))


class Understood(NamedTuple):
    """What a server learns in a round."""

    mean: Floats
    """(n,) of all samples."""
    samples: int
    """Of those who told theirs."""
    sizes: Floats
    """(tensors,) that clients' numbers, divided by lines, had of one sample, in the geometric mean;
    0: it is not known."""
    apart: float
    """Mean square of the sum's numbers, over lines and sizes, where what clients found has nothing
    in common and is of equally many samples."""
    alike: float
    """What it was, over that; at least 1."""

    def next_scale(self, tensors: Tensors, before: Floats | None, scale: Scale) -> Scale:
        """That of the next round.

        Sizes may go on growing as they did. One that was not known grows the most, unless nothing
        has been changed yet.

        The sum is expected to be as large as it would have been now, of the most samples that it
        ever was of; or, where that is less, as the geometric mean of this and what was expected:
        how alike clients are changes from round to round. They are the more alike, the more
        samples they have: as the root, which fits the gradients of benchmarks/federated.py.

        Args:
            tensors: what is told of in the next round.
            before: (tensors,) sizes of the round before; None: this is the first.
            scale: of the round.
        """
        samples = max(self.samples, scale.samples)
        more = samples / self.samples
        square = more * self.apart * (1 + (self.alike - 1) * math.sqrt(more))
        if before is None:
            return Scale(self.sizes, scale.lines, square, samples)
        growth = np.full_like(self.sizes, _MOST_GROWTH)
        np.divide(self.sizes, before, out=growth, where=before > 0)
        sizes = self.sizes * growth.clip(1.0, _MOST_GROWTH)
        for a, b in adapters_of(tensors):
            if not sizes[a]:
                sizes[a] = sizes[b] * _first_of_a(tensors, self.mean, a, b)
        square = max(square, math.sqrt(scale.square * square))
        return Scale(sizes, _next_lines(tensors, self.mean, scale.lines), square, samples)


def line_of(tensors: Tensors) -> Ints:
    """The line that each number is in, counted through all tensors: (n,).

    Numbers of a line are alike: it is the row of a matrix, which is of one output, and of A of an
    adapter the column, which is of one input. A vector is one line.
    """
    found, first = [], 0
    for name, each in tensors.items():
        shape = each.shape
        lines = np.arange(shape[-1] if is_of_inputs(name) else shape[0] if len(shape) > 1 else 1)
        along = lines if is_of_inputs(name) else lines.reshape(-1, *[1] * (len(shape) - 1))
        found.append((first + np.broadcast_to(along, shape)).reshape(-1))
        first += len(lines)
    return np.concatenate(found)


def _next_lines(tensors: Tensors, mean: Floats, lines: Floats) -> Floats:
    """Lines, which what a round showed of them changes.

    Rounding errs by so much in the size of a line. AdamW divides by the size that numbers have, so
    an even noise would count most where they are small.
    """
    line, counts = line_of(tensors), [each.size for each in tensors.values()]
    tensor = np.repeat(np.arange(len(counts)), counts)
    tensor_of_line = np.zeros(len(lines), np.int64)
    tensor_of_line[line] = tensor
    of_tensors = (np.bincount(tensor, np.square(mean)) / counts)[tensor_of_line]
    of_lines = np.bincount(line, np.square(mean)) / np.bincount(line)
    squares = np.square(lines)
    shown = (of_lines / np.maximum(of_tensors, 1e-300) + _LEAST_LINE) / (1 + _LEAST_LINE)
    shown = np.where(of_tensors > 0, shown, squares)
    return np.sqrt(_LINES_KEPT * squares + (1 - _LINES_KEPT) * shown).round(4)  # few as JSON


def _first_of_a(tensors: Tensors, mean: Floats, a: int, b: int) -> float:
    """Size of the gradient of A of an adapter over B's, which was zero so far.

    Gradients of A and B are B^T G and G A^T, of which A is drawn at random: what it does to G it
    does to B^T G, B^T G A^T being B^T times the gradient of B.
    """
    given = list(tensors.values())
    ends = np.cumsum([each.size for each in given])
    gradient = mean[ends[b] - given[b].size : ends[b]].reshape(given[b].shape)
    size = np.linalg.norm(given[a]) * math.sqrt(len(given[a])) * np.sqrt(np.square(gradient).mean())
    return float(np.linalg.norm(given[b].T @ gradient) / size) if size else 0.0


def step_of(bits: int, square: float) -> float:
    """Of the lattice with which a sum whose numbers have this mean square is within the modulus."""
    return _sure(bits) * math.sqrt(square) / 2 ** (bits - 1)


def _sure(bits: int) -> float:
    """How far the modulus reaches, in what the sum's numbers are spread by.

    With 4 bits 3.1. Rounding and leaving the modulus err the least at 2.9 to 3.2, by 7 % of the
    mean square of a sum of six clients that is spread like a Gaussian (drawn: at 2.7 it is 10 %).
    Where it is spread wider than was expected, sixteens of its numbers are wrong by the modulus, as
    if very badly rounded. With more bits there is room to spare.
    """
    return min(max(3.1, 1 + bits / 2), 8.0)


def least_bits(clients: int) -> int:
    """With which rounding adds no more than `_MOST_NOISE` to the sum of so many clients."""
    bits = 2
    while clients * SECOND_MOMENT * step_of(bits, 1.0) ** 2 > _MOST_NOISE:
        bits += 1
    return bits
