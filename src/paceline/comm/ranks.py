"""Who this process is among the ranks of a run, and how they meet.

A rank learns its place from the environment that a launcher set: torchrun (and Paceline's own
launcher, which is torchrun's agent) or Slurm's srun. A process without such an environment is
alone.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from paceline.comm.fabric.interfaces import socket_settings
from paceline.comm.fabric.order import numbers
from paceline.comm.topology import interface_to, interfaces
from paceline.config.errors import RunError

_HOST = "paceline/host/{}"


@dataclass(frozen=True)
class Ranks:
    """This process's place: rank `rank` of `world_size`, `local_rank` of those on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device_type: str = "cpu"

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        if self.device_type == "cuda":
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks and writes for the run."""
        return self.rank == 0


def given_ranks(device_type: str) -> Ranks | None:
    """The place that a launcher gave this process, None where it was started by hand."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return Ranks(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            device_type=device_type,
        )
    if "SLURM_STEP_NUM_TASKS" in env:  # set by srun only, not by sbatch or salloc
        return _given_by_slurm(env, device_type)
    return None


def _given_by_slurm(env: Mapping[str, str], device_type: str) -> Ranks:
    """Ranks of a node follow each other, however srun dealt its tasks out (--distribution=cyclic):
    a layout's inner axes are neighbours in rank order."""
    counts = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    node, local_rank = int(env["SLURM_NODEID"]), int(env["SLURM_LOCALID"])
    return Ranks(
        rank=sum(counts[:node]) + local_rank,
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=local_rank,
        local_world_size=counts[node],
        device_type=device_type,
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's compressed list: "4(x2),3" -> [4, 4, 3]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def connect(
    ranks: Ranks, timeout_s: float = 1800, hosts: Sequence[str] = (), priority: str = "normal"
) -> Ranks:
    """Join the process group of the run, once: gloo for CPU tensors, NCCL for CUDA tensors.

    Args:
        ranks: the launcher's place.
        timeout_s: of the meeting, and of collectives until `limit_waits`.
        hosts: in which order they are numbered (`comm.fabric.order`); none: as the launcher did.
        priority: "high": NCCL's streams come before those that compute.

    Returns:
        this rank's place.
    """
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size == 1 or dist.is_initialized():
        return ranks
    _fill_in_rendezvous(ranks)
    if priority == "high":
        # Of all groups, those that torch makes for meshes too; per group it has to be asked anew.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    timeout, store = timedelta(seconds=timeout_s), None
    if hosts:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
        store.set_timeout(timeout)
        ranks = replace(ranks, rank=_number(ranks, hosts, store))
    backend = "cpu:gloo,cuda:nccl" if ranks.device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=ranks.device if ranks.device_type == "cuda" else None,
    )
    return ranks


def _number(ranks: Ranks, order: Sequence[str], store: Store) -> int:
    """This rank's number when the hosts stand in an order. All ranks say theirs in the store."""
    store.set(_HOST.format(ranks.rank), socket.gethostname())
    keys = [_HOST.format(rank) for rank in range(ranks.world_size)]
    return numbers([store.get(key).decode() for key in keys], order)[ranks.rank]


def store_of_run(ranks: Ranks, timeout_s: float = 1800) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, for ranks that share no process group.

    The first rank keeps it, unless the launcher does: then it says so as torchrun does.

    Raises:
        RunError: it can't be reached in time.
    """
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.device)
    _fill_in_rendezvous(ranks)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            is_master=ranks.is_first and not is_kept,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RunError(
            f"rank {ranks.rank} can't reach the store of the run at {host}:{port}: look whether "
            "the first rank runs and whether the links are up, and start this one again."
        ) from error
    # A launcher's store outlives the ranks where torchrun starts all of them again.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"paceline/start-{start}", store)


def limit_waits(limit_s: float) -> None:
    """Let collectives of all ranks wait no longer than this, and those of groups made hereafter
    with `wait_limit`.

    Before a run begins rank 0 may tokenise for minutes, so it is not `connect` that sets it.
    """
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s))


def wait_limit() -> timedelta | None:
    """How long a collective of all ranks may wait; None where nobody waits (torch's fake group).

    For groups made later: unless they are told, torch gives them 30 minutes, or 10 on NCCL.
    """
    group = distributed_c10d._get_default_group()
    options = group._get_backend(group._device_types[0]).options
    return None if options is None else options._timeout


def from_first(value: bool, ranks: Ranks, store: Store | None = None) -> bool:
    """What rank 0 says, on every rank.

    Args:
        value: rank 0's.
        ranks: this rank's place.
        store: of ranks that share no process group.

    Raises:
        RunError: rank 0 ended before it said it.
    """
    if store is not None:
        return _said_in(store, value, ranks)
    if not dist.is_initialized():
        return value
    answer = [value]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    return answer[0]


def _said_in(store: Store, value: bool, ranks: Ranks) -> bool:
    key = "paceline/first_says"
    if ranks.is_first:
        store.set(key, str(value))
        return value
    try:
        return store.get(key) == b"True"
    except RuntimeError as error:
        raise RunError(
            f"the first rank ended before the run began, or can't be reached (rank {ranks.rank}): "
            "it says why; start this one again with it."
        ) from error


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int = 0) -> NoReturn:
    """End this process, which was a rank, at once and without the interpreter's end.

    There gloo's threads sometimes abort in torch 2.13 ("terminate called without an active
    exception", pytorch#179291; seen in 6 of 26 runs of a bare DDP script), and the launcher would
    take a finished run for a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fill_in_rendezvous(ranks: Ranks) -> None:
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_STEP_NODELIST", socket.gethostname())
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        os.environ["MASTER_ADDR"] = first_host(nodes)
        os.environ["MASTER_PORT"] = str(20000 + job % 20000)
    if sys.platform != "linux":
        return
    if ranks.local_world_size == ranks.world_size:
        # One host: its name may not resolve, and its outward interface may be firewalled or slow.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    chosen = interface_to(os.environ["MASTER_ADDR"])
    if chosen is not None:  # else they meet at a loopback, as nodes do that one machine plays
        num_hosts = ranks.world_size // ranks.local_world_size
        os.environ.update(socket_settings(chosen, os.environ, interfaces(), num_hosts))


def first_host(nodelist: str) -> str:
    """First host of Slurm's compressed list: "gpu[003-006,9],login1" -> "gpu003"."""
    prefix, bracket, rest = nodelist.partition("[")
    if not bracket or "," in prefix:
        return nodelist.split(",")[0]
    number = re.match(r"\d+", rest)
    return prefix + (number.group() if number else "")
