"""What the gradients of an adapter's two matrices have in common, so that it is told once.

An adapter is a product B A, whose gradient G gives those of both: G A^T of B and B^T G of A. So
B^T (G A^T) = (B^T G) A^T: rank x rank numbers of one follow from the other, and everybody knows A
and B. `Reduction` leaves them out. Lengths and angles stay as they are.

How it works: reflections (those of QR decompositions) turn both gradients so that such numbers are
a block of each, P of B's and Q of A's, and singular vectors turn these so that each number of P
stands against one of Q: s_b[i] P[i, j] = Q[i, j] s_a[j], with s_a and s_b the singular values of A
and B. Of the two it is told how far they are along this line.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.federate.grid import Floats
from paceline.federate.shared_file import Tensors

_LEAST = 1e-6
"""Of the largest singular value: below it singular vectors are not the same on all machines."""
_OF_A, _OF_B = "lora_A.weight", "lora_B.weight"


class _Turned:
    """The reflections and singular vectors of a tall matrix: (n, rank)."""

    def __init__(self, matrix: Tensor) -> None:
        self.height = len(matrix)
        self._reflections = torch.geqrf(matrix)
        left, self.values, right = torch.linalg.svd(self._reflections[0][: matrix.shape[1]].triu())
        largest = right.abs().argmax(1, keepdim=True)
        signs = right.gather(1, largest).sign()  # a pair of vectors has either sign
        self.left, self.right = left * signs.T, (right * signs).T

    @property
    def is_full(self) -> bool:
        return bool(self.values[-1] > _LEAST * self.values[0])

    def turned(self, given: Tensor) -> Tensor:
        return torch.ormqr(*self._reflections, given, transpose=True)

    def turned_back(self, given: Tensor) -> Tensor:
        return torch.ormqr(*self._reflections, given)


class _Pair:
    """An adapter whose gradients are reduced.

    Args:
        a: of A^T, (inputs, rank).
        b: of B, (outputs, rank).
        size_a: by which gradients of A are divided.
        size_b: by which gradients of B are.
    """

    def __init__(self, a: _Turned, b: _Turned, size_a: float, size_b: float) -> None:
        self._a, self._b, self._rank = a, b, len(a.values)
        of_p, of_q = torch.broadcast_tensors(size_a * a.values, size_b * b.values[:, None])
        length = torch.hypot(of_p, of_q)
        self._of_p, self._of_q = of_p / length, of_q / length

    @property
    def shapes(self) -> list[torch.Size]:
        """Of what is told."""
        ends = [self._rank, *(each.height - self._rank for each in (self._a, self._b))]
        return [torch.Size((each, self._rank)) for each in ends]

    def reduced(self, a: Tensor, b: Tensor) -> list[Tensor]:
        """Of the gradients of A^T and B what is told."""
        a, b, rank = self._a.turned(a), self._b.turned(b), self._rank
        p = self._b.left.T @ b[:rank] @ self._a.right
        q = self._b.right.T @ a[:rank].T @ self._a.left
        return [self._of_p * p + self._of_q * q, a[rank:], b[rank:]]

    def restored(self, both: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of A^T and B, of what is told."""
        p = self._b.left @ (self._of_p * both) @ self._a.right.T
        q = self._b.right @ (self._of_q * both) @ self._a.left.T
        return self._a.turned_back(torch.cat([q.T, a])), self._b.turned_back(torch.cat([p, b]))


def is_of_inputs(name: str) -> bool:
    """Whether a tensor is A of an adapter: (rank, inputs)."""
    return name.endswith(_OF_A)


def adapters_of(tensors: Tensors) -> list[tuple[int, int]]:
    """Places of each adapter's A and B among the tensors."""
    places = {name: place for place, name in enumerate(tensors)}
    ends = {name: name.removesuffix(_OF_A) + _OF_B for name in places if is_of_inputs(name)}
    return [(places[a], places[b]) for a, b in ends.items() if b in places]


class Reduction:
    """How gradients of some tensors are reduced: those of adapters whose matrices have full rank.

    While B is zero, as at the beginning, the gradient of A is zero and needs no telling.

    Args:
        tensors: what the gradients are of.
        pairs: places of each adapter's A and B among them.
        sizes: (tensors,) by which each one's gradient is divided.
    """

    def __init__(
        self, tensors: Sequence[Floats], pairs: Sequence[tuple[int, int]], sizes: Floats
    ) -> None:
        given = [torch.from_numpy(each).double() for each in tensors]
        self._shapes = [each.shape for each in given]
        self._pairs: list[tuple[int, int, _Pair]] = []
        self._nothing: list[int] = []
        """Places of A whose gradient is zero."""
        for at_a, at_b in pairs:
            if not given[at_b].any():
                self._nothing.append(at_a)
            if min(self._shapes[at_b][0], self._shapes[at_a][1]) < self._shapes[at_a][0]:
                continue
            a, b = _Turned(given[at_a].T), _Turned(given[at_b])
            if a.is_full and b.is_full:
                self._pairs.append((at_a, at_b, _Pair(a, b, sizes[at_a], sizes[at_b])))
        told = {*self._nothing, *(place for *places, _ in self._pairs for place in places)}
        self._alone = [place for place in range(len(given)) if place not in told]
        self._told = [shape for *_, pair in self._pairs for shape in pair.shapes]
        self._told += [self._shapes[place] for place in self._alone]
        self.count = sum(shape.numel() for shape in self._told)
        """Numbers of a reduced gradient."""

    def reduced(self, gradient: Floats) -> Floats:
        """(n,), each tensor's divided by its size, to (count,)."""
        parts = _parts(gradient, self._shapes)
        told = [each for a, b, pair in self._pairs for each in pair.reduced(parts[a].T, parts[b])]
        told += [parts[place] for place in self._alone]
        return torch.cat([each.reshape(-1) for each in told]).numpy()

    def restored(self, told: Floats) -> Floats:
        """(count,) to (n,)."""
        parts = iter(_parts(told, self._told))
        found = [torch.zeros(shape, dtype=torch.double) for shape in self._shapes]
        for at_a, at_b, pair in self._pairs:
            a, found[at_b] = pair.restored(next(parts), next(parts), next(parts))
            found[at_a] = a.T
        for place in self._alone:
            found[place] = next(parts)
        return torch.cat([each.reshape(-1) for each in found]).numpy()


def _parts(vector: Floats, shapes: list[torch.Size]) -> list[Tensor]:
    parts = torch.from_numpy(vector).split([shape.numel() for shape in shapes])
    return [each.view(shape) for each, shape in zip(parts, shapes, strict=True)]
