"""Fill parameters that may be sharded: every rank copies its own share, and nothing is sent."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.local_part import is_shared
from paceline.config.finetune import narrow_bytes
from paceline.models import nf4

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class Streams:
    """A stream of random numbers for each name: no value depends on what else a rank has."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    def of(self, name: str) -> torch.Generator:
        """Start the stream of a name."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "big"))


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter, or this rank's share of it into a sharded one.

    Args:
        parameter: a tensor or DTensor of the same full shape; of bytes: a matrix of so many
            outputs in 4 bits (`nf4`), into which the values are rounded.
        full: the values; every rank passes the same, so that nothing is sent.
    """
    if parameter.dtype == torch.uint8:
        plain = narrow_bytes(full.shape[1], double=False)
        full = nf4.packed(full, double=parameter.shape[1] != plain)
    if is_shared(parameter):
        full = _share(full.to(parameter.dtype), parameter, parameter.placements)
    parameter.copy_(full)


def held_rows(parameter: Tensor) -> list[int]:
    """Which rows (indices of dimension 0) this rank holds something of, in their order here."""
    rows = torch.arange(parameter.shape[0])
    if is_shared(parameter):
        from torch.distributed.tensor import Replicate

        where = [p if p.is_shard(0) else Replicate() for p in parameter.placements]
        rows = _share(rows, parameter, where).to_local()
    return rows.tolist()


@torch.no_grad()
def assign_row(parameter: Tensor, place: int, full: Tensor) -> None:
    """Copy one row into a parameter, or this rank's share of it.

    Args:
        parameter: a tensor or DTensor.
        place: of the row among this rank's `held_rows`.
        full: the whole row, of shape parameter.shape[1:].
    """
    if not is_shared(parameter):
        parameter[place] = full
        return
    where = [_within_row(placement) for placement in parameter.placements]
    share = _share(full.to(parameter.dtype), parameter, where)
    parameter.to_local()[place] = share.to_local()


def _share(full: Tensor, parameter: "DTensor", where: "Sequence[Placement]") -> "DTensor":
    """This rank's share of a tensor over a parameter's mesh."""
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh
    return distribute_tensor(full.to(parameter.device), mesh, where, src_data_rank=None)


def _within_row(placement: "Placement") -> "Placement":
    """What a placement does to a single row."""
    from torch.distributed.tensor import Replicate, Shard

    if not isinstance(placement, Shard) or placement.dim == 0:
        return Replicate()
    return Shard(placement.dim - 1)
