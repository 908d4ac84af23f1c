"""Collectives over a group by the algorithm that was chosen for it: the backend's or one of ours.

How it works: "backend" is torch.distributed's own call. Any other algorithm is a list of messages
(`comm.algorithms`). Each operation comes as a generator that yields the works of each round, for
whoever has something to do while they are under way, and as a plain call.

What it is not: the choice. The planner chooses (`plan.collectives.algorithm`) and writes it into
the Job; here it is carried out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms import Op, Round, rounds, rounds_inside
from paceline.comm.algorithms.execute import exchange
from paceline.comm.queue import Works

# Renamed in torch 2.13, where the old names warn.
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Collectives:
    """Operations among the ranks of a group; all of them must call alike, in one order."""

    group: dist.ProcessGroup
    algorithm: str
    """"backend", or one of `comm.algorithms.ALGORITHMS`."""
    ranks_per_node: int = 1
    """Neighbours in the group's order that share a node; "hierarchical" asks."""

    def all_reduce_works(self, values: Tensor, *, mean: bool = False) -> Iterator[Works]:
        """Leave in `values` (n,), in place, the sum or mean over the ranks, bit-equal on all."""
        if self.algorithm == "backend":
            yield issued(dist.all_reduce(values, group=self.group, async_op=True))
        else:
            yield from exchange(self._rounds("all_reduce", values), values, self.group)
        if mean:
            values /= self.group.size()

    def reduce_scatter_works(
        self, received: Tensor, values: Tensor, *, mean: bool = False
    ) -> Iterator[Works]:
        """Leave in `received` this rank's part of the sum or mean over the ranks.

        Args:
            received: (n / num_ranks,), overwritten.
            values: (n,) contiguous, divisible by the number of ranks; spoiled.
            mean: divide by the number of ranks.
        """
        _must_divide(received, values, self.group)
        if self.algorithm == "backend":
            yield issued(_SCATTER(received, values, group=self.group, async_op=True))
            if mean:
                received /= self.group.size()
            return
        yield from exchange(self._rounds("reduce_scatter", values), values, self.group)
        mine = self._mine(values, len(received))
        if mean:
            torch.div(mine, self.group.size(), out=received)
        else:
            received.copy_(mine)

    def all_gather_works(self, whole: Tensor, part: Tensor) -> Iterator[Works]:
        """Fill `whole` (n,) with the parts (n / num_ranks,) of all ranks, in order of rank."""
        _must_divide(part, whole, self.group)
        if self.algorithm == "backend":
            yield issued(_GATHER(whole, part, group=self.group, async_op=True))
            return
        mine = self._mine(whole, len(part))
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        yield from exchange(self._rounds("all_gather", whole), whole, self.group)

    def all_reduce(self, values: Tensor, *, mean: bool = False) -> None:
        """`all_reduce_works`, waited for."""
        wait(self.all_reduce_works(values, mean=mean))

    def reduce_scatter(self, received: Tensor, values: Tensor, *, mean: bool = False) -> None:
        """`reduce_scatter_works`, waited for."""
        wait(self.reduce_scatter_works(received, values, mean=mean))

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """`all_gather_works`, waited for."""
        wait(self.all_gather_works(whole, part))

    @property
    def inside(self) -> int:
        """Ranks of a node that a hierarchical exchange takes together; 1 in others."""
        return self.ranks_per_node if self.algorithm == "hierarchical" else 1

    @property
    def peers(self) -> list[int]:
        """Whom this rank meets beyond what is taken together, itself among them: the ranks at its
        place in all nodes, or all ranks."""
        return list(range(self.group.rank() % self.inside, self.group.size(), self.inside))

    def add_inside(self, values: Tensor) -> None:
        """The first half of a hierarchical reduce-scatter: leave this node's sums in the parts of
        `peers` in `values` (n,), in place; the rest is spoiled. Nothing changes in others."""
        if self.inside > 1:
            n, rank = self.group.size(), self.group.rank()
            wait(exchange(_inside(n, rank, values.numel(), self.inside), values, self.group))

    def _mine(self, whole: Tensor, length: int) -> Tensor:
        return whole.narrow(0, self.group.rank() * length, length)

    def _rounds(self, op: Op, values: Tensor) -> tuple[Round, ...]:
        n, rank = self.group.size(), self.group.rank()
        return _cached(self.algorithm, op, n, rank, values.numel(), self.ranks_per_node)


@torch.no_grad()
def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor of a list over the ranks, in place, all in one message of the backend's."""
    if tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in tensors])
        shaped = [part.view_as(tensor) for part, tensor in zip(sums, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), shaped)


def members_per_node(group: dist.ProcessGroup, ranks_per_node: int) -> int:
    """How many ranks of a group share its first rank's host; groups are taken to be even."""
    nodes = [rank // ranks_per_node for rank in dist.get_process_group_ranks(group)]
    return nodes.count(nodes[0])


def wait(rounds: Iterable[Works]) -> None:
    """Wait for the works of one round after the other."""
    for works in rounds:
        for work in works:
            work.wait()


@lru_cache(maxsize=256)
def _cached(
    algorithm: str, op: Op, num_ranks: int, rank: int, num_values: int, ranks_per_node: int
) -> tuple[Round, ...]:
    """The same few buffers come every step."""
    return tuple(rounds(algorithm, op, num_ranks, rank, num_values, ranks_per_node=ranks_per_node))


@lru_cache(maxsize=256)
def _inside(num_ranks: int, rank: int, num_values: int, ranks_per_node: int) -> tuple[Round, ...]:
    return tuple(rounds_inside(num_ranks, rank, num_values, ranks_per_node=ranks_per_node))


def issued(work: dist.Work | None) -> Works:
    """A collective as one round; torch says that it may be None, for ranks outside of the group."""
    assert work is not None, "this rank is in the group"
    return (work,)


def _must_divide(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    if part.numel() * group.size() != whole.numel():
        raise ValueError(
            f"{whole.numel()} values are not {group.size()} parts of {part.numel()}: pad them."
        )
