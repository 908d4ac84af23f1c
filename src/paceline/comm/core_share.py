"""Core share: which of a host's its ranks may use, and how many threads each takes.

A launcher may bind each rank to cores of its own (srun, mpirun), to the same few by mistake, or to
none: then all ranks share the host, or what a container leaves them. Only together they know.
"""

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.comm.records import all_gather
from paceline.comm.rendezvous import Ranks
from paceline.machine.discovery import cgroup_quota, usable_cores

# No launcher binds it: it has all cores of the host, or of the container.
_FIRST_PROCESS = 1


@dataclass(frozen=True)
class CoreShare:
    """What a rank has to compute on."""

    ranks: int
    """Those of its host."""
    together: int
    """Cores that they may use between them."""
    own: int
    """Its share of them, at least 1: as many threads pay."""
    of_host: int
    """What a launcher could bind its ranks to: the host's, or what a container has of them."""


def core_share_of(ranks: Ranks) -> CoreShare:
    """Agree on the cores of this rank's host. Every connected rank calls this; one that is alone,
    or connected to nobody, takes it that its neighbours may use what it may use itself."""
    mine = usable_cores()
    neighbours = [mine] * ranks.local_world_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = all_gather([platform.node(), sorted(mine)])
        neighbours = [frozenset(cores) for host, cores in everyone if host == platform.node()]
    return share_cores(mine, neighbours, cgroup_quota(), len(usable_cores(_FIRST_PROCESS)))


def share_cores(
    mine: frozenset[int], neighbours: Sequence[frozenset[int]], quota: int | None, of_host: int
) -> CoreShare:
    """Share cores out: one that several ranks may use counts for each of them in part.

    Args:
        mine: cores this rank may use.
        neighbours: those of each rank of the host, this one among them.
        quota: of the container, in whole cores; None where there is none.
        of_host: cores of the host, or of the container.
    """
    users = Counter(core for cores in neighbours for core in cores)
    together = min(len(users), quota or len(users))
    share = sum(1 / users[core] for core in mine) * together / len(users)
    could = max(min(of_host, quota or of_host), together)
    return CoreShare(len(neighbours), together, max(1, int(share + 1e-6)), could)
