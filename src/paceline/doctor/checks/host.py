"""Checks of the host: cores, limits, memory, clock, storage."""

from paceline.doctor.checks.verdict import Checks, Verdict, ok, problem, unknown, warning
from paceline.doctor.facts import MachineFacts

CHECKS = Checks()
_GIB = 2**30
_LEAST_CORES_PER_DEVICE = 4
"""A rank's own thread, its backward pass, and two loader processes. Assumed."""
_LEAST_SHM_BYTES = _GIB
_LEAST_FILES = 4096
_LEAST_PROCESSES = 4096
_LEAST_FREE_BYTES = 20 * _GIB
_SLOW_WRITE = 200e6
_VERY_SLOW_WRITE = 50e6
"""Bytes a second. A checkpoint of 7 B parameters with optimizer states is about 80 GB."""
_UNKNOWN = unknown("the host's own facts are not there")


@CHECKS.add(
    "cores",
    "cores against ranks and their threads",
    "ranks that share cores launch late and load late",
)
def _cores(facts: MachineFacts) -> Verdict:
    if facts.system is None:
        return _UNKNOWN
    cores, ranks = facts.system.cores, facts.num_ranks
    if ranks is None:
        return ok(f"{cores} cores, no devices to feed")
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) * ranks > cores:
        return warning(
            f"{ranks} ranks of {threads} threads on {cores} cores",
            f"OMP_NUM_THREADS={max(1, cores // ranks)}.",
        )
    if facts.gpus and cores < _LEAST_CORES_PER_DEVICE * ranks:
        return warning(
            f"{cores} cores for {ranks} ranks",
            f"ask for {_LEAST_CORES_PER_DEVICE} a rank (--cpus-per-task, a larger container).",
        )
    return ok(f"{cores} cores for {ranks} ranks")


@CHECKS.add(
    "cpu-quota",
    "CPU time that the container may take",
    "a quota stops every thread of a rank at once, and with it all ranks",
)
def _quota(facts: MachineFacts) -> Verdict:
    quota = facts.kernel.quota_cores
    if quota is None or facts.system is None:
        return unknown("no CPU group was seen")
    if quota < facts.system.cores:
        return warning(
            f"{quota:g} of {facts.system.cores} cores' time",
            "ask for whole cores (a cpuset) instead: a quota stops all threads for the rest of "
            "each 100 ms.",
        )
    return ok("none, or as many as there are cores")


@CHECKS.add(
    "numa-binding",
    "NUMA nodes, and the cores that ranks may run on",
    "a rank on the wrong processor reaches its device through the other one",
)
def _binding(facts: MachineFacts) -> Verdict:
    here = facts.system
    if here is None:
        return _UNKNOWN
    if here.numa_nodes < 2:
        return ok("one NUMA node")
    if here.cores == here.host_cores and (facts.num_ranks or 0) > 1:
        return warning(
            f"{here.numa_nodes} NUMA nodes, and ranks may run on all {here.cores} cores",
            "start ranks bound: torchrun --numa-binding=node, srun --cpu-bind=cores, or numactl.",
        )
    return ok(f"{here.numa_nodes} NUMA nodes; this process is bound to {here.cores} cores")


@CHECKS.add(
    "governor",
    "the cores' frequency governor",
    "powersave wakes cores slowly: launches and gloo are late",
)
def _governor(facts: MachineFacts) -> Verdict:
    governor = facts.kernel.governor
    if governor is None:
        return unknown("the host doesn't tell (most virtual ones don't)")
    if governor in ("performance", "schedutil"):
        return ok(governor)
    return warning(governor, "cpupower frequency-set -g performance.")


@CHECKS.add(
    "shared-memory",
    "size of /dev/shm",
    "NCCL and loader processes pass data through it; docker gives 64 MiB",
)
def _shared_memory(facts: MachineFacts) -> Verdict:
    size = facts.system.shm_bytes if facts.system else None
    if size is None:
        return unknown("there is no /dev/shm")
    told = f"/dev/shm has {size / _GIB:.3g} GiB"
    if size < _LEAST_SHM_BYTES:
        return problem(
            told, "docker run --ipc=host or --shm-size=16g; mount -o remount,size=16g /dev/shm."
        )
    return ok(told)


@CHECKS.add("locked-memory", "limit of pinned memory", "RDMA can't register its buffers")
def _memlock(facts: MachineFacts) -> Verdict:
    limit = facts.kernel.limits.get("locked memory")
    if limit is None:
        return unknown("limits are not known")
    told = "unlimited" if limit == float("inf") else f"{limit / 2**20:g} MiB"
    if limit < float("inf") and any(port.is_active for port in facts.ports or ()):
        return problem(
            f"{told}, and RDMA pins its buffers",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf, --ulimit memlock=-1).",
        )
    return ok(told)


