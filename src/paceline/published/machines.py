"""What a published run says about its machine: the device by its label, the network by its text.

A label is matched whole: a cut-down part ("H100 NVL", a 96 GB HBM2e part that calls itself H100)
has other clocks and memory and never gets another chip's numbers. A network that is not described
gets the catalogue's default for such nodes, marked as assumed.
"""

import math
import re

from paceline.config.figure import Figure
from paceline.config.hardware import CATALOGUE, Cluster, Device, Tier
from paceline.config.links import in_nodes
from paceline.plan.collectives import tiers_of
from paceline.published.networks import UnpredictableError
from paceline.published.table import PublishedLine

# How labels of tables differ from the catalogue's names, after `_plain`.
_ALIASES = {
    "a100": "A100-80",
    "a100sxm": "A100-80",
    "a100sxm4": "A100-80",
    "a100sxm40": "A100-40",
    "a100sxm440": "A100-40",
    "h100": "H100-SXM",
    "h10080": "H100-SXM",
    "h100sxm5": "H100-SXM",
    "h100sxm80": "H100-SXM",
    "h10080sxm": "H100-SXM",
    "h10080hbm3": "H100-SXM",
    "h10080pcie": "H100-PCIe",
    "h800": "H800-80",
    "a800": "A800-80",
    "gh200": "GH200-96",
    # The driver's name has the host's memory.
    "gh200480": "GH200-96",
    "gh200120": "GH200-96",
    "h200sxm": "H200",
    "b200sxm": "B200",
    "b300sxm": "B300",
    "v10032": "V100",
    "v100sxm2": "V100",
    "v100sxm232": "V100",
}
# A rate of data: "400Gb/s", "3200 Gbps", "50 GB/s", "1.6 Tbit/s".
_SPEED = r"(?P<number>\d+(?:\.\d+)?)\s*(?P<scale>[TtGg])(?P<unit>[Bb])?(?:it|its)?\s?(?:/s|ps|/sec)"
_DEVICES = r"(?:gpu|device|accelerator|chip|rank|card|nic)s?\b"
_NODES = r"(?:node|host|vm|machine|server|instance|box|system)s?\b"
# Gbit/s of the fastest network card there is (ConnectX-8).
_FASTEST_CARD = 800
# Between a datasheet's gigabytes (1e9 bytes, or 2**30) and the bytes that a program finds.
_MEMORY_OFF = 0.1
# What may follow a name and changes no number: the power limit is in the name of the entry.
_HARMLESS = re.compile(r"(sxm\d?|oam|hbm3e?|\d{3,4}w|gpu|nvl72|141|192|180|186|188|288)*")


def device_of(label: str) -> Device | None:
    """The catalogue's device for a label, None where it is unknown."""
    plain = _plain(label)
    names = {_plain(name): name for name in CATALOGUE} | _ALIASES
    fitting = [known for known in names if plain.startswith(known)]
    for known in sorted(fitting, key=len, reverse=True):
        device = CATALOGUE[names[known]]
        if _HARMLESS.fullmatch(_without_memory(plain[len(known) :], device)):
            return device
    return None


def _without_memory(rest: str, device: Device) -> str:
    """What follows a name, less the gigabytes of its datasheet, which are near to those it has."""
    gigabytes = re.match(r"\d+", rest)
    if gigabytes is None or device.memory_bytes is None:
        return rest
    off = int(gigabytes[0]) * 1e9 / device.memory_bytes.value - 1
    return rest[gigabytes.end() :] if abs(off) < _MEMORY_OFF else rest


def label_in(text: str) -> str | None:
    """A device named somewhere in a text, such as a file's name; None where there is none."""
    for word in re.split(r"[^A-Za-z0-9-]+|_", text):
        if word and device_of(word) is not None:
            return word
    return None


