"""Checks of NCCL: what its log says it chose, and settings that hold it back."""

from collections.abc import Callable, Mapping

from paceline.doctor.checks.verdict import Checks, Verdict, ok, problem, unknown, warning
from paceline.doctor.facts import MachineFacts
from paceline.doctor.nccl_log import NcclLog

CHECKS = Checks()
_NO_LOG = unknown("no log: run the job with NCCL_DEBUG=INFO and give its output by --nccl-log")


def _of_log(
    name: str, looks_at: str, why: str
) -> Callable[[Callable[[MachineFacts, NcclLog], Verdict]], None]:
    """As `CHECKS.add`, of a function that takes the log too, where there is one."""

    def added(judge: Callable[[MachineFacts, NcclLog], Verdict]) -> None:
        CHECKS.add(name, looks_at, why)(
            lambda facts: _NO_LOG if facts.nccl is None else judge(facts, facts.nccl)
        )

    return added


def _zero(value: str) -> bool:
    return value.strip() == "0"


def _one(value: str) -> bool:
    return value.strip() not in ("", "0")


def _given(_: str) -> bool:
    return True


# Variable -> (which values hurt, what they do). Source: NCCL's page of environment variables,
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
HURTS: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_IB_DISABLE": (_one, "sends everything between hosts over TCP"),
    "NCCL_P2P_DISABLE": (_one, "sends everything between devices through the host's memory"),
    "NCCL_SHM_DISABLE": (_one, "sends through the network what shared memory could carry"),
    "NCCL_NVLS_ENABLE": (_zero, "keeps NVSwitches from adding up"),
    "NCCL_CUMEM_ENABLE": (_zero, "switches off NVLS and user buffers"),
    "NCCL_DMABUF_ENABLE": (_zero, "switches off GPUDirect RDMA by DMA-BUF"),
    "NCCL_NET_GDR_LEVEL": (lambda v: v.upper() in ("0", "LOC"), "switches off GPUDirect RDMA"),
    "NCCL_P2P_LEVEL": (lambda v: v.upper() in ("0", "LOC"), "switches off peer-to-peer"),
    "NCCL_NET": (lambda v: v.lower() == "socket", "sends everything between hosts over TCP"),
    "NCCL_ALGO": (_given, "forces one algorithm for all sizes"),
    "NCCL_PROTO": (
        _given,
        "forces one protocol for all sizes (LL128 can be wrong where unsupported)",
    ),
    "NCCL_MAX_NCHANNELS": (lambda v: v.isdigit() and int(v) < 4, "leaves most links idle"),
    "NCCL_SOCKET_IFNAME": (lambda v: v.strip("=") == "lo", "meets other hosts on the loopback"),
    "NCCL_LAUNCH_MODE": (lambda v: v.upper() == "GROUP", "serialises launches"),
    "CUDA_LAUNCH_BLOCKING": (_one, "makes the host wait for every kernel"),
    "TORCH_NCCL_BLOCKING_WAIT": (_one, "makes the host wait for every collective"),
    "NCCL_BLOCKING_WAIT": (_one, "makes the host wait for every collective"),
    "TORCH_DISTRIBUTED_DEBUG": (lambda v: v.upper() == "DETAIL", "checks every collective twice"),
}


@_of_log(
    "nccl-network",
    "which network NCCL uses between hosts",
    "TCP costs cores, and reaches a part of the port's rate",
)
def _network(facts: MachineFacts, log: NcclLog) -> Verdict:
    sockets, all_net = log.channels("NET/Socket"), log.channels("NET")
    uses_sockets = sockets or (not all_net and "Socket" in log.networks)
    has_ports = any(port.is_active for port in facts.ports or ()) or bool(log.cards)
    told = (
        f"{sockets} of {all_net} channels between hosts over TCP" if all_net else "network Socket"
    )
    if not all_net and not log.networks:
        return unknown("the log says nothing of a network")
    if uses_sockets and has_ports:
        return problem(
            f"{told}, though there are InfiniBand or RoCE ports",
            "unset NCCL_IB_DISABLE and NCCL_NET, pass /dev/infiniband into the container, install "
            "libibverbs.",
        )
    if sockets:
        return warning(
            told, "no RDMA port was seen: expect about 1 GB/s per 10 Gbit/s of the card."
        )
    if not all_net:
        return ok(f"network {', '.join(log.networks)}; one host, nothing is sent over it")
    return ok(f"{all_net} channels over {', '.join(log.networks) or 'RDMA'}")


