"""Advice: what follows from the links that were found, in a sentence each."""

from collections.abc import Iterator

from paceline.bench.network.measure import NetworkMeasurement
from paceline.config.host import Host
from paceline.machine.host_order import order_hosts
from paceline.machine.interfaces import hca_setting
from paceline.render.figures import plural


def advice(measured: NetworkMeasurement, host: Host, backend: str) -> Iterator[str]:
    """What to set or to change; nothing where all is well.

    Args:
        measured: by the bench.
        host: of rank 0.
        backend: gloo, nccl or mpi.
    """
    if backend == "nccl":
        for name, value in hca_setting(host.cards).items():
            yield f"{name}={value}: ports differ in rate here, and rings wait for the slowest."
    chain = host_order(measured)
    if chain and chain != list(dict.fromkeys(measured.hosts)):
        yield (
            "Neighbours in rank order would have faster links if the hosts stood in the order "
            f"{', '.join(chain)}: [cluster] hosts makes runs number their ranks so."
        )


def host_order(measured: NetworkMeasurement) -> list[str]:
    """The hosts as a chain of fast links; empty where pairs weren't measured or every order of the
    hosts has the same neighbours."""
    pairs = measured.pairs
    if pairs is None or len(set(measured.hosts)) < 3:
        return []
    return order_hosts(measured.hosts, pairs.best_bytes_per_s)


def described(host: Host) -> str:
    """A host in a sentence."""
    cards = [
        f"{card.name} ({card.kind}"
        + (f", {card.gbit_per_s:g} Gbit/s" if card.gbit_per_s is not None else "")
        + (f", NUMA node {card.numa_node}" if card.numa_node is not None else "")
        + ")"
        for card in host.cards
    ]
    links = "" if host.device_links == "none" else f", devices joined by {host.device_links}"
    nodes = f"{plural(host.numa_nodes, 'NUMA node')}"
    return f"A host: {nodes}{links}; cards: {', '.join(cards) or 'none seen'}."
