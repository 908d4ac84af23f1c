"""Means of matrices as products of two thin ones (PowerSGD, https://arxiv.org/abs/1905.13727).

Of each rank's summand M (m, n) one step of a power iteration is sent: P = the sum of M Q, made
orthonormal, then Q = the sum of M^T P, and P Q^T stands for the sum of M. Q is where the next step
begins, so that the iteration goes on from step to step while gradients change slowly. What P Q^T
lacks of M is M's error. That is rank (m + n) values sent twice instead of m n.

All matrices of a buffer share one collective for P and one for Q. On a CPU the passes over memory
decide: three over error and gradient, as each matrix is added, multiplied and left while it is in
the cache (measured: 40 ms of one core for 18 M values at rank 1).

Not here: vectors, which are summed up exactly (`means.UncompressedRest`).
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import issued
from paceline.comm.compress.feedback import BufferPart
from paceline.comm.compress.means import exact_bytes
from paceline.comm.queue import Job

# Products that are not at least this much smaller than the matrix are not worth two multiplications
# (torch's powerSGD_hook has the same default).
_LEAST_RATIO = 2


class LowRankMeans:
    """Means of matrices in the form of thin products, and where their iterations stand.

    Args:
        rank: columns of P and Q.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank, self.group = rank, group
        self.factors: dict[str, Tensor] = {}
        """Q of each matrix by name, (n, rank), the same on all ranks."""

    def takes(self, shape: torch.Size) -> bool:
        """Whether a matrix (or what can be looked at as one) is large enough."""
        if len(shape) < 2:
            return False
        rows, columns = _sides(shape)
        return self.rank * (rows + columns) * _LEAST_RATIO <= rows * columns

    def mean_of(self, parts: Sequence[BufferPart], like: Tensor) -> "LowRankMean":
        """The mean of a buffer of these tensors; their iterations go on where they stand."""
        return LowRankMean(self, parts, like)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, the same on all ranks: {name: (n, rank)}."""
        return self.factors

    def load(self, factors: Mapping[str, Tensor]) -> None:
        """Go on with these."""
        self.factors = dict(factors)

    def adopt(self, name: str, view: Tensor) -> None:
        """Let the iteration of a matrix go on in this memory: (n, rank)."""
        held = self.factors.get(name)
        if held is None or held.shape != view.shape:
            stream = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            held = torch.randn(view.shape, generator=stream)
        view.copy_(held)
        self.factors[name] = view


class LowRankMean:
    """The mean of the matrices of one buffer, see the module."""

    def __init__(self, means: LowRankMeans, parts: Sequence[BufferPart], like: Tensor) -> None:
        self._group, self._parts = means.group, parts
        chosen = [part for part in parts if part.is_compressed]
        sides = [_sides(part.shape) for part in chosen]
        self._p, self._p_of = _packed([rows for rows, _ in sides], means.rank, like)
        self._q, self._q_of = _packed([columns for _, columns in sides], means.rank, like)
        for part, q in zip(chosen, self._q_of, strict=True):
            means.adopt(part.name, q)
        self.sent_bytes = exact_bytes(self._p.nbytes + self._q.nbytes, self._group.size())

    def average(self, values: Tensor, errors: Tensor) -> Job:
        """Replace each rank's values by the mean of all, as `CompressedMean` says."""
        share = 1 / self._group.size()
        gradients, owed = self._matrices(values), self._matrices(errors)
        for gradient, error, p, q in zip(gradients, owed, self._p_of, self._q_of, strict=True):
            error.add_(gradient, alpha=share)
            torch.mm(error, q, out=p)
        yield issued(dist.all_reduce(self._p, group=self._group, async_op=True))
        for error, p, q in zip(owed, self._p_of, self._q_of, strict=True):
            p.copy_(torch.linalg.qr(p).Q)
            torch.mm(error.t(), p, out=q)
        yield issued(dist.all_reduce(self._q, group=self._group, async_op=True))
        for gradient, error, p, q in zip(gradients, owed, self._p_of, self._q_of, strict=True):
            torch.mm(p, q.t(), out=gradient)
            error.sub_(gradient, alpha=share)

    def _matrices(self, values: Tensor) -> list[Tensor]:
        """Views of what is compressed, as matrices."""
        views = values.split([part.num_values for part in self._parts])
        pairs = zip(self._parts, views, strict=True)
        return [view.view(_sides(part.shape)) for part, view in pairs if part.is_compressed]


def _sides(shape: torch.Size) -> tuple[int, int]:
    return shape[0], shape.numel() // shape[0]


def _packed(lengths: Sequence[int], rank: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One buffer for (length, rank) matrices, and the matrices in it."""
    sizes = [length * rank for length in lengths]
    flat = like.new_empty(sum(sizes))
    views = zip(flat.split(sizes), lengths, strict=True)
    return flat, [view.view(length, rank) for view, length in views]
