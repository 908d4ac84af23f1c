"""Interfaces: which one reaches the other hosts, for gloo's and NCCL's sockets.

Left to themselves, gloo takes the address that the host's own name resolves to (often a loopback)
and NCCL the first interface in its own order. The rule here: the one through which the kernel sends
to the address where ranks meet. A setting that a person made stays; it is refused only where it
can't work: a name that no interface has, or the loopback between several hosts.

Several interfaces: gloo takes a list (GLOO_SOCKET_IFNAME=eth0,eth1) and gives each collective to
the next one in turn; NCCL takes prefixes, or exact names after "=". Both are a person's to give.

Sources: torch 2.13, ProcessGroupGloo (device per name of the list, context by tag); NCCL's
environment variables, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from paceline.config.errors import InputError
from paceline.config.host import Card

Interfaces = Mapping[str, Sequence[str]]
"""Addresses by name of interface."""


def is_loopback(address: str) -> bool:
    """Whether an address reaches its own host only."""
    return ip_address(address.split("%")[0]).is_loopback


def interface_with(address: str, interfaces: Interfaces) -> str | None:
    """The interface that has an address; None for the loopback and for none."""
    if is_loopback(address):
        return None
    return next((name for name, of_it in interfaces.items() if address in of_it), None)


def socket_settings(
    chosen: str | None, given: Mapping[str, str], interfaces: Interfaces, num_hosts: int
) -> dict[str, str]:
    """Environment variables to set beside those that are given, for ranks on several hosts.

    Args:
        chosen: the interface that reaches where ranks meet; None: not known.
        given: this process's environment.
        interfaces: those of this host.
        num_hosts: that ranks are on.

    Raises:
        InputError: what is given can't work.
    """
    listed = given.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, listed.split(",")):
        _must_reach(name, interfaces, num_hosts)
    if chosen is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": f"={chosen}"}
    return {name: value for name, value in wanted.items() if name not in given}


def _must_reach(name: str, interfaces: Interfaces, num_hosts: int) -> None:
    others = [each for each, of_it in interfaces.items() if not all(map(is_loopback, of_it))]
    if name not in interfaces:
        raise InputError(
            f"GLOO_SOCKET_IFNAME={name} names no interface of this host: leave it out, or give one "
            f"of {', '.join(others)}."
        )
    if name not in others:
        raise InputError(
            f"GLOO_SOCKET_IFNAME={name} is the loopback, and the ranks are on {num_hosts} hosts: "
            f"leave it out, or give one of {', '.join(others)}."
        )


def hca_setting(cards: Sequence[Card]) -> dict[str, str]:
    """NCCL_IB_HCA where InfiniBand or RoCE ports differ in rate: the fastest ones, exactly.

    NCCL spreads its channels over all ports that are up; a slow one among them (for storage, for
    management) holds up the rings that go through it. Where all are alike nothing is set.
    """
    ports = [card for card in cards if card.kind != "ethernet" and card.gbit_per_s is not None]
    rates = [card.gbit_per_s for card in ports if card.gbit_per_s is not None]
    if len(set(rates)) < 2:
        return {}
    fastest = [card.name for card in ports if card.gbit_per_s == max(rates)]
    return {"NCCL_IB_HCA": f"={','.join(fastest)}"}
