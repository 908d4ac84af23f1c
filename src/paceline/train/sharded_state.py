"""Tensors that an optimizer keeps for a parameter: laid out over the ranks as that is."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def working_dtype(p: Tensor) -> torch.dtype:
    """In which the update is computed: fp32, or fp64 for fp64 parameters."""
    return p.dtype if p.dtype.itemsize >= 4 else torch.float32


def like(
    p: Tensor,
    local: Tensor,
    shape: torch.Size | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """A tensor laid out over the ranks like p, from this rank's part of it on any device.

    Args:
        shape: of the whole; None: that of p.
        placements: on the mesh of p; None: those of p.
    """
    if not isinstance(p, DTensor):
        return local
    # Not from_local, which would move it to the device of the mesh.
    stride = p.stride() if shape is None else torch.empty(shape, device="meta").stride()
    meta = TensorMeta(p.shape if shape is None else shape, stride, local.dtype)
    spec = DTensorSpec(p.device_mesh, tuple(placements or p.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)