def cluster_of(device: Device, num_devices: int, line: PublishedLine) -> tuple[Cluster, list[str]]:
    """The machine of a run, and what of it was not published.

    Raises:
        UnpredictableError: it has larger nodes than there are.
    """
    per_node = math.gcd(num_devices, min(num_devices, line.count("gpus_per_node") or 8))
    if in_nodes(per_node, device) is not None:
        raise UnpredictableError(f"no nodes of {per_node} {device.name}")
    bare = Cluster(device=device, devices_per_node=per_node, num_nodes=num_devices // per_node)
    tiers = tuple(tiers_of(bare))
    inside = link_bytes_per_s(line.text("interconnect_intra"))
    if inside is not None and abs(inside / tiers[0].bytes_per_s.value - 1) > 0.1:
        inner = _with_bandwidth(tiers[0], inside, line.text("interconnect_intra"))
        tiers = (inner, *tiers[1:])
    if num_devices <= tiers[0].num_devices:
        return bare.replace(tiers=tiers), []
    described = network_gbit_per_s(line.text("interconnect_inter"), per_node)
    if described is None:
        return bare.replace(tiers=tiers), ["network"]
    outer = _with_bandwidth(tiers[-1], described / 8 * 1e9, line.text("interconnect_inter"))
    return bare.replace(tiers=(*tiers[:-1], outer)), []


def link_bytes_per_s(text: str) -> float | None:
    """Bytes/s each way and per device that a text says about the links inside a node.

    "NVLink3 600GB/s/GPU bidir" counts both ways; of PCIe without a number the sixteen lanes of its
    fourth generation are taken (about 25 GB/s in use).
    """
    lowered = text.lower()
    both_ways = re.search(r"(\d+(?:\.\d+)?)\s*gb/s(?:/gpu)?\s*bidir", lowered)
    if both_ways:
        return float(both_ways[1]) / 2 * 1e9
    if "pcie" in lowered and "nvlink" not in lowered:
        return 25e9
    return None


def network_gbit_per_s(text: str, per_node: int) -> float | None:
    """Gbit/s each way and per device that a text says about the network between nodes.

    "4x Omni-Path 100 Gb/s per node", "8x400Gb/s IB NDR", "1600 Gbps RoCE per node", "3.2 Tbit/s per
    VM", "50 GB/s per GPU" (bytes), "400Gb/s per GPU between racks". Counts are per node unless the
    text says per GPU, and so is what no card has alone.
    """
    plain = text.replace(",", "")
    speeds = [*re.finditer(_SPEED, plain)]
    for found in speeds:
        if re.match(rf"\s*(?:per |/ ?){_DEVICES}", plain[found.end() :], re.IGNORECASE):
            return _gbit(found)
    cards = re.search(rf"(\d+)\s*x\s*[A-Za-z -]*?{_SPEED}", plain)
    if cards:
        return float(cards[1]) * _gbit(cards) / per_node
    cards = re.search(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*G\b", plain, re.IGNORECASE)
    if cards:
        return float(cards[1]) * float(cards[2]) / per_node
    if not speeds:
        return None
    whole = _gbit(speeds[0])
    of_node = re.search(rf"(?:per |/ ?){_NODES}|\b(?:node|host)\b", plain, re.IGNORECASE)
    return whole / per_node if of_node or whole > _FASTEST_CARD else whole


def _gbit(found: re.Match[str]) -> float:
    """Gbit/s of a match of `_SPEED`: a B after T or G counts bytes, a b or nothing bits."""
    scale = {"t": 1000, "g": 1}[found["scale"].lower()]
    return float(found["number"]) * scale * (8 if found["unit"] == "B" else 1)


def _with_bandwidth(tier: Tier, bytes_per_s: float, text: str) -> Tier:
    figure = Figure(value=bytes_per_s, origin="cited", source=f"the table: {text}")
    return tier.replace(bytes_per_s=figure, collectives={})


def _plain(label: str) -> str:
    """Letters and digits alone: "A100-80GB" and "a100 80" are the same."""
    makers = r"nvidia|tesla|amd|instinct|geforce|google|\b[dh]gx(?:[ -]?[12]h?\b)?"
    words = re.sub(makers, "", label.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=\d)\s*gi?b\b|(?<=\d)gb(?=[^a-z0-9])", "", words))
