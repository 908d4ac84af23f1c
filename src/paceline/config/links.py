"""Links: the tiers of links that usually come with a device of the catalogue.

A Cluster that names its tiers is taken at its word. For one that does not, this file knows what
joins the devices of a node or a rack: a property of the product, so it is cited. It also knows
which network cards such nodes usually have. That is a habit of those who build them, so it is
assumed: say what yours are. Where NCCL was measured on such nodes, the tier carries those curves:
`catalogue/collectives.json`, made by `tools/derive_collectives.py`.

Not here: how long a collective takes (`paceline.plan.collectives`), and links of devices that the
table doesn't know, which stay unknown.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.config.curves import CollectiveCurve
from paceline.config.device import Device
from paceline.config.errors import InputError
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, NetworkName, Tier


class Fabric(NamedTuple):
    """What joins the devices of a node or rack, and its usual network card per device."""

    link: str
    """Name of the tier, see `paceline.plan.collectives` for those that it knows."""
    gb_per_s: float
    """Each way and per device."""
    source: str
    network_gb_per_s: float
    """Share of the node's network cards that a device has, each way."""
    curves: tuple[str, ...] = ()
    """Fabrics of collectives.json, its own or of relatives (whose curves are scaled to its rate);
    the first that knows a number of ranks decides."""
    domain: int = 1
    """Devices that the link joins across nodes; 1: those of one node."""
    adds: bool = False
    """Whether its switches add up (NVLink SHARP)."""
    node: int = 8
    """Devices of the largest node that is built."""


_NVLINK3 = "NVIDIA A100 datasheet: NVLink 600 GB/s, both ways together"
_NVLINK4 = "NVIDIA Hopper datasheets: NVLink 900 GB/s, both ways together"
_NVLINK5 = "NVIDIA Blackwell datasheets: NVLink 1.8 TB/s, both ways together"
_NVLINK2 = "NVIDIA V100 datasheet: NVLink 300 GB/s, both ways together"
_ICI = "jax-ml scaling-book, TPU chapter: links of 45 or 90 GB/s each way, two per torus axis"
_ICI7 = "Google Cloud TPU7x: links of 1200 GB/s, both ways together, on three axes of a torus"
_SWARMX = "Cerebras CS-3 data sheet: system I/O of 1.2 Tbit/s, up to 2048 systems"

# Rates that the fabrics of collectives.json were measured at, by the start of their names.
_MEASURED_GB_PER_S = {"nvlink3": 300, "nvlink4": 450, "nvlink5": 900, "pcie4": 32, "pcie5": 64}
# Two devices as two L40S; more as RTX PRO 6000 at half the rate. All without peers over NVLink.
_PCIE4 = ("pcie4-l40s", "pcie5-rtx-pro-6000")

_A100 = Fabric("nvlink", 300, _NVLINK3, 25, ("nvlink3",))
_H100 = Fabric("nvlink", 450, _NVLINK4, 50, ("nvlink4-h100",), adds=True)
# Two boards of eight: NVIDIA's DGX-2, and Google's a2-megagpu-16g.
_V100 = Fabric("nvlink", 150, _NVLINK2, 12.5, ("nvlink3",), node=16)

