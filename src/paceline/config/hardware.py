"""Cluster and Device: the hardware, with the origin of every number.

A person writes a `ClusterSpec`, where "auto" stands for this machine's. A `Cluster` is concrete.

Peak rates and bandwidths stand once, in `paceline.config.catalogue`. A device that is not in the
catalogue is unknown: it never gets another chip's numbers, because an MFU against the wrong peak is
worse than none.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    model_validator,
)

from paceline.config.catalogue.devices import CATALOGUE as CATALOGUE
from paceline.config.catalogue.devices import recognise as recognise
from paceline.config.curves import CollectiveCurve
from paceline.config.device import Device as Device
from paceline.config.errors import InputError
from paceline.config.figure import Figure as Figure
from paceline.config.figure import Origin as Origin
from paceline.config.frozen import Auto, Count, FrozenConfig, Ways, nearest
from paceline.config.host import Host
from paceline.config.prices import PositiveFigure, Prices
from paceline.config.stack import Stack


def device(name: str) -> Device:
    """Return a device of the catalogue by its short name.

    Raises:
        InputError: naming the closest entry.
    """
    if name not in CATALOGUE:
        raise InputError(f"device {name!r} is not in the catalogue{nearest(name, [*CATALOGUE])}")
    return CATALOGUE[name]


def _by_name(given: Any) -> Any:
    return device(given) if isinstance(given, str) and given != "auto" else given


def _as_name(given: Any, handler: SerializerFunctionWrapHandler) -> Any:
    """A device of the catalogue is written as its name: a job.toml stays readable."""
    if isinstance(given, Device) and CATALOGUE.get(given.name) == given:
        return given.name
    return handler(given)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a host is named twice: name each once.")
    return names


CollectiveCurves = Annotated[tuple[CollectiveCurve, ...], Field(strict=False)]


class Tier(FrozenConfig):
    """Links of one kind: among the devices of a node, of a rack, of the whole cluster."""

    name: str
    """What people call it: nvlink, pcie, infiniband, ethernet."""
    num_devices: Count
    """Devices that reach each other over it: a node's, a rack's, the cluster's."""
    latency_s: Figure
    """From a message's start to its arrival, however small it is."""
    bytes_per_s: Figure
    """Each way, per device: a node's network cards are shared out over its devices."""
    collectives: Mapping[str, CollectiveCurves] = Field(default_factory=dict)
    """Measured: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv."""
    reduces_in_network: bool = False
    """Switches add up (NVLink SHARP, InfiniBand SHARP): all-reduces send each byte once."""


NetworkName = Literal["ndr", "ndr-sharp", "xdr", "xdr-sharp", "bluefield-3"]


class ClusterSpec(FrozenConfig):
    """Devices of one kind, in nodes."""

    device: Annotated[Auto | Device, BeforeValidator(_by_name), WrapSerializer(_as_name)] = "auto"
    """A name of the catalogue, a full description, or "auto": this machine's."""
    devices_per_node: Auto | Ways = "auto"
    """Ranks on each node: CUDA devices, or CPU ranks over gloo."""
    num_nodes: Auto | Ways = "auto"
    """Machines; more than one are reached by torchrun or srun."""
    tiers: Annotated[tuple[Tier, ...], Field(strict=False)] = ()
    """Links, the fastest first; none: those that the catalogue knows for the device."""
    network: NetworkName | None = None
    """What joins the nodes, one port for each device: InfiniBand at 400 or 800 Gbit/s a port, with
    switches that add up (SHARP) or without; a SmartNIC at 400 Gbit/s. None: what nodes with such
    devices usually have, which is assumed."""
    hosts: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_distinct)] = ()
    """Names of the nodes, those next to each other that fast links join; runs number their ranks in
    this order, nodes that it lacks last. Written by `paceline bench collectives`; none: as the
    launcher numbers them."""
    host: Host | None = None
    """What a node is made of; None: nobody looked."""
    stack: Stack | None = None
    """Constants of our runtime that were measured here; None: the defaults."""
    prices: Prices = Prices()
    """What it costs; what is not given is unknown."""
    device_mtbf_hours: PositiveFigure = None
    """Mean hours of one device between failures that stop the job (its share of host and network
    included); none: a published figure of large clusters is assumed."""
    node_return_hours: PositiveFigure = None
    """Mean hours from the loss of a node to its return; none: one hour is assumed."""

    @model_validator(mode="after")
    def _network_has_effect(self) -> Self:
        if self.network is not None and self.tiers:
            raise ValueError("network has no effect beside tiers: leave one of them out.")
        return self

    @property
    def undecided(self) -> list[str]:
        """Settings that a plan still has to decide."""
        return [name for name, value in vars(self).items() if value == "auto"]


class Cluster(ClusterSpec):
    """A concrete cluster: the settings of ClusterSpec, each decided."""

    device: Annotated[Device, BeforeValidator(_by_name), WrapSerializer(_as_name)]
    devices_per_node: Ways
    num_nodes: Ways

    @property
    def num_devices(self) -> int:
        """Those of all nodes: its ranks."""
        return self.devices_per_node * self.num_nodes
