"""Host: what joins the devices of a node, and the cards that lead out of it.

Discovered by `machine.discovery`, or given by hand in a Cluster file where the machine that plans
is not the one that trains. The rate of the links is a Tier's; here stands which of them there are.
"""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.frozen import Count, FrozenConfig

DeviceLinks = Literal["none", "nvlink", "nvswitch", "pcie", "numa"]
"""The slowest kind between any two devices: "nvlink" from device to device, "numa" through the
processors' own links; "none": fewer than two devices, or not looked at."""
CardKind = Literal["ethernet", "infiniband", "roce"]


class Card(FrozenConfig):
    """A port of a network card that is up."""

    name: str
    """As NCCL calls it: mlx5_0:1; of a plain Ethernet card its interface."""
    kind: CardKind
    interface: str | None = None
    """Its network interface, which gloo uses; None: it has none."""
    gbit_per_s: Annotated[float, Field(gt=0)] | None = None
    """None: the driver doesn't say."""
    pci: str | None = None
    """Its address; ports of one card differ in the last figure only."""
    numa_node: int | None = None


class Host(FrozenConfig):
    """A node of the cluster; all are taken to be alike."""

    numa_nodes: Count = 1
    device_links: DeviceLinks = "none"
    cards: Annotated[tuple[Card, ...], Field(strict=False)] = ()
    """In order of their PCI addresses: the i-th ones of all hosts make up rail i."""
    device_cards: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The nearest card of each device, by name."""