_FABRICS: Mapping[str, Fabric] = {
    "A100-40": _A100._replace(node=16),
    "A100-80": _A100,
    "H100-SXM": _H100,
    "H100-96-HBM2e": _H100,
    "A800-80": Fabric(
        "nvlink", 200, "NVIDIA A800 datasheet: NVLink 400 GB/s, both ways", 25, ("nvlink3",)
    ),
    "H800-80": _H100._replace(gb_per_s=200, source="NVIDIA H800 datasheet: NVLink 400 GB/s"),
    "H20": _H100,
    "GH200-96": Fabric("nvlink", 450, _NVLINK4, 25, ("nvlink4-h100",)),
    "H200": _H100._replace(curves=("nvlink4-h200",)),
    "B200": Fabric("nvlink", 900, _NVLINK5, 50, ("nvlink5-b200",), adds=True),
    "B300": Fabric("nvlink", 900, _NVLINK5, 100, ("nvlink5-b300",), adds=True),
    # Measured on trays of four; eight of an HGX board stand for more of the rack's switches.
    "GB200": Fabric("nvlink", 900, _NVLINK5, 50, ("nvlink5-gb200", "nvlink5-b200"), 72, adds=True),
    "GB300": Fabric("nvlink", 900, _NVLINK5, 100, ("nvlink5-gb300", "nvlink5-b300"), 72, adds=True),
    "V100": _V100,
    "V100-16": _V100._replace(node=8),
    "P100": Fabric("nvlink", 80, "NVIDIA P100 datasheet: NVLink 160 GB/s", 12.5, ("nvlink3",)),
    "MI250X-GCD": Fabric(
        "xgmi", 150, "AMD CDNA 2 white paper: 3 links of 50 GB/s each way", 12.5, node=16
    ),
    "MI300X": Fabric(
        "xgmi", 448, "AMD Instinct MI300X data sheet: 7 links of 64 GB/s each way", 50
    ),
    "MI325X": Fabric(
        "xgmi", 448, "AMD Instinct MI325X data sheet: 7 links of 64 GB/s each way", 50
    ),
    "MI355X": Fabric(
        "xgmi", 537, "AMD Instinct MI355X data sheet: 7 links, 153.6 GB/s both ways", 50
    ),
    "L40S": Fabric("pcie", 32, "PCIe 4.0 x16", 12.5, _PCIE4),
    "RTX-PRO-6000": Fabric("pcie", 64, "PCIe 5.0 x16", 50, ("pcie5-rtx-pro-6000",)),
    "H100-PCIe": Fabric("pcie", 64, "PCIe 5.0 x16", 25),
    "A100-80-PCIe": Fabric("pcie", 32, "PCIe 4.0 x16", 12.5, _PCIE4),
    "A40": Fabric("pcie", 32, "PCIe 4.0 x16", 12.5, _PCIE4),
    "RTX-3090": Fabric("pcie", 32, "PCIe 4.0 x16", 1.25, _PCIE4),
    "A30": Fabric("pcie", 32, "PCIe 4.0 x16", 12.5, _PCIE4),
    "A6000": Fabric("pcie", 32, "PCIe 4.0 x16", 12.5, _PCIE4),
    "L4": Fabric("pcie", 16, "PCIe 4.0 x8", 12.5, _PCIE4),
    "RTX-4090": Fabric("pcie", 32, "PCIe 4.0 x16", 1.25, _PCIE4),
    "T4": Fabric("pcie", 16, "PCIe 3.0 x16", 3.125, _PCIE4),
    # A ring along one axis of the torus uses both its directions.
    "TPUv2": Fabric("ici", 124, "Google Cloud TPU v2: 4 links of 496 Gbit/s", 3.1, (), 256),
    "TPUv3": Fabric("ici", 140, "TPU v4 paper, table 4: v3 has 4 links of 70 GB/s", 3.1, (), 1024),
    "TPUv4": Fabric("ici", 90, _ICI, 6.25, (), 4096),
    "TPUv5e": Fabric("ici", 90, _ICI, 6.25, (), 256),
    "TPUv5p": Fabric("ici", 180, _ICI, 6.25, (), 8960),
    "TPUv6e": Fabric("ici", 180, _ICI, 12.5, (), 256),
    "TPUv7": Fabric("ici", 200, _ICI7, 12.5, (), 9216),
    # Its switches send weights to all wafers and add up what comes back.
    "CS-3": Fabric("swarmx", 150, _SWARMX, 150, (), 2048, adds=True),
    "Trainium2": Fabric(
        "neuronlink", 640, "AWS Trn2: NeuronLink 1.28 TB/s, both ways", 25, node=16
    ),
    "Gaudi2": Fabric("gaudi", 262.5, "Intel Gaudi 2: 21 ports of 100 Gbit/s inside a node", 37.5),
    "Gaudi3": Fabric("gaudi", 525, "Intel Gaudi 3: 21 ports of 200 Gbit/s inside a node", 75),
}