@_of_log(
    "nccl-peers",
    "whether devices of a host reach each other directly",
    "through the host's memory an all-reduce is several times slower",
)
def _peers(facts: MachineFacts, log: NcclLog) -> Verdict:
    peer, shared = log.channels("P2P"), log.channels("SHM")
    if shared:
        return problem(
            f"{shared} of {peer + shared} channels inside a host go through its memory (SHM)",
            "peer-to-peer is off: look at NCCL_P2P_DISABLE, IOMMU and ACS, and at device-links.",
        )
    if not peer:
        return unknown("the log has no channel inside a host")
    return ok(f"{peer} channels from device to device")


@_of_log(
    "nccl-gdr",
    "whether the cards read device memory themselves (GDRDMA)",
    "without it every message crosses PCIe twice",
)
def _gdr(facts: MachineFacts, log: NcclLog) -> Verdict:
    rdma = log.channels("NET") - log.channels("NET/Socket")
    direct = sum(number for path, number in log.paths.items() if "GDRDMA" in path)
    if not rdma:
        return unknown("no channel goes over RDMA")
    if direct < rdma:
        return problem(
            f"{rdma - direct} of {rdma} RDMA channels copy through the host's memory",
            "see gpudirect-rdma and near-cards; where card and device are far from each other, "
            "try NCCL_NET_GDR_LEVEL=SYS and measure.",
        )
    return ok(f"all {rdma} channels")


@_of_log(
    "nvls", "whether NVSwitches add up (NVLS)", "all-reduces send each byte once instead of twice"
)
def _nvls(facts: MachineFacts, log: NcclLog) -> Verdict:
    if log.nvls is None:
        return unknown("the log doesn't say")
    has_switches = facts.matrix is not None and facts.matrix.device_links == "nvswitch"
    newer = any(gpu.architecture in ("Hopper", "Blackwell") for gpu in facts.gpus)
    if not log.nvls and has_switches and newer:
        return warning(
            "NVSwitches could add up, and don't",
            "start nvidia-fabricmanager; don't set NCCL_CUMEM_ENABLE=0 or NCCL_NVLS_ENABLE=0.",
        )
    return ok("available" if log.nvls else "these devices have none")


@_of_log(
    "nccl-log",
    "versions and warnings in the log",
    "two versions of NCCL hang or crash; warnings name what it gave up",
)
def _said(facts: MachineFacts, log: NcclLog) -> Verdict:
    if len(log.versions) > 1:
        return problem(
            f"ranks run NCCL {' and '.join(log.versions)}", "install one version everywhere."
        )
    if log.warnings:
        return warning(
            f"{len(log.warnings)} warnings, the first: {log.warnings[0][:160]}",
            "look the sentence up in NCCL's troubleshooting pages.",
        )
    return ok(f"NCCL {', '.join(log.versions) or '(version not told)'}, no warnings")


@_of_log(
    "nccl-choice",
    "algorithm and protocol for the largest messages, where the log has them",
    "a forced protocol for small messages halves large ones",
)
def _chosen(facts: MachineFacts, log: NcclLog) -> Verdict:
    if not log.choices:
        return unknown("the log doesn't say: NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,TUNING does")
    largest: dict[str, tuple[int, str]] = {}
    for op, size, algorithm, protocol in log.choices:
        largest[op] = max(largest.get(op, (0, "")), (size, f"{algorithm}/{protocol}"))
    wide = {op: its for op, its in largest.items() if its[0] >= 2**24 and its[1].endswith("/LL")}
    told = ", ".join(f"{op} of {size:,} bytes by {how}" for op, (size, how) in largest.items())
    if wide:
        return warning(told, "LL halves the bandwidth of large messages: unset NCCL_PROTO.")
    return ok(told)


@CHECKS.add(
    "settings",
    "environment variables of NCCL, torch and CUDA that hold them back",
    "they were set once against a fault, and stay in scripts for years",
)
def _settings(facts: MachineFacts) -> Verdict:
    given = facts.environment
    if facts.system is None and not given:
        return unknown("the environment is not known")
    bad = [
        (name, given[name], does)
        for name, (hurts, does) in HURTS.items()
        if name in given and hurts(given[name])
    ]
    if bad:
        return problem(
            "; ".join(f"{name}={value} {does}" for name, value, does in bad),
            f"unset {' '.join(name for name, *_ in bad)}.",
        )
    known = sorted(name for name in given if name.startswith("NCCL_") and name != "NCCL_DEBUG")
    return ok(f"none that holds it back ({', '.join(known) or 'none set'})")
