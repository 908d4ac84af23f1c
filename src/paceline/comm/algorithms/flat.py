"""Flat: reduce-scatter and all-gather among n equal ranks, each in three ways.

After a reduce-scatter rank r has the sum of block r; before an all-gather it has block r. Every
rank sends all blocks but one, once: (n - 1) / n of the buffer, the least there is.

- ring: a block passes all ranks, each adds its own; n - 1 rounds between neighbours.
- pairwise: in round k rank r sends block r + k to its owner; n - 1 rounds, no partial sums.
- halving: in ceil(log2 n) rounds, for any n. Rank r keeps the partial sums of blocks r, r + 1, ...,
  counted around; each round it sends the farther half of those that are left to the rank that far
  away (Träff, https://arxiv.org/abs/2410.14234; for powers of two the cost of recursive halving).
  Gathering is the same backwards.
"""

from collections.abc import Sequence
from itertools import pairwise

from paceline.comm.algorithms.blocks import Block, Cut, Round, make_round

Blocks = Sequence[Block]


def ring_scatter(blocks: Blocks, me: int) -> list[Round]:
    """Around the ring: the block that I add last is mine."""
    n = len(blocks)
    return [
        make_round(
            [((me + 1) % n, blocks[(me - step - 1) % n])],
            [((me - 1) % n, blocks[(me - step - 2) % n])],
            adds=True,
        )
        for step in range(n - 1)
    ]


def ring_gather(blocks: Blocks, me: int) -> list[Round]:
    """Around the ring, mine first."""
    n = len(blocks)
    return [
        make_round(
            [((me + 1) % n, blocks[(me - step) % n])],
            [((me - 1) % n, blocks[(me - step - 1) % n])],
            adds=False,
        )
        for step in range(n - 1)
    ]


def pairwise_scatter(blocks: Blocks, me: int) -> list[Round]:
    """Each block straight to its owner, one peer a round."""
    n = len(blocks)
    return [
        make_round(
            [((me + step) % n, blocks[(me + step) % n])],
            [((me - step) % n, blocks[me])],
            adds=True,
        )
        for step in range(1, n)
    ]


def pairwise_gather(blocks: Blocks, me: int) -> list[Round]:
    """Each block straight from its owner, one peer a round."""
    n = len(blocks)
    return [
        make_round(
            [((me + step) % n, blocks[me])],
            [((me - step) % n, blocks[(me - step) % n])],
            adds=False,
        )
        for step in range(1, n)
    ]


def halving_scatter(blocks: Blocks, me: int) -> list[Round]:
    """The farther half of the blocks that are left, to the rank that far away."""
    n = len(blocks)
    return [
        make_round(
            [((me + near) % n, _from(blocks, me + near, far - near))],
            [((me - near) % n, _from(blocks, me, far - near))],
            adds=True,
        )
        for far, near in pairwise(_distances(n))
    ]


def doubling_gather(blocks: Blocks, me: int) -> list[Round]:
    """The way of `halving_scatter` backwards."""
    n = len(blocks)
    return [
        make_round(
            [((me - near) % n, _from(blocks, me, far - near))],
            [((me + near) % n, _from(blocks, me + near, far - near))],
            adds=False,
        )
        for far, near in reversed(list(pairwise(_distances(n))))
    ]


def _distances(n: int) -> list[int]:
    """n, half of it, half of that, rounded up, ..., 1."""
    found = [n]
    while found[-1] > 1:
        found.append((found[-1] + 1) // 2)
    return found


def _from(blocks: Blocks, first: int, number: int) -> list[Cut]:
    """Cuts of so many blocks from the first on, around the end."""
    return [cut for at in range(first, first + number) for cut in blocks[at % len(blocks)]]


def one_shot_reduce(whole: Cut, n: int, me: int) -> list[Round]:
    """Everybody sends everything to everybody."""
    others = [(peer, [whole]) for peer in range(n) if peer != me]
    return [make_round(others, others, adds=True)]


def one_shot_scatter(blocks: Blocks, me: int) -> list[Round]:
    """`pairwise_scatter` with all peers at once."""
    theirs = [(peer, block) for peer, block in enumerate(blocks) if peer != me]
    return [make_round(theirs, [(peer, blocks[me]) for peer, _ in theirs], adds=True)]


def one_shot_gather(blocks: Blocks, me: int) -> list[Round]:
    """`pairwise_gather` with all peers at once."""
    theirs = [(peer, block) for peer, block in enumerate(blocks) if peer != me]
    return [make_round([(peer, blocks[me]) for peer, _ in theirs], theirs, adds=False)]
