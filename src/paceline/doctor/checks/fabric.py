"""Checks of what joins devices and hosts: PCIe, NVLink, network ports, GPUDirect."""

from paceline.doctor.checks.verdict import (
    NO_GPU,
    Checks,
    Verdict,
    listed,
    ok,
    problem,
    unknown,
    warning,
)
from paceline.doctor.facts import MachineFacts
from paceline.doctor.infiniband import Port
from paceline.machine.interfaces import hca_setting

CHECKS = Checks()
_HDR_GBIT_PER_S = 200
"""InfiniBand HDR, four lanes."""
_ROCE_GBIT_PER_S = 100
_FAR = ("NODE", "SYS")


@CHECKS.add(
    "pcie",
    "generation and lanes of each device's PCIe link",
    "half the lanes halve copies, offload, and all-reduce without NVLink",
)
def _pcie(facts: MachineFacts) -> Verdict:
    links = [(gpu.index, gpu.pcie) for gpu in facts.gpus]
    narrow = [
        at for at, link in links if link.width and link.max_width and link.width < link.max_width
    ]
    if narrow:
        widths = {gpu.pcie.width for gpu in facts.gpus if gpu.index in narrow}
        return problem(
            f"{listed(narrow)} on {min(w for w in widths if w)} lanes instead of 16",
            "reseat the card or its riser; look at the slot's bifurcation in the BIOS.",
        )
    old = [at for at, l in links if l.generation and (l.device_generation or 0) > l.generation]
    if old:
        return warning(
            f"{listed(old)}: the slot does an older PCIe generation than the device",
            "set the slot to its newest generation in the BIOS, if the board can.",
        )
    known = [link for _, link in links if link.generation and link.width]
    if not known:
        return unknown("no device tells its PCIe link") if facts.gpus else NO_GPU
    return ok(f"generation {known[0].generation}, {known[0].width} lanes")


@CHECKS.add(
    "nvlink",
    "NVLinks that are inactive, and NVSwitch's fabric manager",
    "an inactive link slows every ring; without the manager CUDA fails",
)
def _nvlinks(facts: MachineFacts) -> Verdict:
    down = [gpu.index for gpu in facts.gpus if gpu.nvlinks and not all(gpu.nvlinks)]
    if down:
        number = sum(not active for gpu in facts.gpus for active in gpu.nvlinks)
        return problem(
            f"{number} links are inactive on {listed(down)}",
            "reset the devices; if they stay inactive, bridge, baseboard or device is broken.",
        )
    fabric = {gpu.fabric for gpu in facts.gpus} - {None, "Completed"}
    if fabric:
        return problem(
            f"the fabric manager has not joined the devices ({', '.join(map(str, fabric))})",
            "start nvidia-fabricmanager of exactly the driver's version; see its log.",
        )
    links = {len(gpu.nvlinks) for gpu in facts.gpus} - {0}
    if not links:
        return unknown("no NVLink is told of") if facts.gpus else NO_GPU
    return ok(f"{max(links)} links a device, all active")


@CHECKS.add(
    "device-links",
    "the slowest link between two devices",
    "tensor parallelism waits for them in every layer",
)
def _device_links(facts: MachineFacts) -> Verdict:
    if facts.amd_links:
        kinds = ", ".join(sorted(facts.amd_links))
        if "PCIE" in facts.amd_links:
            return warning(f"joined by {kinds}", "keep tensor parallelism within what XGMI joins.")
        return ok(f"joined by {kinds}")
    if len(facts.gpus) == 1:
        return ok("one device")
    if facts.matrix is None:
        return unknown("nvidia-smi topo -m was not there") if facts.gpus else NO_GPU
    joined = facts.matrix.device_links
    if joined in ("nvlink", "nvswitch", "none"):
        return ok(f"joined by {joined}")
    if any("SXM" in gpu.name or gpu.fabric is not None for gpu in facts.gpus):
        return problem(
            f"devices made for NVLink, joined over {joined} only",
            "NVLink is down between them: see the check of NVLinks, and nvidia-fabricmanager.",
        )
    where = "between processors" if joined == "numa" else "over PCIe"
    return warning(
        f"joined {where} at the slowest",
        "keep tensor parallelism small; prefer data parallelism with large buckets.",
    )


