"""sysfs: NUMA nodes and network cards of a Linux host, read from its tree of files.

The root is an argument, so that a recorded tree is read as a live one. What a driver doesn't tell
(a virtual card has no speed, a container no PCI addresses) stays unknown.

Source: the kernel's Documentation/ABI: sysfs-class-net, stable/sysfs-class-infiniband.
"""

import re
from pathlib import Path

from paceline.config.host import Card

SYS = Path("/sys")


def numa_nodes(root: Path = SYS) -> int:
    """How many NUMA nodes there are, at least 1."""
    return max(1, len(list((root / "devices/system/node").glob("node[0-9]*"))))


def cards(root: Path = SYS) -> tuple[Card, ...]:
    """Ports that are up and belong to a device: InfiniBand, RoCE, and plain Ethernet.

    An interface of an InfiniBand or RoCE port stands there only, with its port.
    """
    ports = [
        card
        for device in sorted(_entries(root / "class/infiniband"))
        for port in sorted(_entries(device / "ports"))
        if (card := _port(root, device, port)) is not None
    ]
    taken = {card.interface for card in ports}
    plain = [
        card
        for interface in sorted(_entries(root / "class/net"))
        if interface.name not in taken and (card := _ethernet(interface)) is not None
    ]
    return tuple(sorted([*ports, *plain], key=lambda card: (card.pci or "~", card.name)))


def _port(root: Path, device: Path, port: Path) -> Card | None:
    """A port whose state is active ("4: ACTIVE")."""
    if not read_text(port / "state").endswith("ACTIVE"):
        return None
    rate = re.match(r"([\d.]+) Gb/sec", read_text(port / "rate"))
    return Card(
        name=f"{device.name}:{port.name}",
        kind="roce" if read_text(port / "link_layer") == "Ethernet" else "infiniband",
        interface=_interface_of(root, device, port),
        gbit_per_s=float(rate[1]) if rate else None,
        pci=_pci(device),
        numa_node=_numa(device),
    )


def _interface_of(root: Path, device: Path, port: Path) -> str | None:
    """The interface on the same PCI function, and, where a function has several ports, its port."""
    number = int(port.name) - 1
    same = [
        interface
        for interface in sorted(_entries(root / "class/net"))
        if (interface / "device").exists()
        and (interface / "device").resolve() == (device / "device").resolve()
    ]
    exact = [each for each in same if _number(each / "dev_port") == number]
    return next((each.name for each in (exact or same)), None)


def _ethernet(interface: Path) -> Card | None:
    """An interface that is up and has a device behind it: no bridge, tunnel or loopback."""
    if read_text(interface / "operstate") != "up" or not (interface / "device").exists():
        return None
    speed = _number(interface / "speed")
    return Card(
        name=interface.name,
        kind="ethernet",
        interface=interface.name,
        gbit_per_s=speed / 1000 if speed is not None and speed > 0 else None,
        pci=_pci(interface),
        numa_node=_numa(interface),
    )


def _pci(place: Path) -> str | None:
    """The PCI address that a device's link ends at: 0000:17:00.0."""
    name = (place / "device").resolve().name
    return name if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else None


def _numa(place: Path) -> int | None:
    node = _number(place / "device/numa_node")
    return node if node is not None and node >= 0 else None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _number(file: Path) -> int | None:
    text = read_text(file)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def read_text(file: Path) -> str:
    """What a file says; many can't be read while their device is down."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
