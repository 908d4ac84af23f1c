"""What NCCL chose, read from the log that NCCL_DEBUG=INFO makes.

Lines that are understood (of NCCL 2.4 to 2.28; the words around them differ between versions):

    NCCL version 2.27.3+cuda12.9
    NCCL_IB_DISABLE set by environment to 1.
    NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    Using network IB
    GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 8 > 5)
    NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
    Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
    AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}

The last one needs NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,TUNING. Paths between ranks of one host are
P2P (NVLink or PCIe, from device to device) or SHM (through the host's memory); NET leads out.

Source: NCCL's src/transport/{p2p,shm,net,net_ib}.cc, src/init.cc, src/enqueue.cc.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: \S+ -> \S+ (?:\[\w+\] )?via (\S.*?)(?: comm .*)?$")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (.+?)\.?$")
_CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
_PATTERNS = {
    "version": re.compile(r"NCCL version (\d+\.\d+\.\d+)"),
    "network": re.compile(r"Using network (.+?)\s*$"),
    "gdr": re.compile(r"GPU Direct RDMA (Enabled|Disabled)"),
    "nvls": re.compile(r"NVLS multicast support is (not )?available"),
    "card": re.compile(r"\[\d+\]([\w.-]+:\d+)/(?:IB|RoCE)"),
    "warning": re.compile(r"NCCL WARN (.+?)\s*$"),
}


@dataclass(frozen=True)
class NcclLog:
    """What one job's ranks said."""

    versions: tuple[str, ...]
    networks: tuple[str, ...]
    """IB, Socket, or a plugin's name."""
    cards: tuple[str, ...]
    """Ports that are used, as mlx5_0:1."""
    paths: dict[str, int]
    """How many channels go by P2P/CUMEM, SHM/direct, NET/IB, NET/IB/GDRDMA, NET/Socket."""
    gdr_enabled: int
    gdr_disabled: int
    """Lines that say so, of pairs of device and card."""
    nvls: bool | None
    """Whether NVSwitches add up (multicast); None: not told."""
    settings: dict[str, str]
    choices: tuple[tuple[str, int, str, str], ...]
    """(collective, bytes, algorithm, protocol)."""
    warnings: tuple[str, ...]
    """Each text once."""

    def channels(self, kind: str) -> int:
        """How many channels go by P2P, SHM, NET, NET/IB, NET/Socket."""
        return sum(
            number for path, number in self.paths.items() if f"{path}/".startswith(f"{kind}/")
        )


def parse(text: str) -> NcclLog:
    """Read a log, of one rank or of all.

    Raises:
        ValueError: nothing in it is of NCCL.
    """
    if "NCCL" not in text:
        raise ValueError("there is no line of NCCL in it; set NCCL_DEBUG=INFO for the job")
    said: dict[str, list[str]] = {name: [] for name in _PATTERNS}
    paths: Counter[str] = Counter()
    settings: dict[str, str] = {}
    choices: dict[tuple[str, int, str, str], None] = {}
    for line in text.splitlines():
        if channel := _CHANNEL.search(line):
            paths[_path(channel[1])] += 1
        elif setting := _SETTING.search(line):
            settings[setting[1]] = setting[2].strip()
        elif choice := _CHOICE.search(line):
            choices[choice[1], int(choice[2]), choice[3].upper(), choice[4].upper()] = None
        for name, pattern in _PATTERNS.items():
            said[name] += pattern.findall(line)
    return NcclLog(
        versions=_once(said["version"]),
        networks=_once(said["network"]),
        cards=_once(said["card"]),
        paths=dict(paths),
        gdr_enabled=said["gdr"].count("Enabled"),
        gdr_disabled=said["gdr"].count("Disabled"),
        nvls=None if not said["nvls"] else "" in said["nvls"],
        settings=settings,
        choices=tuple(choices),
        warnings=_once(said["warning"]),
    )


def _path(text: str) -> str:
    """Without the number of the card: NET/IB/0/GDRDMA is NET/IB/GDRDMA."""
    parts = text.partition("(")[0].split("/")
    return "/".join(part for part in parts if not part.isdigit())


def _once(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found))
