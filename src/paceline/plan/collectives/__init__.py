"""Collectives: seconds of every exchange among the ranks of a layout, on any cluster.

How it works: a group is `num_ranks` ranks that lie `stride` apart in rank order. From the domains
of the tiers follows how many of them share a node, and how many nodes (racks) it spans.
- A group inside one domain takes what was measured there (`measured`): curves over bytes and
  ranks, interpolated over logarithms, extended by the rules that stand there.
- Any other takes the best of the algorithms that NCCL would choose from (`modelled`): rings and
  trees, each with its latency per step and the narrowest link on its way. All devices of a node
  bring their own share of the network cards: a group with g members on a node has g shares, since
  the groups beside it use the others at the same time.

Everything broadcasts: one layout or ten million take the same path. Sizes are those of nccl-tests:
the whole buffer that is reduced, gathered, scattered or (by one rank) exchanged.

- Algorithms of our own (`comm.algorithms`, named as "all_reduce.tree") are priced from the list of
  messages that a run executes (`counted`); `algorithm` chooses between them and the backend.

What it is not: a simulation of a network. Congestion, routing and stragglers are not here;
constants of a stack (`comm_time_inside`, `comm_time_across`) multiply what this returns.

Sources: NCCL's cost model (github.com/NVIDIA/nccl, src/graph/tuning.cc), "Demystifying NCCL"
https://arxiv.org/abs/2507.04786, Thakur et al. 2005 (algorithms of MPI collectives).
"""

from paceline.plan.collectives.algorithm import AlgorithmChoice, choose_algorithm
from paceline.plan.collectives.groups import tiers_of
from paceline.plan.collectives.seconds import OPS, collective_s, is_across, num_domains

__all__ = [
    "OPS",
    "AlgorithmChoice",
    "choose_algorithm",
    "collective_s",
    "is_across",
    "num_domains",
    "tiers_of",
]
