"""Readings: what a machine says about itself, as texts by name.

Here they come from commands, from files of /proc and /sys and from this process; a folder that
`paceline doctor --save` wrote on another machine (or that a person filled by hand) holds the same
texts as files of the same names. A text that isn't there is not known; nothing here raises for it.
"""

import os
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.files import read_bytes
from paceline.config.outputs import writing
from paceline.doctor import infiniband, software, system

Readings = Mapping[str, str]
"""Text by name."""

COMMANDS = {
    "nvidia-smi.xml": ("nvidia-smi", "-q", "-x"),
    "nvidia-smi-topo.txt": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-nvlink.txt": ("nvidia-smi", "nvlink", "-s"),
    "rocm-smi.json": (
        "rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion",
        "--showtopotype", "--json",
    ),
    "timedatectl.txt": ("timedatectl", "show"),
    "chronyc.txt": ("chronyc", "tracking"),
}  # fmt: skip
FILES = {
    "limits.txt": "/proc/self/limits",
    "meminfo.txt": "/proc/meminfo",
    "modules.txt": "/proc/modules",
    "cmdline.txt": "/proc/cmdline",
    "nvidia-version.txt": "/proc/driver/nvidia/version",
    "cpu.max": "/sys/fs/cgroup/cpu.max",
    "memory.max": "/sys/fs/cgroup/memory.max",
    "governor.txt": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "huge-pages.txt": "/sys/kernel/mm/transparent_hugepage/enabled",
}
ASKED: dict[str, Callable[[], str]] = {
    "infiniband.json": infiniband.ask,
    "software.json": software.ask,
    "system.json": system.ask,
}
GIVEN = ("nccl.log", "ibstat.txt", "storage.json")
"""What only a person or an option brings."""
_NAMES = (*COMMANDS, *FILES, *ASKED, *GIVEN)
_TIMEOUT_S = 30
"""Of a command: nvidia-smi takes seconds on a host of eight devices without persistence."""


def here() -> dict[str, str]:
    """What this machine says."""
    with ThreadPoolExecutor(len(COMMANDS)) as pool:
        said = dict(zip(COMMANDS, pool.map(_output, COMMANDS), strict=True))
    said |= {name: _text(Path(file)) for name, file in FILES.items()}
    said |= {name: ask() for name, ask in ASKED.items()}
    return {name: text for name, text in said.items() if text}


def saved(folder: Path) -> dict[str, str]:
    """What another machine said.

    Raises:
        InputError: the folder has none of the texts, or one can't be read.
    """
    said = {name: text for name in _NAMES if (text := _saved_text(folder / name))}
    if not said:
        raise InputError(
            f"--from {folder} has none of the texts that a machine is judged by: give a folder "
            f"that paceline doctor --save wrote, or one with {', '.join(_NAMES[:3])}, ..."
        )
    return said


def save(readings: Readings, folder: Path) -> None:
    """Write the texts, for `saved` on another machine."""
    with writing(f"--save {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in readings.items():
            (folder / name).write_text(text)


def _output(name: str) -> str:
    """What a command prints; empty where it isn't there, fails or takes too long.

    Of nvidia-smi also what it prints when it fails: that says what is wrong with the driver.
    """
    try:
        done = subprocess.run(COMMANDS[name], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    kept = done.returncode == 0 or name == "nvidia-smi.xml"
    return done.stdout.decode(errors="replace") if kept else ""


def _saved_text(file: Path) -> str:
    if not os.path.lexists(file):
        return ""
    return read_bytes(file, "save it anew with paceline doctor --save").decode(errors="replace")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
