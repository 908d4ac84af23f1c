"""Ordered exchange: partial sums of several ranks brought together, in the order of one tree.

Each rank owns a part of the values. It gets that part of every rank's nodes as they are (an
all-to-all) and adds them up itself, as `partial_sums` says. Where everybody needs the whole, the
parts are gathered then. As many bytes as an all-reduce where every rank has one node; a rank with k
nodes sends its values k times to be added.

Bits can't depend on the backend: nothing is added up on the way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import Collectives
from paceline.parallel.partial_sums import PartialSums, TreeNode, nodes_of

_BUCKET = 2**22
"""Values that travel together: 16 MiB in fp32."""


@dataclass
class OrderedExchange:
    """Among the ranks of a group; all of them must call alike, in one order."""

    group: dist.ProcessGroup
    numbers: Sequence[Sequence[int]]
    """Of the parts that each rank of the group has, in its order."""
    num_parts: int
    """Leaves of the tree."""
    sent_bytes: int = 0
    """Since it was last set to 0."""
    _nodes: list[list[TreeNode]] = field(init=False)

    def __post_init__(self) -> None:
        self._nodes = [nodes_of(each, self.num_parts) for each in self.numbers]

    def scatter(self, sums: PartialSums) -> PartialSums:
        """Sums over the ranks, of this rank's part of the values.

        Args:
            sums: this rank's; of each node one tensor (ranks, values). It is left empty.
        """
        mine = [sums.nodes.pop(node)[0] for node in self._nodes[self.group.rank()]]
        num_ranks, num_values = mine[0].shape
        sent = torch.stack(mine, 1) if len(mine) > 1 else mine[0]
        sizes = [len(nodes) * num_values for nodes in self._nodes]
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(
            received, sent.view(-1), sizes, [len(mine) * num_values] * num_ranks, group=self.group
        )
        self.sent_bytes += sent.nbytes * (num_ranks - 1) // num_ranks
        total = PartialSums(self.num_parts)
        for nodes, parts in zip(self._nodes, received.split(sizes), strict=True):
            for node, part in zip(nodes, parts.view(len(nodes), num_values), strict=True):
                total.add(node, [part])
        # What is kept must not keep the memory of all that came.
        total.nodes = {node: [part.clone()] for node, (part,) in total.nodes.items()}
        return total

    def everywhere(self, sums: PartialSums) -> list[Tensor]:
        """The sums of all parts, on every rank.

        Args:
            sums: this rank's; each node has the same tensors. It is left empty.
        """
        nodes = [sums.nodes.pop(node) for node in self._nodes[self.group.rank()]]
        results = nodes[0]
        for first, last in _buckets(results):
            self._sum_bucket([node[first:last] for node in nodes], results[first:last])
        return results

    def _sum_bucket(self, nodes: list[list[Tensor]], results: list[Tensor]) -> None:
        num_ranks = self.group.size()
        sizes = [each.numel() for each in results]
        part_size = -(-sum(sizes) // num_ranks)
        sums = PartialSums(self.num_parts)
        for node, tensors in zip(self._nodes[self.group.rank()], nodes, strict=True):
            flat = tensors[0].new_zeros(num_ranks * part_size)
            torch.cat([each.flatten() for each in tensors], out=flat[: sum(sizes)])
            sums.nodes[node] = [flat.view(num_ranks, part_size)]
        (part,) = self.scatter(sums).take_root()
        whole = part.new_empty(num_ranks * part_size)
        Collectives(self.group, "backend").all_gather(whole, part)
        self.sent_bytes += part.nbytes * (num_ranks - 1)
        values = whole[: sum(sizes)].split(sizes)
        shaped = [part.view_as(each) for part, each in zip(values, results, strict=True)]
        torch._foreach_copy_(results, shaped)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours of one type that travel together."""
    first, held = 0, 0
    for index, tensor in enumerate(tensors):
        is_full = held and held + tensor.numel() > _BUCKET
        if is_full or tensor.dtype != tensors[first].dtype:
            yield first, index
            first, held = index, 0
        held += tensor.numel()
    if tensors:
        yield first, len(tensors)
