"""Fill parameters that may be sharded: every rank copies its own share, and nothing is sent."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter, or this rank's share of it into a sharded one.

    Args:
        parameter: a tensor or DTensor of the same full shape.
        full: the values; every rank passes the same, so that nothing is sent.
    """
    if isinstance(parameter, DTensor):
        full = full.to(parameter.device, parameter.dtype)
        mesh, where = parameter.device_mesh, parameter.placements
        full = distribute_tensor(full, mesh, where, src_data_rank=None)
    parameter.copy_(full)


def held_rows(parameter: Tensor) -> list[int]:
    """Which rows (indices of dimension 0) this rank holds something of, in their order here."""
    rows = torch.arange(parameter.shape[0])
    if isinstance(parameter, DTensor):
        rows = rows.to(parameter.device)
        where = [p if _cuts(p, 0) else Replicate() for p in parameter.placements]
        spread = distribute_tensor(rows, parameter.device_mesh, where, src_data_rank=None)
        rows = spread.to_local()
    return rows.tolist()


@torch.no_grad()
def assign_row(parameter: Tensor, place: int, full: Tensor) -> None:
    """Copy one row into a parameter, or this rank's share of it.

    Args:
        parameter: a tensor or DTensor.
        place: of the row among this rank's `held_rows`.
        full: the whole row, of shape parameter.shape[1:].
    """
    if not isinstance(parameter, DTensor):
        parameter[place] = full
        return
    full = full.to(parameter.device, parameter.dtype)
    where = [_within_row(placement) for placement in parameter.placements]
    share = distribute_tensor(full, parameter.device_mesh, where, src_data_rank=None)
    parameter.to_local()[place] = share.to_local()


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim


def _within_row(placement: Placement) -> Placement:
    """What a placement does to a single row."""
    if not isinstance(placement, Shard) or placement.dim == 0:
        return Replicate()
    return Shard(placement.dim - 1)
