"""Start a run's servers on its nodes and tell every rank where they are.

Server k lives on node k modulo the number of nodes, started by that node's first rank, and listens
at one address only: of the interface that GLOO_SOCKET_IFNAME names, as gloo's own sockets do.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.comm.records import all_gather
from paceline.comm.rendezvous import Ranks, own_address
from paceline.recommender.parameter_server.client import Address
from paceline.recommender.parameter_server.serve import ServerSettings
from paceline.recommender.parameter_server.supervisor import SupervisedServer
from paceline.recommender.parameter_server.tables import Say

_KEY_BYTES = 32


def start_servers(
    settings: ServerSettings, ranks: Ranks, folder: Path, run_checkpoints: Path, say: Say
) -> tuple[list[SupervisedServer], Sequence[Address], bytes]:
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
        kept = [SupervisedServer(replace(common, server=number), say) for number in mine]
    return kept, _addresses({one.settings.server: one.address for one in kept}), key


def servers_of_node(ranks: Ranks, num_servers: int) -> range:
    """The servers that live on this rank's node."""
    num_nodes = max(1, ranks.world_size // ranks.local_world_size)
    return range(ranks.rank // ranks.local_world_size, num_servers, num_nodes)


def _shared_key() -> bytes:
    """Rank 0's random key, on every rank."""
    key = torch.frombuffer(bytearray(secrets.token_bytes(_KEY_BYTES)), dtype=torch.uint8)
    if dist.is_initialized():
        dist.broadcast(key, 0)
    return key.numpy().tobytes()


def _addresses(mine: dict[int, Address]) -> list[Address]:
    known = dict(one for part in all_gather(list(mine.items())) for one in part)
    return [(host, port) for _, (host, port) in sorted(known.items())]
