"""The mesh of ranks: one named axis per way of splitting the work."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.comm.ranks import Ranks
from paceline.config.layout import Layout


def build_mesh(layout: Layout, ranks: Ranks) -> DeviceMesh | None:
    """Arrange the ranks as (dp, fsdp), neighbours along fsdp, which communicates most.

    Returns:
        the mesh, or None for a single rank, which has nobody to talk to.
    """
    if ranks.world_size == 1:
        return None
    assert layout.dp != "auto"
    assert layout.fsdp != "auto"
    sizes = (layout.dp, layout.fsdp)
    return init_device_mesh(ranks.device_type, sizes, mesh_dim_names=("dp", "fsdp"))