@CHECKS.add(
    "ports",
    "state of the InfiniBand and RoCE ports",
    "a port that is down leaves its traffic to the others, or to TCP",
)
def _state(facts: MachineFacts) -> Verdict:
    if facts.ports is None:
        return unknown("it is not known which ports there are")
    if not facts.ports:
        return unknown("no InfiniBand or RoCE port")
    up = [port for port in facts.ports if port.is_active]
    down = [port for port in facts.ports if not port.is_active]
    told = ", ".join(f"{port.name} {port.state}/{port.physical_state}" for port in down[:4])
    waiting = [port.name for port in down if port.physical_state == "LinkUp"]
    if waiting:
        return problem(
            f"linked, but not active: {told}",
            "start the subnet manager (opensm), or ask why it left the port out.",
        )
    if not up:
        return problem(
            f"no port is active: {told}", "plug in the cables, enable the switch's ports."
        )
    if down:
        return warning(f"{len(up)} active; {told}", "cable it, or leave it out by NCCL_IB_HCA.")
    return ok(f"{len(up)} active: " + ", ".join(_told(port) for port in up[:8]))


def _told(port: Port) -> str:
    kind = "RoCE" if port.link_layer == "Ethernet" else port.link_layer
    return f"{port.name} {kind} {port.gbit_per_s or 0:g} Gbit/s"


@CHECKS.add("port-rates", "negotiated rate of the ports", "rings wait for the slowest port")
def _rates(facts: MachineFacts) -> Verdict:
    up = [port for port in facts.ports or () if port.is_active and port.gbit_per_s]
    if not up:
        return unknown("no active InfiniBand or RoCE port")
    fastest = max(port.gbit_per_s or 0 for port in up)
    slow = [port for port in up if (port.gbit_per_s or 0) < fastest]
    if slow:
        cards = facts.system.cards if facts.system else ()
        setting = hca_setting(cards).get("NCCL_IB_HCA") or "=" + ",".join(
            port.name for port in up if port not in slow
        )
        return problem(
            f"{', '.join(map(_told, slow[:4]))} beside {fastest:g} Gbit/s",
            f"a cable or port fell back: replace it; until then NCCL_IB_HCA={setting}.",
        )
    enough = _ROCE_GBIT_PER_S if up[0].link_layer == "Ethernet" else _HDR_GBIT_PER_S
    if facts.gpus and fastest < enough:
        return warning(
            f"{fastest:g} Gbit/s a port", f"{enough} Gbit/s or more is usual for training."
        )
    return ok(f"{len(up)} x {fastest:g} Gbit/s")


@CHECKS.add(
    "near-cards",
    "how far each device is from a network card",
    "traffic through the processor loses GPUDirect and half of the bandwidth",
)
def _near(facts: MachineFacts) -> Verdict:
    matrix = facts.matrix
    if matrix is None or not matrix.cards:
        return unknown("no matrix of devices and network cards") if facts.gpus else NO_GPU
    far = []
    for device in matrix.devices:
        card = matrix.nearest_card(device)
        if card is None or matrix.links[device, card] in _FAR:
            far.append(device.removeprefix("GPU"))
    if far:
        return warning(
            f"{listed(far)} reach a card only through the processor",
            "let NCCL use cards on the same PCIe switch (PIX, PXB); in a VM, pass its topology in "
            "(NCCL_TOPO_FILE).",
        )
    return ok("each device has a card on its own PCIe switch or host bridge")


@CHECKS.add(
    "gpudirect-rdma",
    "what hands device memory to the network cards",
    "without it every message is copied through the host's memory",
)
def _gpudirect(facts: MachineFacts) -> Verdict:
    if not facts.gpus:
        return NO_GPU
    if not [port for port in facts.ports or () if port.is_active]:
        return unknown("no active InfiniBand or RoCE port")
    modules = facts.kernel.modules
    if modules and {"nvidia_peermem", "nv_peer_mem"} & modules:
        return ok("nvidia_peermem is loaded")
    if modules and facts.gpus[0].maker == "amd" and "amdgpu" in modules:
        return ok("amdgpu brings it")
    if facts.kernel.open_driver:
        return ok("the open kernel modules hand over memory by DMA-BUF")
    if facts.nccl and facts.nccl.gdr_enabled and not facts.nccl.gdr_disabled:
        return ok("NCCL's log says that it is used")
    if modules is None:
        return unknown("the kernel's modules are not known")
    return problem(
        "neither nvidia_peermem nor the open kernel modules (DMA-BUF) are loaded",
        "modprobe nvidia_peermem, or install the open kernel modules.",
    )


@CHECKS.add(
    "iommu",
    "the kernel's IOMMU settings",
    "a translating IOMMU sends peer-to-peer traffic through the processor",
)
def _iommu(facts: MachineFacts) -> Verdict:
    line = facts.kernel.command_line
    if line is None:
        return unknown("the kernel's command line is not known")
    if not facts.gpus:
        return NO_GPU
    on = [word for word in line.split() if word in ("intel_iommu=on", "amd_iommu=on")]
    if on and "iommu=pt" not in line:
        return warning(
            f"{on[0]} without iommu=pt",
            "add iommu=pt to the kernel's command line: peer-to-peer goes through the IOMMU else.",
        )
    return ok("doesn't stand between devices")
