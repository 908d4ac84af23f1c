"""Context parallelism: the ranks of the "cp" axis share the tokens of every sequence.

Everything but attention works on each token alone, so only attention has to talk. Two ways, each a
core that a network takes as its `attend` argument, and both together:

- `RingAttend` (`ring.py`): keys and values travel around a ring of ranks in blocks while each rank
  works on the block it has; any number of heads, most bytes.
- `UlyssesAttend` (`ulysses.py`): an all-to-all gives each rank whole sequences of fewer heads, and
  another one takes the result back; fewest bytes, at most as many ranks as query heads.
- Both: Ulysses within small neighbourhoods (the ranks that are next to each other, hence on one
  host), the ring over them (USP).

`tiles.py` says which tokens a rank holds and which of them see which; `elastic.local_rounds.py` is
attention to one block on one device. Nothing here knows the network: the cores fit it by their
shape.

It does not share out the batch (that is data parallelism) and keeps no keys for generation.

Papers: ring attention https://arxiv.org/abs/2310.01889, load balance of causal rings
https://arxiv.org/abs/2311.09431, Ulysses https://arxiv.org/abs/2309.14509, both together
https://arxiv.org/abs/2405.07719
"""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.comm.mesh import columns
from paceline.config.errors import InputError
from paceline.parallel.cp.ring import RingAttend
from paceline.parallel.cp.tiles import positions_of
from paceline.parallel.cp.ulysses import AttentionCore, UlyssesAttend

__all__ = [
    "AttentionCore",
    "ContextGroups",
    "RingAttend",
    "UlyssesAttend",
    "context_groups",
    "make_attend",
    "positions_of",
]

_DESCRIPTION = "mesh_cp"
"""Names the axis in traces, as a DeviceMesh's own groups do."""


class ContextGroups(NamedTuple):
    """The two ways a rank of "cp" talks to the others; None where it would be alone."""

    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None


def context_groups(mesh: DeviceMesh, ulysses: int) -> ContextGroups:
    """Cut every group of the axis "cp" into rings and Ulysses groups.

    Collective: all ranks call it together. `ulysses` neighbours exchange heads; the ranks at one
    place of each neighbourhood are a ring.

    Args:
        mesh: has an axis "cp".
        ulysses: how many of the cp ranks exchange heads; cp / ulysses ranks pass keys in a ring.

    Raises:
        InputError: ulysses does not divide cp.
    """
    groups = columns(mesh, "cp")
    cp = len(groups[0])
    if cp % ulysses:
        raise InputError(
            f"ulysses = {ulysses} was given for cp = {cp}, of whose ranks it is a part: choose a "
            "divisor of cp."
        )
    rings = [group[place::ulysses] for group in groups for place in range(ulysses)]
    near = [group[at : at + ulysses] for group in groups for at in range(0, cp, ulysses)]
    return ContextGroups(_subgroup(rings), _subgroup(near))


def _subgroup(all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
    if len(all_ranks[0]) == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration(all_ranks, group_desc=_DESCRIPTION)
    return mine


def make_attend(inner: AttentionCore, groups: ContextGroups) -> AttentionCore:
    """Return the attention core of a rank of "cp".

    Args:
        inner: attends to whole sequences on one device; used where there is no ring.
        groups: from `context_groups`.
    """
    core = inner if groups.ring is None else RingAttend(groups.ring)
    return core if groups.ulysses is None else UlyssesAttend(groups.ulysses, core)
