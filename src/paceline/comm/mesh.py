"""The meshes of ranks: one named axis per way of splitting the work.

The ranks are one row of numbers, cut in three ways, because context parallelism and experts reuse
ranks of the data axes:

- `dense`: ("pp", "dp", "fsdp", "tp"). The ranks that share a sequence (cp) hold the same parameters
  and average their gradients, so they belong to fsdp (or, where nothing is sharded, to dp) here;
- `context`: ("pp", "dp", "fsdp", "cp", "tp"), for exchanges inside attention;
- `experts`: ("pp", "edp", "efsdp", "ep", "tp"): ep is taken from the innermost data ranks, and what
  it leaves of them replicates (edp) or shards (efsdp) each rank's experts.

Under local updates there is one more axis, the outermost: "worker", with dp = 1 in each. Nobody
asks for it in a step, so that a worker's ranks find only each other.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from paceline.comm.rendezvous import Ranks, collective_timeout
from paceline.config.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """The same ranks, cut in three ways."""

    dense: DeviceMesh
    context: DeviceMesh | None
    """None without context parallelism."""
    experts: DeviceMesh | None
    """None without expert parallelism."""
    ranks_per_node: int
    """Neighbours in rank order that share a host."""


def build_meshes(layout: Layout, ranks: Ranks, num_workers: int = 1) -> Meshes | None:
    """Arrange the ranks, neighbours along the axes that communicate most.

    Args:
        layout: of all ranks, or of one worker of local updates.
        ranks: all of them.
        num_workers: that have this layout each.

    Returns:
        the meshes; None for a rank that has nobody to talk to in a step.
    """
    if ranks.world_size == num_workers:
        return None
    planned = layout.num_ranks * num_workers
    assert planned == ranks.world_size, "the launcher starts as many ranks as planned"
    workers = {"worker": num_workers} if num_workers > 1 else {}
    return Meshes(
        dense=_mesh(ranks, **workers, **dense_sizes(layout)),
        context=_mesh(ranks, **workers, **context_sizes(layout)) if layout.cp != 1 else None,
        experts=_mesh(ranks, **workers, **expert_sizes(layout)) if layout.ep != 1 else None,
        ranks_per_node=ranks.local_world_size,
    )


def dense_sizes(layout: Layout) -> dict[str, int]:
    """Axes of what every rank of a stage and tp share holds or shards."""
    dp, fsdp, cp = layout.dp, layout.fsdp, layout.cp
    dp, fsdp = (dp, fsdp * cp) if fsdp != 1 else (dp * cp, 1)
    return {"pp": layout.pp, "dp": dp, "fsdp": fsdp, "tp": layout.tp}


def context_sizes(layout: Layout) -> dict[str, int]:
    """Axes of the sequence exchange."""
    return {axis: getattr(layout, axis) for axis in ("pp", "dp", "fsdp", "cp", "tp")}


def expert_sizes(layout: Layout) -> dict[str, int]:
    """Axes of the experts: ep first uses up fsdp x cp, then dp."""
    dense, ep = dense_sizes(layout), layout.ep
    sharded = layout.fsdp != 1
    inner = layout.fsdp * layout.cp
    outer = layout.dp
    if ep <= inner:
        left_inner, left_outer = inner // ep, outer
    else:
        left_inner, left_outer = 1, outer * inner // ep
    edp, efsdp = (left_outer, left_inner) if sharded else (left_outer * left_inner, 1)
    return {"pp": dense["pp"], "edp": edp, "efsdp": efsdp, "ep": ep, "tp": dense["tp"]}


def _mesh(ranks: Ranks, **sizes: int) -> DeviceMesh:
    mesh = init_device_mesh(ranks.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    limit = collective_timeout()
    if limit is not None:
        for axis in sizes:
            distributed_c10d._set_pg_timeout(limit, mesh.get_group(axis))
    return mesh


@dataclass(frozen=True)
class WorkerGroups:
    """Whom a rank finds under local updates. Workers stand along dp."""

    inside: dist.ProcessGroup | None
    """The ranks of its worker; None: it is alone there."""
    across: dist.ProcessGroup | None
    """Those at its place in each worker; None: no other worker is left."""
    in_rounds: dist.ProcessGroup | None
    """The same once more, for what travels beside whatever else the ranks say to each other."""

    @staticmethod
    def of(layout: Layout) -> "WorkerGroups":
        """Of a layout of all ranks, without a pipeline; every rank calls this."""
        workers = torch.arange(layout.num_ranks).view(layout.dp, -1)
        return WorkerGroups(_group(workers), _group(workers.T, "dp"), _group(workers.T, "dp"))


def _group(members: Tensor, axis: str | None = None) -> dist.ProcessGroup | None:
    """This rank's of several groups: (groups, ranks); None: it would be alone. The axis names it in
    traces, as a DeviceMesh's own groups are named."""
    if members.shape[1] == 1:
        return None
    name = None if axis is None else f"mesh_{axis}"
    limit = collective_timeout()
    group, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=limit, group_desc=name)
    return group


def columns(mesh: DeviceMesh, axis: str) -> list[list[int]]:
    """The groups of global ranks along an axis, all of them, in one order on every rank."""
    names = mesh.mesh_dim_names
    assert names is not None
    whole = torch.as_tensor(mesh.mesh).movedim(names.index(axis), -1)
    return whole.reshape(-1, whole.shape[-1]).tolist()


def num_shards(parameter: Tensor) -> int:
    """In how many different pieces the ranks of a parameter's mesh hold it."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
