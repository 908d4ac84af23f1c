"""How the ranks of a run meet, each at its place (`comm.rank_env`).

Ranks meet in a file where Paceline's launcher started them, else in a store at
MASTER_ADDR:MASTER_PORT. It listens at that address alone, and not on all interfaces, as torch's own
would.
"""

import errno
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from paceline.comm.rank_env import Ranks as Ranks
from paceline.comm.rank_env import ranks_from_env as ranks_from_env
from paceline.comm.rank_env import tasks_per_node as tasks_per_node
from paceline.comm.words import await_all, heard, say
from paceline.config.errors import InputError, RunError
from paceline.machine.discovery import interface_to, interfaces
from paceline.machine.host_order import reordered_ranks
from paceline.machine.interfaces import socket_settings

MEETING = "PACELINE_MEETING"
"""The variable in which Paceline's launcher names a folder: its ranks meet in a file there."""
LOOPBACK = "127.0.0.1"

Found = Literal["ready", "done", "refused"]
"""What the first rank finds before a run begins: to train; nothing to do; wrong input."""

_HOST = "paceline/host/{}"
# A script may train several times over one store.
_RUNS = itertools.count()
# Others that were started with the first rank may be on their way for so long. Assumed.
_GOODBYE_S = 60.0
# The first rank's process may still be on its way, and so may its host's name.
_REACH_S, _RESOLVE_S = 300.0, 60.0
_ATTEMPT_S, _RETRY_S = 5.0, 0.2
# From the answer of a store's port until it can be asked: the first attempt's limit.
_OPEN_S = 1.0
# Below the ports that Linux gives out by itself.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
# Of a prime, so that steps of one job and jobs that follow each other differ.
_PORTS_APART = 1009


def connect(
    ranks: Ranks, timeout_s: float = 1800, hosts: Sequence[str] = (), priority: str = "normal"
) -> Ranks:
    """Join the process group of the run, once: gloo for CPU tensors, NCCL for CUDA tensors.

    Args:
        timeout_s: of the meeting, and of collectives until `set_collective_timeout`.
        hosts: in which order they are numbered (`machine.host_order`); none: as the launcher did.
        priority: "high": NCCL's streams come before those that compute.

    Returns:
        this rank's place.
    """
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size == 1 or dist.is_initialized():
        return ranks
    if priority == "high":
        # Of all groups, those that torch makes for meshes too; per group it has to be asked anew.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    store = store_of_run(ranks, timeout_s)
    try:
        if hosts:
            ranks = replace(ranks, rank=_number(ranks, hosts, store))
        _join_group(ranks, store, timeout_s)
    except RuntimeError as error:
        raise lost_before_begin(ranks, error) from error
    return ranks


def store_of_generation(
    ranks: Ranks,
    store: tuple[str, int],
    number: int,
    timeout_s: float,
    is_over: Callable[[], bool],
) -> Store:
    """Where the ranks of a generation of an elastic run meet.

    Args:
        store: host and port of the store that its leader keeps.
        number: of the generation.
        timeout_s: how long an answer may take.
        is_over: whether the generation is over: its leader has closed the store then.

    Raises:
        RunError, RuntimeError: it can't be reached, or the generation is over.
    """
    host, port = store
    _use_interfaces(host, ranks)
    # torch's client tries a closed port for as long as answers may take, and nothing stops it.
    _reach(host, port, ranks.rank, timeout_s, _RESOLVE_S, is_over)
    client = _client_of(host, port, timeout_s, is_over)
    client.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"paceline/generation-{number}", client)


def _client_of(host: str, port: int, timeout_s: float, is_over: Callable[[], bool]) -> TCPStore:
    """In attempts that get longer: within one, torch's client connects again and again where its
    connection is cut because the generation is over."""
    limit_s = _OPEN_S
    while True:
        try:
            limit = timedelta(seconds=limit_s)
            return TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError:
            if is_over() or limit_s > timeout_s:
                raise
        limit_s *= 2


def join_generation(ranks: Ranks, store: Store, timeout_s: float) -> None:
    """Join the process group of a generation of an elastic run.

    Args:
        store: of the generation.
        timeout_s: of the meeting, and of collectives until `set_collective_timeout`.

    Raises:
        RuntimeError: another rank, or the store, was lost.
    """
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size > 1:
        _join_group(ranks, store, timeout_s)


def group_apart(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group of gloo's that stands by itself: no default group has to know of it."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def _join_group(ranks: Ranks, store: Store, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if ranks.device_type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=ranks.device if ranks.device_type == "cuda" else None,
        )
    except RuntimeError:
        if not dist.is_initialized():
            # torch counts groups, also one that failed, and ranks meet under that number: it starts
            # anew with the end of a group, or this rank never meets one that didn't fail.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        raise


