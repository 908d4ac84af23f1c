"""Blocks: which part of the memory of keys and values holds which tokens.

How it works: the memory is cut into blocks of as many tokens each. A block that is full gets a
name, a hash over the name of the block before it and its own tokens: equal names mean equal texts
from the beginning on. A request whose prompt begins with named blocks uses them, too (they are
counted), and computes only the rest. When nobody uses a named block any more it stays until its
memory is needed: the one that was used longest ago goes first.

Numbers only: no tensor is touched here.

Papers: blocks https://arxiv.org/abs/2309.06180 (PagedAttention).
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence


class OutOfBlocksError(Exception):
    """All blocks are in use."""


def name_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block.

    Args:
        before: the name of the block before it; of a text's first block, what sets it apart from
            others' texts (the weights, and who may share).
        tokens: all of the block's.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Blocks:
    """Who uses which block.

    Args:
        num_blocks: there are.
        shares: whether full blocks are kept and shared.
        leaves: is told each named block, and its name, before its memory gets a new user.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        shares: bool = True,
        leaves: Callable[[int, bytes], None] = lambda block, name: None,
    ) -> None:
        self.num_blocks, self._shares, self._leaves = num_blocks, shares, leaves
        self._unused = list(range(num_blocks))  # a heap: low numbers first, so they lie together
        self._users = [0] * num_blocks
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Named blocks that nobody uses, the longest unused first."""
        self._taken: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._unused) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Of those, blocks that are kept for whoever begins with the same text."""
        return len(self._idle)

    def take(self) -> int:
        """A block for new tokens.

        Raises:
            OutOfBlocksError: all are in use.
        """
        if self._unused:
            block = heapq.heappop(self._unused)
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            name = self._names.pop(block)
            del self._named[name]
            self._leaves(block, name)
        else:
            raise OutOfBlocksError
        self._users[block] = 1
        self._taken.append(block)
        return block

    def newly_taken(self) -> list[int]:
        """Blocks that were taken since this was asked last."""
        taken, self._taken = self._taken, []
        return taken

    def find(self, name: bytes) -> int | None:
        """The block of this name, if there is one."""
        return self._named.get(name)

    def use(self, block: int) -> None:
        """One more uses a named block."""
        self._users[block] += 1
        self._idle.pop(block, None)

    def give_back(self, block: int) -> None:
        """One less uses a block."""
        self._users[block] -= 1
        if self._users[block]:
            return
        if block in self._names:
            self._idle[block] = None
        else:
            heapq.heappush(self._unused, block)

    def put_name(self, block: int, name: bytes) -> None:
        """A block is full; others may use it from now on, unless one like it is there."""
        if self._shares and name not in self._named:
            self._names[block], self._named[name] = name, block

    def forget_all(self) -> None:
        """No block can be shared any more: the weights have changed."""
        for block in self._idle:
            heapq.heappush(self._unused, block)
        self._idle.clear()
        self._names.clear()
        self._named.clear()
