"""Algorithms of collectives over messages between pairs of ranks.

How it works: an algorithm is data. `rounds` says, as a pure function, which cuts of a flat buffer a
rank sends to whom and receives from whom, round by round. The same list is tested with numpy,
priced by the planner (`load`) and executed by torch.distributed (`execute.exchange`).

| algorithm | rounds of an all-reduce | bytes a rank sends of S | pays |
|---|---|---|---|
| one_shot | 1 | (n - 1) S | where only latency counts |
| ring | 2 (n - 1) | 2 (n - 1) / n S | neighbours only: uneven networks |
| pairwise | 2 (n - 1) | 2 (n - 1) / n S | reduce-scatters: no rank holds partial sums |
| halving_doubling | 2 ceil(log2 n) | 2 (n - 1) / n S | nearly always: both at their least |
| tree | 2 (depth + segments) | up to 2 S | few rounds, each rank with few peers |
| hierarchical | as its parts | to other nodes 2 (m - 1) / m S / g | m nodes of g ranks |

This package imports no torch, except for `execute`: the planner reads it.

Sources: Thakur, Rabenseifner, Gropp 2005 (ring, pairwise, halving-doubling, costs); Träff,
https://arxiv.org/abs/2410.14234 (halving-doubling for any number of ranks); Sanders, Speck, Träff
2009 (two trees); NCCL 2.4 (double binary trees for all-reduce).
"""

from paceline.comm.algorithms.blocks import Round, Transfer
from paceline.comm.algorithms.load import MOST_RANKS, LinkLoad, load
from paceline.comm.algorithms.rounds import ALGORITHMS, OPS, Op, rounds, rounds_inside

__all__ = [
    "ALGORITHMS", "MOST_RANKS", "OPS", "LinkLoad", "Op", "Round", "Transfer", "load", "rounds",
    "rounds_inside",
]  # fmt: skip
