"""Algorithm: who carries out a collective, the backend or one of ours, by predicted seconds.

The rule: NCCL and the other vendors' libraries have algorithms of their own, in the devices'
kernels; ours, which are messages started by the host, are not tried against them (their own choice
can be measured and set: `bench.network.nccl`). On gloo the first wins that is about as cheap as the
cheapest, in this order: the backend, then ours as `comm.algorithms` prefers them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.comm.algorithms import ALGORITHMS, Op
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.plan.collectives.seconds import collective_s

_MARGIN = 0.05
"""Part of its time that a preferred algorithm may lose, since the prediction may be wrong by that.
Assumed."""


class AlgorithmChoice(NamedTuple):
    """An algorithm and why."""

    algorithm: str
    reason: str
    seconds: Mapping[str, float]
    """By algorithm, as predicted; empty where there was nothing to compare."""


def choose_algorithm(
    cluster: Cluster, op: Op, num_bytes: float, num_ranks: int, stride: int
) -> AlgorithmChoice:
    """The cheapest algorithm for a message size; arguments as of `collective_s`."""
    if cluster.device.kind != "cpu":
        return AlgorithmChoice(
            "backend", "the backend has algorithms of its own in the device's kernels", {}
        )
    if num_ranks == 1:
        return AlgorithmChoice("backend", "there is nobody to exchange with", {})
    seconds = {"backend": float(collective_s(cluster, op, num_bytes, num_ranks, stride))}
    for algorithm in ALGORITHMS[op]:
        try:
            found = collective_s(cluster, f"{op}.{algorithm}", num_bytes, num_ranks, stride)
        except InputError:  # not for groups like this one
            continue
        seconds[algorithm] = float(found)
    enough = min(seconds.values()) / (1 - _MARGIN)
    best = next(name for name in seconds if seconds[name] <= enough)
    return AlgorithmChoice(best, _reason(best, seconds, num_bytes, num_ranks), seconds)


def _reason(best: str, seconds: Mapping[str, float], num_bytes: float, num_ranks: int) -> str:
    others = {name: found for name, found in seconds.items() if name != best}
    if not others:
        return f"no other algorithm is known for {num_ranks} ranks"
    other = min(others, key=others.__getitem__)
    return (
        f"{num_bytes / 2**20:.3g} MiB among {num_ranks} ranks take {seconds[best] * 1e3:.3g} ms by "
        f"{best}, {others[other] * 1e3:.3g} ms by {other}"
    )
