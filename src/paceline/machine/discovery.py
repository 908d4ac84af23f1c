"""Discover this machine: its devices, cores and memory, as a concrete Cluster of one node; what
joins its devices and leads out of it, as a Host; and the interface that reaches other hosts.

These are thin: what they read is understood by `machine`.
"""

import ctypes
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.config.hardware import Cluster, Device, Figure, recognise
from paceline.config.host import Host
from paceline.machine import nvidia_smi, sysfs
from paceline.machine.interfaces import interface_with

# More gloo ranks than this on one host spend their time in each other's way.
_MOST_CPU_RANKS = 8


def this_machine() -> Cluster:
    """The Cluster that "auto" stands for: every CUDA device, or else gloo ranks over the cores."""
    num_gpus = _num_gpus()
    if num_gpus:
        return Cluster(device=_cuda_device(), devices_per_node=num_gpus, num_nodes=1)
    num_ranks = num_cpu_ranks(num_cores())
    return Cluster(device=_cpu_device(num_ranks), devices_per_node=num_ranks, num_nodes=1)


def _num_gpus() -> int:
    """Devices that torch sees. Without a driver it sees none: then it isn't imported, which takes
    longer than the rest of a plan."""
    if "torch" not in sys.modules and not _has_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_driver() -> bool:
    """Whether CUDA's library can be loaded, or a device of ROCm is there."""
    if sys.platform != "linux":
        return True  # nobody knows: torch is asked
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()


def this_host() -> Host:
    """What `nvidia-smi` and /sys tell; where there is neither, what is left."""
    cards = sysfs.cards()
    matrix = _device_matrix()
    if matrix is None:
        return Host(numa_nodes=sysfs.numa_nodes(), cards=cards)
    nearest = (matrix.nearest_card(device) for device in matrix.devices)
    return Host(
        numa_nodes=sysfs.numa_nodes(),
        device_links=matrix.device_links,
        cards=cards,
        device_cards=tuple(name for name in nearest if name is not None),
    )


def _device_matrix() -> nvidia_smi.LinkMatrix | None:
    """Of `nvidia-smi topo -m`, None where there is no such program or no device."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True
        )
        return nvidia_smi.parse(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def interfaces() -> dict[str, list[str]]:
    """Addresses of this host's interfaces that are up, by name."""
    families = (socket.AF_INET, socket.AF_INET6)
    stats = psutil.net_if_stats()
    return {
        name: [each.address.split("%")[0] for each in of_it if each.family in families]
        for name, of_it in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
    }


def interface_to(host: str) -> str | None:
    """The interface through which the kernel would send to a host; nothing is sent.

    Returns:
        None where the name leads nowhere, or to this host's loopback.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError:
        return None
    return interface_with(own, interfaces())


def num_cpu_ranks(cores: int) -> int:
    """The largest power of two within the cores (batches are powers of two), at most 8."""
    most = max(1, min(cores, _MOST_CPU_RANKS))
    return 1 << (most.bit_length() - 1)


def num_cores() -> int:
    """Cores this process may use: its affinity mask, or a container's quota where that is less."""
    usable = len(usable_cores())
    return min(usable, cgroup_quota() or usable)


def usable_cores(pid: int = 0) -> frozenset[int]:
    """The affinity mask of a process, by default this one; where it can't be read, all cores."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            return frozenset(os.sched_getaffinity(pid))
    return frozenset(range(os.cpu_count() or 1))


def cgroup_quota() -> int | None:
    """Whole cores of a cgroup-v2 CPU quota, None where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def _cpu_device(num_ranks: int) -> Device:
    memory = psutil.virtual_memory().total / num_ranks
    return Device(
        name=_cpu_name(),
        kind="cpu",
        memory_bytes=Figure(
            value=memory, origin="measured", source="this host's memory, shared by its ranks"
        ),
        precisions=("fp64", "fp32", "bf16") if _cpu_has_bf16() else ("fp64", "fp32"),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_has_bf16() -> bool:
    """Whether bf16 products are native: elsewhere torch emulates them, slower than fp32."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in info for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def _cuda_device() -> Device:
    """Ask a short-lived process, so that this one never opens a context on a device.

    The launcher that asks lives as long as its ranks; a context of its own would hold hundreds of
    megabytes of device 0 all the while.
    """
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        name, memory_bytes, has_bf16 = pool.submit(_query_cuda).result()
    known = recognise(name)
    if known is not None:
        return known
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=Figure(value=memory_bytes, origin="measured", source="the device's driver"),
        precisions=("fp64", "fp32", "fp16", *(["bf16"] if has_bf16 else [])),
    )


def _query_cuda() -> tuple[str, float, bool]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return properties.name, float(properties.total_memory), has_bf16
