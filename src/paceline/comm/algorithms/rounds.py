"""Rounds: what each rank does in a collective, by the name of an algorithm."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from paceline.comm.algorithms import flat
from paceline.comm.algorithms.blocks import Block, Cut, Round, Transfer, split_evenly
from paceline.comm.algorithms.tree import tree_reduce
from paceline.config.errors import InputError
from paceline.config.frozen import nearest

Op = Literal["all_reduce", "reduce_scatter", "all_gather"]
OPS: tuple[Op, ...] = ("all_reduce", "reduce_scatter", "all_gather")
Phase = Callable[[Sequence[Block], int], list[Round]]

_PHASES: dict[str, tuple[Phase, Phase]] = {
    "halving_doubling": (flat.halving_scatter, flat.doubling_gather),
    "pairwise": (flat.pairwise_scatter, flat.pairwise_gather),
    "ring": (flat.ring_scatter, flat.ring_gather),
}
"""Algorithms whose all-reduce is a reduce-scatter and an all-gather; the first ones are preferred
where the price is the same."""

ALGORITHMS: dict[Op, tuple[str, ...]] = {
    "all_reduce": (*_PHASES, "one_shot", "tree", "hierarchical"),
    "reduce_scatter": (*_PHASES, "one_shot", "hierarchical"),
    "all_gather": (*_PHASES, "one_shot", "hierarchical"),
}


def rounds(
    algorithm: str, op: Op, num_ranks: int, rank: int, num_values: int, *, ranks_per_node: int = 1
) -> list[Round]:
    """What a rank sends and receives, round by round, all in place on a flat buffer.

    Args:
        algorithm: one of ALGORITHMS[op].
        op: an all-reduce leaves the sum of all buffers everywhere; a reduce-scatter leaves in block
            r of rank r's buffer the sum of those (the rest is spoiled); an all-gather fills all
            blocks, where rank r has block r. Block r is values `num_values * r // num_ranks` to
            `num_values * (r + 1) // num_ranks - 1`.
        num_ranks: of the group, in order of node where it is "hierarchical".
        rank: in the group.
        num_values: of the whole buffer.
        ranks_per_node: neighbours in rank order that share a node; only "hierarchical" asks.

    Raises:
        InputError: an unknown algorithm, or nodes of unequal size.
    """
    if algorithm not in ALGORITHMS[op]:
        raise InputError(f"no {op} by {algorithm!r}{nearest(algorithm, ALGORITHMS[op])}")
    whole = Cut(0, num_values)
    if algorithm == "hierarchical":
        return _hierarchical(op, whole, num_ranks, rank, ranks_per_node)
    if num_ranks == 1:
        return []
    if algorithm == "tree":
        return tree_reduce(whole, num_ranks, rank)
    if algorithm == "one_shot" and op == "all_reduce":
        return flat.one_shot_reduce(whole, num_ranks, rank)
    phases = _PHASES.get(algorithm, (flat.one_shot_scatter, flat.one_shot_gather))
    return _flat(phases, op, [(cut,) for cut in split_evenly(whole, num_ranks)], rank)


def _flat(phases: tuple[Phase, Phase], op: Op, blocks: Sequence[Block], me: int) -> list[Round]:
    scatter, gather = phases
    return [
        *(scatter(blocks, me) if op != "all_gather" else ()),
        *(gather(blocks, me) if op != "reduce_scatter" else ()),
    ]


def rounds_inside(
    num_ranks: int, rank: int, num_values: int, *, ranks_per_node: int
) -> list[Round]:
    """The part of a hierarchical reduce-scatter that stays inside the nodes.

    Behind it the blocks of all ranks at this rank's place in their nodes hold this node's sums, and
    the rest is spoiled. Arguments and errors as of `rounds`.
    """
    (inside, _) = _tiers("reduce_scatter", Cut(0, num_values), num_ranks, rank, ranks_per_node)
    return inside.phase("reduce_scatter")


class _Tier(NamedTuple):
    """Ranks that exchange with each other in a hierarchical collective, as one of them sees it."""

    blocks: Sequence[Block]
    me: int
    members: Sequence[int]

    def phase(self, op: Op) -> list[Round]:
        rounds = _flat(_PHASES["halving_doubling"], op, self.blocks, self.me)
        return [_among(self.members, each) for each in rounds]


def _hierarchical(op: Op, whole: Cut, num_ranks: int, rank: int, inside: int) -> list[Round]:
    """Scattered inside a node, then across by ranks of the same place, gathered the way back.

    Of the buffer's S bytes each rank sends (m - 1) / m S / g across m nodes of g ranks, and as much
    back: the least that leaves a node when each of its ranks has a g-th of the link.
    """
    within, across = _tiers(op, whole, num_ranks, rank, inside)
    found: list[Round] = []
    if op != "all_gather":
        found += within.phase("reduce_scatter") + across.phase("reduce_scatter")
    if op != "reduce_scatter":
        found += across.phase("all_gather") + within.phase("all_gather")
    return found


def _tiers(op: Op, whole: Cut, num_ranks: int, rank: int, inside: int) -> tuple[_Tier, _Tier]:
    """A rank's node, and the ranks at its place in all nodes."""
    if num_ranks % inside:
        raise InputError(
            f"{num_ranks} ranks are not whole nodes of {inside}: a hierarchical {op} needs as many "
            "ranks on each node; use another algorithm."
        )
    nodes, (node, place) = num_ranks // inside, divmod(rank, inside)
    of_place = _blocks_by_place(op, whole, nodes, inside)
    within = [tuple(cut for block in row for cut in block) for row in of_place]
    return (
        _Tier(within, place, [node * inside + other for other in range(inside)]),
        _Tier(of_place[place], node, [other * inside + place for other in range(nodes)]),
    )


def _blocks_by_place(op: Op, whole: Cut, nodes: int, inside: int) -> list[list[Block]]:
    """Blocks by place in a node, then by node: any of an all-reduce, else those of the ranks."""
    if op == "all_reduce":
        return [[(cut,) for cut in split_evenly(row, nodes)] for row in split_evenly(whole, inside)]
    cuts = split_evenly(whole, nodes * inside)
    return [[(cut,) for cut in cuts[place::inside]] for place in range(inside)]


def _among(members: Sequence[int], each: Round) -> Round:
    """A round among a group's members, by their ranks."""
    sends, receives = (
        tuple(Transfer(members[peer], start, stop) for peer, start, stop in part)
        for part in (each.sends, each.receives)
    )
    return Round(sends, receives, each.adds)