class Network(NamedTuple):
    """A network between nodes that can be named: one port for each device."""

    link: str
    gb_per_s: float
    """Each way and per port."""
    source: str
    adds: bool = False
    """Whether its switches add up."""


_NDR = "NVIDIA Quantum-2 and ConnectX-7 data sheets: ports of 400 Gbit/s"
_XDR = "NVIDIA Quantum-X800 and ConnectX-8 data sheets: ports of 800 Gbit/s"
NETWORKS: Mapping[NetworkName, Network] = {
    "ndr": Network("infiniband", 50, _NDR),
    "ndr-sharp": Network("infiniband", 50, f"{_NDR}; SHARP adds up in switches", adds=True),
    "xdr": Network("infiniband", 100, _XDR),
    "xdr-sharp": Network("infiniband", 100, f"{_XDR}; SHARP adds up in switches", adds=True),
    # A card with cores of its own: they take work from the host; what a collective sends is equal.
    "bluefield-3": Network("roce", 50, "NVIDIA BlueField-3 data sheet: one port of 400 Gbit/s"),
}

_LATENCY_S = {"pcie": 2e-6}
# Of devices on PCIe a host with switches takes so many.
_PCIE_NODE = 16


def largest_node(device: Device) -> int | None:
    """Devices of a catalogue's device that its link can join, in the largest node or rack that is
    built; None where its links aren't known."""
    fabric = _FABRICS.get(device.name)
    if fabric is None:
        return None
    return max(fabric.domain, _PCIE_NODE if fabric.link == "pcie" else fabric.node)


def in_nodes(devices: int, device: Device) -> tuple[int, int] | None:
    """Nodes, and devices of each, as which so many devices can be had; None where one node can
    have them, or nobody knows."""
    most = largest_node(device)
    if most is None or devices <= most:
        return None
    each = max(number for number in range(1, most + 1) if devices % number == 0)
    return devices // each, each