def reason_of(error: BaseException) -> str:
    """The first sentence of what a backend or a store says, without its source file."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0])
    return text.partition(". ")[0].rstrip(".")


def lost_before_begin(ranks: Ranks, error: RuntimeError) -> RunError:
    """Another rank, or the store with the first one, was lost while all came together."""
    return RunError(
        f"rank {ranks.rank} on {socket.gethostname()} lost another rank before the run began "
        f"({reason_of(error)}): the one that ended first says why, look whether all run and "
        "whether the links are up, and start them again."
    )


def _number(ranks: Ranks, order: Sequence[str], store: Store) -> int:
    """This rank's number when the hosts stand in an order. All ranks say theirs in the store."""
    store.set(_HOST.format(ranks.rank), socket.gethostname())
    keys = [_HOST.format(rank) for rank in range(ranks.world_size)]
    # Whoever reaches the store may have written there: bytes of any kind are a name.
    return reordered_ranks([store.get(key).decode(errors="replace") for key in keys], order)[
        ranks.rank
    ]


def store_of_run(ranks: Ranks, timeout_s: float = 1800) -> Store:
    """Where the ranks of a run leave word for each other.

    The first rank keeps it, unless the launcher does: then it says so as torchrun does.

    Args:
        timeout_s: how long an answer may take.

    Raises:
        InputError: nothing says where it is.
        RunError: it can't be reached in time, or not be opened.
    """
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.device)
    if (folder := os.environ.get(MEETING)) is not None:
        _use_interfaces(LOOPBACK, ranks)
        # Whoever made the folder removes the file: -1, it doesn't count who has finished.
        store: Store = FileStore(str(Path(folder) / "store"), -1)
    else:
        os.environ.update(rendezvous_address(ranks, os.environ))
        address = os.environ["MASTER_ADDR"]
        _use_interfaces(LOOPBACK if ranks.local_world_size == ranks.world_size else address, ranks)
        store = _store_at(address, int(os.environ["MASTER_PORT"]), ranks)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _store_at(host: str, port: int, ranks: Ranks) -> Store:
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ranks.is_first and not is_kept:
        store = _opened(host, port)
    else:
        _reach(host, port, ranks.rank, _REACH_S, _RESOLVE_S)
        try:
            limit = timedelta(seconds=_REACH_S)
            store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise _unreachable(host, port, ranks.rank, "it does not answer") from error
    # A launcher's store outlives the ranks where torchrun starts all of them again.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"paceline/start-{start}", store)


def _opened(host: str, port: int) -> TCPStore:
    try:
        return hold_store(host, port)
    except socket.gaierror as error:
        raise RunError(
            f"MASTER_ADDR = {host!r} is no name or address that this host knows "
            f"({error.strerror}): set it to the first rank's host."
        ) from None
    except OSError as error:
        raise RunError(
            f"the store of the run can't be opened at {host}:{port} ({error.strerror}): set "
            "MASTER_PORT to a free port of the first rank's host."
        ) from None


def hold_store(host: str, port: int) -> TCPStore:
    """A store that this process keeps, for as long as it is referred to.

    Args:
        host: the address that it listens at; where it is none of this host's own (an address that a
            router translates), it listens on all interfaces.
        port: 0: any free one.

    Raises:
        OSError: the name is unknown, the port is taken, ...
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _reach(
    host: str,
    port: int,
    rank: int,
    reach_s: float,
    resolve_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until somebody listens there.

    torch's client would wait as well, with a warning for each attempt.

    Raises:
        RunError: nobody has, in time or before all is over.
    """
    began = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=_ATTEMPT_S).close()
            return
        except OSError as error:
            limit_s = resolve_s if isinstance(error, socket.gaierror) else reach_s
            waited_s = time.monotonic() - began
            if waited_s > limit_s or is_over():
                reason = f"{error.strerror or error} for {waited_s:.0f} s"
                raise _unreachable(host, port, rank, reason) from None
        time.sleep(_RETRY_S)


def _unreachable(host: str, port: int, rank: int, reason: str) -> RunError:
    return RunError(
        f"rank {rank} on {socket.gethostname()} can't reach the store of the run at {host}:{port} "
        f"({reason}): look whether the first rank runs there, whether the links are up, and "
        "whether MASTER_ADDR and MASTER_PORT are right, and start this one again."
    )


def set_collective_timeout(limit_s: float) -> None:
    """Let collectives of all ranks wait no longer than this, and those of groups made hereafter
    with `collective_timeout`.

    Before a run begins rank 0 may tokenise for minutes, so it is not `connect` that sets it.
    """
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s))


