"""`nvidia-smi topo -m`: which links join the devices and cards of a host.

Its text is a matrix of devices and cards, columns apart by tabs, with a legend of links and one of
cards (NIC0: mlx5_0). Links, the nearest first: NV# (# NVLinks), PIX (one PCIe bridge), PXB
(several), PHB (the processor's host bridge), NODE (bridges of one NUMA node), SYS (between
processors).

Source: the legend that the program prints; https://docs.nvidia.com/deploy/nvidia-smi.
"""

import re
from dataclasses import dataclass

from paceline.config.host import DeviceLinks

_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
_MOST_NVLINKS = 18  # of a device: H100, H200, B200
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class LinkMatrix:
    """Links between devices (GPU0, ...) and cards, by their names."""

    devices: tuple[str, ...]
    cards: tuple[str, ...]
    links: dict[tuple[str, str], str]
    """Both ways; nothing on the diagonal."""

    @property
    def device_links(self) -> DeviceLinks:
        """The slowest kind of link between two devices."""
        kinds = [self.links[a, b] for a in self.devices for b in self.devices if a != b]
        if not kinds:
            return "none"
        if "SYS" in kinds:
            return "numa"
        if not all(kind.startswith("NV") for kind in kinds):
            return "pcie"
        # More links than a device has: they all lead to switches.
        shared = max(int(kind[2:]) for kind in kinds) * (len(self.devices) - 1) > _MOST_NVLINKS
        return "nvswitch" if shared else "nvlink"

    def nearest_card(self, device: str) -> str | None:
        """The card that a device reaches over the fewest bridges; of several, the first."""
        reached = [card for card in self.cards if self.links[device, card] in _NEAREST_FIRST]
        by_distance = (_NEAREST_FIRST.index(self.links[device, card]) for card in reached)
        return (
            min(zip(by_distance, range(len(reached)), reached, strict=True))[2] if reached else None
        )


def parse(text: str) -> LinkMatrix:
    """The matrix in the program's output.

    Raises:
        ValueError: there is none.
    """
    lines = [line.rstrip() for line in _ESCAPES.sub("", text).splitlines()]
    head = next((line for line in lines if re.match(r"\s*GPU0\b", line)), None)
    if head is None:
        raise ValueError("no matrix in the output of nvidia-smi topo -m")
    columns = [name.strip() for name in head.split("\t") if _is_place(name.strip())]
    named = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    links: dict[tuple[str, str], str] = {}
    for line in lines[lines.index(head) + 1 :]:
        row, *cells = (cell.strip() for cell in line.split("\t"))
        if row in columns:
            for column, link in zip(columns, cells, strict=False):
                if column != row:
                    links[named.get(row, row), named.get(column, column)] = link
    devices = tuple(name for name in columns if name.startswith("GPU"))
    cards = tuple(named.get(name, name) for name in columns if not name.startswith("GPU"))
    return LinkMatrix(devices, cards, links)


def _is_place(name: str) -> bool:
    """Whether a column is of a device or card: older versions name cards by themselves."""
    return bool(re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\S+|\w*_\d+", name))
