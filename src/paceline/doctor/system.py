"""The host: cores, memory, limits, network cards, environment; from this process and from /proc.

Sources: man proc(5) (limits, meminfo), the kernel's Documentation/admin-guide/cgroup-v2.rst
(cpu.max, memory.max), man timedatectl and chronyc.
"""

import json
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.host import Card
from paceline.machine import sysfs

_VARIABLES = re.compile(
    r"(NCCL|GLOO|RCCL|TORCH|PYTORCH|CUDA|HIP|ROCR|OMP|MKL)_\w+|LOCAL_WORLD_SIZE"
)
_MAKERS = {"0x10de": "nvidia", "0x1002": "amd"}
_CONTAINERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}


@dataclass(frozen=True)
class System:
    """One host, as this process sees it."""

    host: str
    cores: int
    """That this process may use."""
    host_cores: int
    numa_nodes: int
    cards: tuple[Card, ...]
    """Network cards that are up."""
    shm_bytes: int | None
    """Size of /dev/shm."""
    environment: Mapping[str, str]
    """What torch, NCCL, gloo and their threads are set by."""
    container: str | None
    pci_devices: Mapping[str, int]
    """Accelerators on the PCIe bus, by maker: there whether or not a driver is."""


@dataclass(frozen=True)
class OsKernel:
    """What files of /proc and /sys say; None: not there."""

    limits: Mapping[str, float]
    """Soft limits by the names of /proc/self/limits; inf: none."""
    memory_bytes: Mapping[str, int]
    """By the names of /proc/meminfo; those that count pages count pages."""
    quota_cores: float | None
    """Of the CPU group; inf: none."""
    group_memory_bytes: float | None
    governor: str | None
    huge_pages: str | None
    """Of transparent huge pages: always, madvise, never."""
    clock_synchronised: bool | None
    modules: frozenset[str] | None
    command_line: str | None
    open_driver: bool | None
    """Whether NVIDIA's kernel modules are the open ones."""


def ask() -> str:
    """What this process sees, as JSON."""
    usable = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    shm = Path("/dev/shm")
    said = {
        "host": platform.node(),
        "cores": len(usable),
        "host_cores": os.cpu_count() or 1,
        "numa_nodes": sysfs.numa_nodes(),
        "cards": [card.model_dump(mode="json") for card in sysfs.cards()],
        "shm_bytes": shutil.disk_usage(shm).total if shm.exists() else None,
        "environment": {k: v for k, v in os.environ.items() if _VARIABLES.fullmatch(k)},
        "container": next((c for file, c in _CONTAINERS.items() if Path(file).exists()), None),
        "pci_devices": _pci_devices(sysfs.SYS),
    }
    return json.dumps(said)


def _pci_devices(root: Path) -> dict[str, int]:
    """How many of each maker's: PCI classes 0300 and 0302 (graphics, 3D), 1200 (accelerator)."""
    makers = []
    for place in (root / "bus/pci/devices").glob("*"):
        kind, vendor = ((place / name).read_text().strip() for name in ("class", "vendor"))
        if kind[:6] in ("0x0300", "0x0302", "0x1200") and vendor in _MAKERS:
            makers.append(_MAKERS[vendor])
    return dict(Counter(makers))


def kernel(said: Mapping[str, str]) -> OsKernel:
    """From the texts of the files, by name."""
    modules, driver = said.get("modules.txt"), said.get("nvidia-version.txt")
    return OsKernel(
        limits=_limits(said.get("limits.txt", "")),
        memory_bytes=_memory(said.get("meminfo.txt", "")),
        quota_cores=_quota(said.get("cpu.max", "")),
        group_memory_bytes=_amount(said.get("memory.max", "").strip()),
        governor=said.get("governor.txt", "").strip() or None,
        huge_pages=_chosen(said.get("huge-pages.txt", "")),
        clock_synchronised=_synchronised(said),
        modules=None if modules is None else frozenset(re.findall(r"^\S+", modules, re.M)),
        command_line=said.get("cmdline.txt"),
        open_driver=None if driver is None else "Open Kernel Module" in driver,
    )


def _limits(text: str) -> dict[str, float]:
    """Lines as "Max open files   1024   524288   files"."""
    rows = re.findall(r"^Max ([a-z ]+?) {2,}(\w+) ", text, re.MULTILINE)
    return {name: float("inf") if soft == "unlimited" else float(soft) for name, soft in rows}


def _memory(text: str) -> dict[str, int]:
    """Lines as "MemTotal:  24684096 kB", and "HugePages_Total:  0" without a unit."""
    rows = re.findall(r"^(\S+): +(\d+)( kB)?", text, re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in rows}


def _quota(text: str) -> float | None:
    """ "200000 100000" is two cores, "max 100000" no quota."""
    found = re.fullmatch(r"(\w+) (\d+)", text.strip())
    if not found or not float(found[2]):
        return None
    return float("inf") if found[1] == "max" else float(found[1]) / float(found[2])


def _amount(text: str) -> float | None:
    if text == "max":
        return float("inf")
    return float(text) if text.isdigit() else None


def _chosen(text: str) -> str | None:
    """The word in brackets: "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def _synchronised(said: Mapping[str, str]) -> bool | None:
    if found := re.search(
        r"^NTPSynchronized=(yes|no)", said.get("timedatectl.txt", ""), re.MULTILINE
    ):
        return found[1] == "yes"
    if found := re.search(r"^Leap status *: (.+)", said.get("chronyc.txt", ""), re.MULTILINE):
        return found[1].strip() != "Not synchronised"
    return None