def collective_timeout() -> timedelta | None:
    """How long a collective of all ranks may wait; None where nobody waits (torch's fake group).

    For groups made later: unless they are told, torch gives them 30 minutes, or 10 on NCCL.
    """
    group = distributed_c10d._get_default_group()
    options = group._get_backend(group._device_types[0]).options
    return None if options is None else options._timeout


def word_from_first_rank(found: Found, ranks: Ranks) -> Found:
    """What rank 0 finds, on every rank. Where it leaves after that, it keeps its store until the
    others have heard it.

    Raises:
        RunError: rank 0 ended before it said it.
    """
    if ranks.world_size == 1:
        return found
    store = PrefixStore(f"paceline/run-{next(_RUNS)}", _get_default_store())
    try:
        if ranks.is_first:
            say(store, "found", found)
            if found != "ready":
                await_all(store, "heard/{}", range(1, ranks.world_size), _GOODBYE_S)
            return found
        said: Found = heard(store, "found", Found)  # type: ignore[arg-type]
        say(store, f"heard/{ranks.rank}", True)
    except RuntimeError as error:
        raise lost_before_begin(ranks, error) from error
    return said


def store_of_ranks(ranks: Ranks) -> Store | None:
    """The store that the ranks of a run met over; None: there is one rank."""
    return None if ranks.world_size == 1 else PrefixStore("paceline/ranks", _get_default_store())


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor keeps the meshes of what it worked out, and takes a later one that has the same
        # ranks for them: its groups are gone, and another one may have their names.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def exit_rank(code: int = 0) -> NoReturn:
    """End this process, which was a rank, at once and without the interpreter's end.

    There gloo's threads sometimes abort in torch 2.13 ("terminate called without an active
    exception", pytorch#179291; seen in 6 of 26 runs of a bare DDP script), and the launcher would
    take a finished run for a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rendezvous_address(ranks: Ranks, env: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT: as they are given, else as they follow from Slurm's variables.

    Raises:
        InputError: they are neither given nor follow.
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    nodes = nodes or env.get("SLURM_NODELIST")
    found = {}
    if ranks.local_world_size == ranks.world_size:
        found["MASTER_ADDR"] = LOOPBACK
    elif nodes:
        found["MASTER_ADDR"] = first_host(nodes)
    if "SLURM_JOB_ID" in env:
        number = int(env["SLURM_JOB_ID"]) + _PORTS_APART * int(env.get("SLURM_STEP_ID", "0"))
        found["MASTER_PORT"] = str(_FIRST_PORT + number % _NUM_PORTS)
    found |= {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)}
    for name, what in (("MASTER_ADDR", "the first rank's host"), ("MASTER_PORT", "a free port")):
        if name not in found:
            raise InputError(
                f"{ranks.world_size} ranks were started but {name} does not say where they meet: "
                f"start them with torchrun or srun, or set it to {what}."
            )
    if not found["MASTER_PORT"].isdecimal() or not 0 < int(found["MASTER_PORT"]) < 1 << 16:
        raise InputError(
            f"MASTER_PORT = {found['MASTER_PORT']!r} is no port: set it to a free one of the first "
            "rank's host, 1 to 65535."
        )
    return found


def first_host(nodelist: str) -> str:
    """First host of Slurm's compressed list: "gpu[003-006,9],login1" -> "gpu003"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", first.group() if first else nodelist)


def own_address(ranks: Ranks) -> str:
    """The address at which what this rank serves listens: of the interface that ranks use.

    Raises:
        InputError: the interface has none, or only one that other nodes can't reach.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None and ranks.local_world_size >= ranks.world_size:  # one of a host may be alone
        return LOOPBACK
    if name is not None:
        known = psutil.net_if_addrs()
        for address in known.get(name, []):
            if address.family == socket.AF_INET:
                return address.address
        raise InputError(
            f"GLOO_SOCKET_IFNAME = {name!r} names no interface with an IPv4 address here: use one "
            f"of {', '.join(sorted(known))}."
        )
    with suppress(OSError):
        address_of_host = socket.gethostbyname(socket.gethostname())
        if not address_of_host.startswith("127."):
            return address_of_host
    raise InputError(
        "this host's name leads to no address that other nodes can reach: set GLOO_SOCKET_IFNAME "
        "to the interface that ranks should use."
    )


def _use_interfaces(host: str, ranks: Ranks) -> None:
    """Tell gloo and NCCL which interface leads to a host; a person's own choice stands."""
    if sys.platform != "linux":
        return
    if host == LOOPBACK:
        # One host: its name may not resolve, its outward interface may be firewalled or slow, and
        # nobody outside has to reach a rank.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        return
    chosen = interface_to(host)
    if chosen is not None:  # else they meet at a loopback, as nodes do that one machine plays
        num_hosts = ranks.world_size // ranks.local_world_size
        os.environ.update(socket_settings(chosen, os.environ, interfaces(), num_hosts))
