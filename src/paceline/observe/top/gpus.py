"""What the NVIDIA devices of this machine do right now, asked of nvidia-smi.

Only of the machine on which `paceline top` runs; on another host of the run another one shows its.
Source: `nvidia-smi --help-query-gpu`.
"""

import shutil
import subprocess
from dataclasses import dataclass

_FIELDS = ("index", "utilization.gpu", "memory.used", "temperature.gpu", "power.draw", "clocks.sm")
_PATIENCE_S = 5


@dataclass(frozen=True)
class GpuStatus:
    """One device; None is what the driver can't say."""

    index: int
    busy: float | None
    """Part of the last moment in which a kernel ran, 0 to 1."""
    memory_bytes: float | None
    celsius: float | None
    watts: float | None
    megahertz: float | None


def gpus_here() -> tuple[GpuStatus, ...]:
    """The devices of this machine; none where there is no nvidia-smi, or where it fails."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parsed(asked.stdout) if asked.returncode == 0 else ()


def parsed(text: str) -> tuple[GpuStatus, ...]:
    """What nvidia-smi prints, one device a line: "0, 97, 61440, 54, 612.3, 1980"."""
    return tuple(_gpu(line.split(",")) for line in text.splitlines() if line.strip())


def _gpu(cells: list[str]) -> GpuStatus:
    index, busy, mebibytes, celsius, watts, megahertz = map(_number, cells)
    return GpuStatus(
        int(index or 0),
        None if busy is None else busy / 100,
        None if mebibytes is None else mebibytes * 2**20,
        celsius,
        watts,
        megahertz,
    )


def _number(cell: str) -> float | None:
    """ "[N/A]" and "[Not Supported]" are None."""
    try:
        return float(cell)
    except ValueError:
        return None
