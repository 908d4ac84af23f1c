"""InfiniBand and RoCE ports, those that are down too: from /sys, or from the output of `ibstat`.

Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband; man ibstat.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.machine.sysfs import SYS, read_text


@dataclass(frozen=True)
class Port:
    """One port of a card."""

    name: str
    """As NCCL calls it: mlx5_0:1."""
    link_layer: str
    """InfiniBand, or Ethernet: RoCE."""
    state: str
    """Active, Armed, Initializing (no subnet manager), Down."""
    physical_state: str
    """LinkUp, Polling (no cable, or nothing at its other end), Disabled."""
    gbit_per_s: float | None
    """The rate that the link negotiated; of a port that is down its lowest."""

    @property
    def is_active(self) -> bool:
        """Whether it carries messages."""
        return self.state.lower() == "active"


def ask(root: Path = SYS) -> str:
    """The ports of this machine as JSON."""
    ports = sorted(root.glob("class/infiniband/*/ports/*"))
    return json.dumps([asdict(_from_sysfs(port)) for port in ports])


def parse_ibstat(text: str) -> tuple[Port, ...]:
    """The ports in the output of `ibstat`."""
    ports = []
    for card in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        name = card.partition("'")[0]
        for port in re.split(r"^\s*Port (?=\d+:)", card, flags=re.MULTILINE)[1:]:
            said = dict(re.findall(r"^\s*([\w ]+): *(.*?)\s*$", port, re.MULTILINE))
            ports.append(_port(f"{name}:{port.partition(':')[0]}", said))
    return tuple(ports)


def _port(name: str, said: dict[str, str]) -> Port:
    return Port(
        name,
        said.get("Link layer", "InfiniBand"),
        said.get("State", "unknown"),
        said.get("Physical state", "unknown"),
        _rate(said.get("Rate", "")),
    )


def _from_sysfs(port: Path) -> Port:
    """Files say "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"."""
    said = {
        name: read_text(port / file)
        for name, file in (
            ("Link layer", "link_layer"),
            ("State", "state"),
            ("Physical state", "phys_state"),
            ("Rate", "rate"),
        )
    }
    said["State"] = said["State"].partition(": ")[2].capitalize()
    said["Physical state"] = said["Physical state"].partition(": ")[2]
    return _port(f"{port.parent.parent.name}:{port.name}", said)


def _rate(text: str) -> float | None:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else None