@CHECKS.add(
    "open-files", "limit of open files", "each pair of ranks takes a few, each shard of data one"
)
def _files(facts: MachineFacts) -> Verdict:
    return _limit(facts, "open files", _LEAST_FILES, "ulimit -n 65536.")


@CHECKS.add(
    "processes", "limit of processes and threads", "ranks, loaders and their threads count together"
)
def _processes(facts: MachineFacts) -> Verdict:
    return _limit(facts, "processes", _LEAST_PROCESSES, "ulimit -u 65536.")


def _limit(facts: MachineFacts, name: str, least: int, fix: str) -> Verdict:
    limit = facts.kernel.limits.get(name)
    if limit is None:
        return unknown("limits are not known")
    told = "unlimited" if limit == float("inf") else f"{limit:,.0f}"
    return ok(told) if limit >= least else warning(told, fix)


@CHECKS.add(
    "memory", "free memory, swap, reserved huge pages", "a rank that swaps holds up all others"
)
def _memory(facts: MachineFacts) -> Verdict:
    said = facts.kernel.memory_bytes
    if "MemTotal" not in said:
        return unknown("the host's memory is not known")
    total, free = said["MemTotal"], said.get("MemAvailable", said["MemTotal"])
    swapped = said.get("SwapTotal", 0) - said.get("SwapFree", 0)
    told = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB are free"
    limit = facts.kernel.group_memory_bytes
    if limit is not None and limit < total:
        told += f"; this container may take {limit / _GIB:.0f}"
    if swapped > 0.01 * total:
        return warning(
            f"{told}; {swapped / _GIB:.1f} GiB are swapped out",
            "end what fills the memory, then swapoff -a: a rank that is swapped in stops all.",
        )
    held = said.get("HugePages_Free", 0) * said.get("Hugepagesize", 0)
    if held > 0.1 * total:
        return warning(
            f"{told}; {held / _GIB:.0f} GiB are set aside as huge pages that nobody uses",
            "vm.nr_hugepages=0.",
        )
    return ok(told)


@CHECKS.add(
    "huge-pages",
    "transparent huge pages",
    "CPU ranks and offloaded states touch gigabytes in 4 KiB pages else",
)
def _huge_pages(facts: MachineFacts) -> Verdict:
    chosen = facts.kernel.huge_pages
    if chosen is None:
        return unknown("the kernel doesn't tell")
    if chosen == "never":
        return warning(chosen, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled.")
    return ok(chosen)


@CHECKS.add(
    "clock",
    "synchronisation of the host's clock",
    "traces and logs of several hosts can't be laid side by side else",
)
def _clock(facts: MachineFacts) -> Verdict:
    synchronised = facts.kernel.clock_synchronised
    if synchronised is None:
        return unknown("neither timedatectl nor chronyc answers")
    if not synchronised:
        return warning("not synchronised", "start chronyd or systemd-timesyncd on every host.")
    return ok("synchronised")


@CHECKS.add("disk-space", "free space in the folder", "a checkpoint that doesn't fit is none")
def _space(facts: MachineFacts) -> Verdict:
    disk = facts.storage
    if disk is None:
        return unknown("no folder was looked at")
    told = f"{disk.free_bytes / _GIB:.0f} GiB are free in {disk.folder}"
    if disk.free_bytes < _LEAST_FREE_BYTES:
        return warning(told, "make room, or keep fewer checkpoints (checkpoint.keep).")
    return ok(told)


@CHECKS.add(
    "storage-speed",
    "writing and reading a file of at most 256 MiB",
    "slow checkpoints and slow data are waited for",
)
def _speed(facts: MachineFacts) -> Verdict:
    disk = facts.storage
    if disk is None or disk.write_bytes_per_s is None or disk.read_bytes_per_s is None:
        return unknown("no folder was measured")
    told = (
        f"writes {disk.write_bytes_per_s / 1e6:,.0f} MB/s, "
        f"reads {disk.read_bytes_per_s / 1e6:,.0f} MB/s in {disk.folder}"
    )
    fix = "put checkpoints and data on a local NVMe drive or a parallel file system."
    if disk.write_bytes_per_s < _VERY_SLOW_WRITE:
        return problem(told, fix)
    return warning(told, fix) if disk.write_bytes_per_s < _SLOW_WRITE else ok(told)


@CHECKS.add("container", "whether this is a container", "its limits are not the host's")
def _container(facts: MachineFacts) -> Verdict:
    here = facts.system
    if here is None:
        return _UNKNOWN
    if here.container is None:
        return ok("none")
    return ok(f"{here.container}: its own limits count, see quota, memory and shared-memory")
