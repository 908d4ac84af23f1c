"""Energy: joules of this host's processors, memory and NVIDIA devices, where they count them.

Processors count for all that runs on the host (RAPL, of Intel and of AMD; many kernels let root
alone read it), devices for the whole board (NVML, from Volta on). Neither knows what power
supplies, fans and the network take.

Sources: the kernel's Documentation/power/powercap: zones intel-rapl:<package>, with energy_uj that
begins at 0 again after max_energy_range_uj; NVML's nvmlDeviceGetTotalEnergyConsumption (mJ since
the driver was loaded).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
LOOK_EVERY_S = 30.0
"""A package of 400 W fills the usual range of 262 kJ in eleven minutes; it may do so once between
two looks."""
# A package holds its cores; memory is beside it; "psys" would hold them all again.
_COUNTED = ("package-", "dram")


@dataclass(frozen=True)
class Spent:
    """Joules since a meter was made."""

    devices_j: float | None
    """None: no device of this process's is counted."""
    host_j: float | None
    """Of processors and memory; None: they aren't counted."""
    missing: tuple[str, ...] = ()
    """Sentences: what isn't counted, and why."""


class EnergyMeter:
    """Counts from its making on. Look at least every LOOK_EVERY_S."""

    def __init__(self, num_devices: int, powercap: Path = POWERCAP) -> None:
        """
        Args:
            num_devices: of this host's devices that CUDA_VISIBLE_DEVICES leaves, the first so many.
        """
        self._host, host_missing = _of_host(powercap)
        self._devices, device_missing = _of_devices(num_devices)
        self._missing = (*host_missing, *device_missing)

    @property
    def counts(self) -> bool:
        """Whether anything is counted."""
        return bool(self._host or self._devices)

    def read(self) -> Spent:
        """What was taken until now; a counter that can't be read any more stays where it was."""
        return Spent(_sum(self._devices), _sum(self._host), self._missing)


class _Counter:
    """A counter that only grows, but for where it begins anew."""

    def __init__(self, read: Callable[[], int], joules: float, most: int | None) -> None:
        """
        Args:
            joules: of one count.
            most: after which it begins at 0; None: it does so only with its driver.

        Raises:
            Exception: it can't be read.
        """
        self._read, self._joules, self._most = read, joules, most
        self._last, self._count = read(), 0

    def total_j(self) -> float:
        try:
            now = self._read()
        except Exception:  # NVML has classes of its own
            now = self._last
        grown = now - self._last
        if grown < 0:
            grown = max(0, grown + self._most) if self._most is not None else 0
        self._last = now
        self._count += grown
        return self._count * self._joules


def _sum(counters: Sequence[_Counter]) -> float | None:
    return sum(one.total_j() for one in counters) if counters else None


def _of_host(powercap: Path) -> tuple[list[_Counter], list[str]]:
    found, missing = [], []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith(_COUNTED):
                most = _count_in(zone / "max_energy_range_uj")
                found.append(_Counter(partial(_count_in, zone / "energy_uj"), 1e-6, most))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it holds no number"
            missing.append(f"{zone.name} of {powercap} can't be read ({why})")
    if not found and not missing:
        missing.append(f"processors count no energy here ({powercap} has no intel-rapl)")
    return found, missing


def _count_in(file: Path) -> int:
    return int(file.read_text())


def _of_devices(num_devices: int) -> tuple[list[_Counter], list[str]]:
    if not num_devices:
        return [], []
    try:
        import pynvml
    except ImportError:
        return [], ["devices are not asked: pip install 'paceline[energy]'"]
    names = _visible(num_devices)
    found, missing = [], []
    if len(names) < num_devices:
        missing.append(f"{num_devices - len(names)} devices are hidden by CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        for name in names:
            by = pynvml.nvmlDeviceGetHandleByIndex
            device = by(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
            read = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, device)
            found.append(_Counter(read, 1e-3, None))
    except pynvml.NVMLError as error:
        missing.append(f"{len(names) - len(found)} devices count no energy (NVML: {error})")
    return found, missing


def _visible(num_devices: int) -> list[str]:
    """Numbers or UUIDs, as NVML takes them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(at) for at in range(num_devices)] if told is None else told.split(",")
    return [name.strip() for name in names if name.strip()][:num_devices]