def usual_tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The links that usually come with a cluster's device, the fastest first.

    Raises:
        InputError: the catalogue knows no links of the device, and there are several; or more are
            said to be in a node than any has.
    """
    device, total = cluster.device, cluster.num_devices
    per_node = cluster.devices_per_node
    if device.kind == "cpu":
        return _cpu_tiers(per_node, total)
    if device.name not in _FABRICS:
        return _unknown(device, total)
    better = in_nodes(per_node, device)
    if better is not None:
        raise InputError(
            f"cluster.devices_per_node = {per_node}, but no node of {device.name} has more than "
            f"{largest_node(device)}: set num_nodes = {cluster.num_nodes * better[0]} and "
            f"devices_per_node = {better[1]}, or describe the links by cluster.tiers."
        )
    fabric = _FABRICS[device.name]
    inner = _inside(fabric, min(total, max(per_node, fabric.domain)))
    if inner.num_devices == total:
        return (inner,)
    if cluster.network is not None:
        return inner, _named(NETWORKS[cluster.network], total)
    outer = network("infiniband", total, fabric.network_gb_per_s * 8, 2.0)
    return inner, outer.replace(bytes_per_s=_usual_card(fabric, device))


def _named(known: Network, total: int) -> Tier:
    latency_s = Figure(value=2e-6, origin="assumed", source="usual of such networks")
    rate = Figure(value=known.gb_per_s * 1e9, origin="cited", source=known.source)
    return Tier(
        name=known.link,
        num_devices=total,
        latency_s=latency_s,
        bytes_per_s=rate,
        reduces_in_network=known.adds,
    )


def network(name: str, num_devices: int, gbit_per_s_per_device: float, latency_us: float) -> Tier:
    """A network between nodes, as people describe it.

    Args:
        name: infiniband, roce, efa, ethernet, ...: InfiniBand and RoCE deliver in order, which
            NCCL's fastest protocol for middle sizes needs.
        num_devices: of the whole cluster.
        gbit_per_s_per_device: all cards of a node, each way, over its devices.
        latency_us: from a message's start to its arrival; InfiniBand 2, EFA about 18.
    """
    return Tier(
        name=name,
        num_devices=num_devices,
        latency_s=Figure(value=latency_us * 1e-6, origin="assumed", source="as described"),
        bytes_per_s=Figure(
            value=gbit_per_s_per_device / 8 * 1e9, origin="assumed", source="as described"
        ),
    )


def _faster_curve(curve: CollectiveCurve, factor: float) -> CollectiveCurve:
    latency = min(curve.seconds)
    seconds = tuple(latency + (each - latency) / factor for each in curve.seconds)
    return curve.replace(seconds=seconds, source=f"{factor:g} x the bandwidth of {curve.source}")


def _unknown(device: Device, total: int) -> tuple[Tier, ...]:
    if total == 1:
        return ()
    raise InputError(
        f"cluster.tiers is missing: the links between {total} devices {device.name!r} are not in "
        "the catalogue; give cluster.tiers, or measure them with `paceline bench`."
    )


def _inside(fabric: Fabric, num_devices: int) -> Tier:
    return Tier(
        name=fabric.link,
        num_devices=num_devices,
        latency_s=Figure(
            value=_LATENCY_S.get(fabric.link, 1e-6), origin="assumed", source="usual of such links"
        ),
        bytes_per_s=Figure(value=fabric.gb_per_s * 1e9, origin="cited", source=fabric.source),
        collectives=_curves(fabric),
        reduces_in_network=fabric.adds,
    )


def _usual_card(fabric: Fabric, device: Device) -> Figure:
    return Figure(
        value=fabric.network_gb_per_s * 1e9,
        origin="assumed",
        source=f"usual network card of nodes with {device.name}; say what yours are",
    )


def _cpu_tiers(per_node: int, total: int) -> tuple[Tier, ...]:
    """gloo between processes of one machine, seen on two virtual cores; and 10 Gbit/s Ethernet."""
    loopback = network("loopback", per_node, 9.0, 120.0)
    if per_node == total:
        return (loopback,)
    return loopback, network("ethernet", total, 10.0 / per_node, 150.0)


def _curves(fabric: Fabric) -> dict[str, tuple[CollectiveCurve, ...]]:
    """What was measured of a fabric; a later one of its curves adds numbers of ranks."""
    found: dict[str, dict[int, CollectiveCurve]] = {}
    for name in fabric.curves:
        factor = fabric.gb_per_s / _MEASURED_GB_PER_S[name.split("-")[0]]
        for op, curves in _measured()[name].items():
            of_op = found.setdefault(op, {})
            for curve in curves:
                scaled = curve if factor == 1 else _faster_curve(curve, factor)
                of_op.setdefault(curve.num_ranks, scaled)
    return {op: tuple(of_op[ranks] for ranks in sorted(of_op)) for op, of_op in found.items()}


@functools.cache
def _measured() -> dict[str, dict[str, tuple[CollectiveCurve, ...]]]:
    file = importlib.resources.files("paceline.config") / "catalogue/collectives.json"
    fabrics = json.loads(file.read_text())["fabrics"]
    return {name: _parsed(fabric) for name, fabric in fabrics.items()}


def _parsed(fabric: dict[str, Any]) -> dict[str, tuple[CollectiveCurve, ...]]:
    source = fabric.pop("source")
    return {
        op: tuple(
            CollectiveCurve(
                num_ranks=int(ranks),
                bytes=tuple(map(float, curve["bytes"])),
                seconds=tuple(us * 1e-6 for us in curve["us"]),
                source=source,
            )
            for ranks, curve in curves.items()
        )
        for op, curves in fabric.items()
    }
