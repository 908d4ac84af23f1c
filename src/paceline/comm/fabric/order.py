"""Order: ranks placed so that neighbours are near each other.

A layout's inner axes are neighbours in rank order, so the ranks of a host must follow each other,
and hosts that are joined by fast links should. Hosts stand as a chain: after each comes the one
that it reaches fastest, but only if that is faster than the next in the order of starting by more
than `GAIN`, so that noise reorders nothing and an order that is good already stays.
"""

from collections.abc import Sequence
from statistics import median

GAIN = 1.5
"""Assumed: more than the noise of a measurement, less than a tier of a network."""


def order_ranks(
    hosts: Sequence[str], bytes_per_s: Sequence[Sequence[float]] | None = None
) -> tuple[int, ...]:
    """Ranks in the order in which they should stand; rank 0, which the others meet, stays first.

    Args:
        hosts: of each rank, as they were started.
        bytes_per_s: (ranks, ranks) by sender and receiver; None: hosts stand as they were started.
    """
    chain = list(dict.fromkeys(hosts))
    if bytes_per_s is not None:
        chain = order_hosts(hosts, bytes_per_s)
    return tuple(rank for host in chain for rank, its in enumerate(hosts) if its == host)


def order_hosts(hosts: Sequence[str], bytes_per_s: Sequence[Sequence[float]]) -> list[str]:
    """The hosts as a chain of fast links; arguments as in `order_ranks`."""
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
