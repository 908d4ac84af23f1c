"""Start a run's servers on its nodes and tell every rank where they are.

Server k lives on node k modulo the number of nodes, started by that node's first rank, and listens
at one address only: of the interface that GLOO_SOCKET_IFNAME names, as gloo's own sockets do.
"""

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from paceline.comm.parameter_server.client import Address
from paceline.comm.parameter_server.keeper import Kept
from paceline.comm.parameter_server.serve import Settings
from paceline.comm.parameter_server.tables import Say
from paceline.comm.ranks import Ranks
from paceline.config.errors import InputError

_KEY_BYTES = 32


def start_servers(
    settings: Settings, ranks: Ranks, folder: Path, run_checkpoints: Path, say: Say
) -> tuple[list[Kept], Sequence[Address], bytes]:
    """Start the servers of this rank's node, if it is the first there.

    Args:
        settings: of all servers; number, address, key and folders are filled in here.
        ranks: this process's place.

    Returns:
        the servers kept by this rank, the addresses of all, the key.
    """
    key = _shared_key()
    kept = []
    if ranks.local_rank == 0:
        common = replace(
            settings,
            host=own_address(ranks),
            key=key.hex(),
            folder=str(folder),
            run_checkpoints=str(run_checkpoints),
        )
        mine = servers_of_node(ranks, settings.num_servers)
        kept = [Kept(replace(common, server=number), say) for number in mine]
    return kept, _addresses({one.settings.server: one.address for one in kept}), key


def servers_of_node(ranks: Ranks, num_servers: int) -> range:
    """The servers that live on this rank's node."""
    num_nodes = max(1, ranks.world_size // ranks.local_world_size)
    return range(ranks.rank // ranks.local_world_size, num_servers, num_nodes)


def own_address(ranks: Ranks) -> str:
    """The address of this node's servers.

    Raises:
        InputError: the interface has none, or only one that other nodes can't reach.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None and ranks.local_world_size == ranks.world_size:
        return "127.0.0.1"
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
        "to the interface that the servers of the tables should use."
    )


def _shared_key() -> bytes:
    """Rank 0's random key, on every rank."""
    key = torch.frombuffer(bytearray(secrets.token_bytes(_KEY_BYTES)), dtype=torch.uint8)
    if dist.is_initialized():
        dist.broadcast(key, 0)
    return key.numpy().tobytes()


def _addresses(mine: dict[int, Address]) -> list[Address]:
    everyone = [mine]
    if dist.is_initialized():
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    known = {number: address for part in everyone for number, address in part.items()}
    return [known[number] for number in sorted(known)]
