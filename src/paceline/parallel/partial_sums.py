"""Partial sums: numbered parts added up over one fixed binary tree, in whatever order they come.

Floating-point sums depend on their order. Here the order follows from the numbers of the parts
alone: node (level, index) of the tree is the sum of the parts index * 2^level up to, and without,
(index + 1) * 2^level. Two siblings are added when both are there, and a node whose sibling would
begin beyond the last part goes up as it is. So the root has the same bits whoever holds which
parts, and whenever they come. Who holds every part of a node needs to keep, and to send, only that
node: of n neighbouring parts at most 2 log2(n) nodes, and one where they are an aligned power of
two.

Not here: who sends what to whom (`ordered_exchange`).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TreeNode(NamedTuple):
    """The sum of the parts place * 2^level to (place + 1) * 2^level - 1; a leaf has level 0."""

    level: int
    place: int


class PartialSums:
    """The sums of what has come so far, as few as the tree allows."""

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        """Leaves of the tree."""
        self.nodes: dict[TreeNode, list[Tensor]] = {}

    def add(self, node: TreeNode, tensors: Sequence[Tensor]) -> None:
        """Take in a leaf or an inner node.

        Args:
            node: none of its parts has come before.
            tensors: its sums, of any shapes, the same in all nodes; they belong to this object.
        """
        held = list(tensors)
        while (1 << node.level) < self.num_parts:
            sibling = TreeNode(node.level, node.place ^ 1)
            if sibling in self.nodes:
                # a + b and b + a have the same bits: it may be added to either.
                others, held = held, self.nodes.pop(sibling)
                if held:
                    torch._foreach_add_(held, others)
            elif sibling.place << sibling.level < self.num_parts:
                break
            node = TreeNode(node.level + 1, node.place >> 1)
        assert node not in self.nodes, f"part {node} came twice"
        self.nodes[node] = held

    @property
    def is_whole(self) -> bool:
        """Whether all parts have come."""
        return self.root in self.nodes

    @property
    def root(self) -> TreeNode:
        """The node that is the sum of all parts."""
        return TreeNode((self.num_parts - 1).bit_length(), 0)

    def take_root(self) -> list[Tensor]:
        """The sum of all parts; nothing is kept.

        A zero has no sign in it: whether FSDP2 adds it to zeros makes no difference then.
        """
        tensors = self.nodes.pop(self.root)
        torch._foreach_add_(tensors, 0.0)
        return tensors


def nodes_of(numbers: Iterable[int], num_parts: int) -> list[TreeNode]:
    """The nodes that hold these parts, as `PartialSums` would keep them, in one order."""
    sums = PartialSums(num_parts)
    for number in numbers:
        sums.add(TreeNode(0, number), [])
    return sorted(sums.nodes)
