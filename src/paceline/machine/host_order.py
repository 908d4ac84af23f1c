"""Host order: ranks placed so that neighbours are near each other.

A layout's inner axes are neighbours in rank order, so the ranks of a host must follow each other,
and hosts that are joined by fast links should. A launcher numbers hosts as it happens to find them
(torchrun as they met, srun by name). `paceline bench collectives` measures every pair and writes
the hosts as a chain into the Cluster; runs number their ranks by it (`comm.rendezvous.connect`).

In a chain each host is followed by the one that it reaches fastest, but only if that is faster than
the next in the order of starting by more than `GAIN`. So noise reorders nothing, and an order that
is good already stays.
"""

from collections.abc import Sequence
from statistics import median

GAIN = 1.5
"""Assumed: more than the noise of a measurement, less than a tier of a network."""


def reordered_ranks(hosts: Sequence[str], order: Sequence[str]) -> list[int]:
    """New numbers of the launcher's ranks. Those of a host stay together, in the launcher's order.

    Rank 0 stays where it is, for it keeps the store and writes the Run: the order is gone through
    from its host on, and from the beginning after the end.

    Args:
        hosts: of each rank, as they were started.
        order: names of hosts; those that it lacks come behind the others, as they were started.
    """
    found = list(dict.fromkeys(hosts))
    chain = [*(host for host in order if host in found), *(h for h in found if h not in order)]
    first = chain.index(hosts[0])
    chain = chain[first:] + chain[:first]
    placed = sorted(range(len(hosts)), key=lambda rank: chain.index(hosts[rank]))
    return [placed.index(rank) for rank in range(len(hosts))]


def order_hosts(hosts: Sequence[str], bytes_per_s: Sequence[Sequence[float]]) -> list[str]:
    """The hosts as a chain of fast links.

    Args:
        hosts: of each rank, as they were started.
        bytes_per_s: (ranks, ranks) by sender and receiver.
    """
    first, *left = dict.fromkeys(hosts)
    chain = [first]
    while left:
        rates = {host: _rate(hosts, bytes_per_s, chain[-1], host) for host in left}
        best = max(left, key=rates.__getitem__)
        chain.append(best if rates[best] > GAIN * rates[left[0]] else left[0])
        left.remove(chain[-1])
    return chain


def _rate(
    hosts: Sequence[str], bytes_per_s: Sequence[Sequence[float]], one: str, other: str
) -> float:
    """Of the links between two hosts, both ways: the median."""
    return median(
        bytes_per_s[row][column]
        for row, sender in enumerate(hosts)
        for column, receiver in enumerate(hosts)
        if {sender, receiver} == {one, other} and sender != receiver
    )
