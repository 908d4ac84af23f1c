"""Put a module on a mesh as its Layout says: one function, in one order.

1. pipeline: cut the network into this rank's stages;
2. context: give attention a core that exchanges keys or heads;
3. fp8: swap the blocks' linear layers;
4. experts: share out the experts and give them an exchange of tokens;
5. tensor: share out the other parameters of the layers, as the model's `placements` say;
6. recompute, then offload: they decide what a block keeps, of what it computes under 1 to 5;
7. compile: each block as it now is;
8. data: shard (FSDP2) around the compiled blocks, whose hooks stay outside the compiled code;
9. fill: only now does each rank allocate its share and give it its first values;
10. replicas of a whole network (DDP) come last: they take over parameters that must exist.

Replicas of a part of a network (dp with tp, pp, cp or ep) are FSDP2's as well, on a mesh whose
shard groups have one rank: DDP knows no DTensors.

Works with any `nn.Module` as long as only dp and fsdp are used, and tp by a plan of a person's own
(`tp_plan`); for the other axes the module says how it can be cut (`Divisible`).

FSDP2: https://arxiv.org/abs/2304.11277 (design), torch.distributed.fsdp.fully_shard (code).
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.compress.messages import messages_of
from paceline.comm.mesh import Meshes, dense_sizes
from paceline.config.comm import Comm
from paceline.config.layout import Layout
from paceline.config.schedule import Schedule
from paceline.kernels.dtypes import DTYPES
from paceline.parallel import fsdp
from paceline.parallel.blocks import blocks_of
from paceline.parallel.cp import AttentionCore, context_groups, make_attend
from paceline.parallel.ep import expert_layers, expert_parallel, fsdp_dim, share_sequences
from paceline.parallel.fp8 import to_fp8
from paceline.parallel.hybrid import sums_replicas
from paceline.parallel.offload import host_shards, offload_activations
from paceline.parallel.recompute import recompute
from paceline.parallel.shard_collectives import algorithm_of
from paceline.parallel.stages import StageModules
from paceline.parallel.statistics import RUNNING, keep_type, synchronise
from paceline.parallel.tp import enable_async, tensor_parallel
from paceline.parallel.tp_plan import TpPlan, parallelize

_TAKES_SIZES = "bucket_cap_mb_list" in signature(DistributedDataParallel.__init__).parameters
_FIRST_BUCKET_MIB = 1.0
"""As in DDP's default (dist._DEFAULT_FIRST_BUCKET_BYTES)."""


class Divisible(Protocol):
    """What a network says about itself so that it can be cut."""

    attend: AttentionCore
    """The attention core of its layers."""

    def set_attend(self, attend: AttentionCore) -> None:
        """Use another one."""

    def cut(self, first: int, stop: int) -> None:
        """Keep, in place, what the pipeline stage with layers first..stop-1 computes."""

    def placements(self) -> Mapping[str, str]:
        """How tensor parallelism cuts each layer, see `parallel.tp`."""


def apply(
    module: nn.Module,
    layout: Layout,
    meshes: Meshes | None,
    comm: Comm,
    *,
    schedule: Schedule | None = None,
    device: torch.device,
    fill: Callable[[nn.Module], None] | None = None,
    find_unused: bool = False,
    exact: bool = False,
    tp_plan: TpPlan | None = None,
) -> nn.Module:
    """Make this rank's part of a module ready to train under a Layout.

    Args:
        module: any module with the same parameters on every rank; or one on the meta device, with
            a `fill`.
        layout: checked.
        meshes: of all ranks, or None for a single rank.
        comm: in what form and by which algorithms the data axes exchange gradients.
        schedule: of the pipeline, where there is one.
        device: what this rank computes on.
        fill: gives a module's parameters their first values, in place.
        find_unused: let DDP look which parameters a forward pass doesn't reach.
        exact: leave gradients to `exact_replicas`: no DDP, and FSDP2 over shards alone.
        tp_plan: by which tp cuts a module that says nothing of itself.

    Returns:
        the module to call: itself, changed in place, or a wrapper around it; `StageModules` of a
        pipeline.
    """
    module.to(DTYPES[layout.param_dtype])
    if schedule is None:
        parts = [module]
    else:
        assert meshes is not None
        parts = _stages(module, layout, schedule, meshes.dense.get_local_rank("pp"))
    if layout.cp != 1:
        _share_sequences(parts, layout, meshes)
    options = (comm, device, fill, find_unused, exact, tp_plan)
    ready = [_part(part, layout, meshes, *options) for part in parts]
    return ready[0] if schedule is None else StageModules(ready)


def _stages(module: nn.Module, layout: Layout, schedule: Schedule, rank: int) -> list[nn.Module]:
    """The stages that a rank of the pipeline holds, each a copy of the network that is cut."""
    parts = []
    for _, stage in schedule.stages_of(rank):
        part: Any = copy.deepcopy(module)
        first = sum(layout.split[:stage])
        part.cut(first, first + layout.split[stage])
        parts.append(part)
    return parts


def _part(
    part: nn.Module,
    layout: Layout,
    meshes: Meshes | None,
    comm: Comm,
    device: torch.device,
    fill: Callable[[nn.Module], None] | None,
    find_unused: bool,
    exact: bool,
    tp_plan: TpPlan | None,
) -> nn.Module:
    """Steps 2 to 10, on a whole network or one stage of it."""
    if layout.sync_batch_norm:
        synchronise(part, is_alone=meshes is None)
    if layout.precision == "fp8":
        to_fp8(part, emulate=device.type != "cuda")
    if meshes is not None:
        _share_layers(part, layout, meshes, comm, tp_plan)
    recompute(part, layout.recompute, layout.recompute_layers)
    if "activations" in layout.offload:
        offload_activations(part, device)
    if layout.compile is True:
        for placed in blocks_of(part):
            placed.block.compile()
    if meshes is not None and _shards(layout, exact=exact):
        _shard(part, layout, meshes, comm, device, exact=exact)
    if fill is not None:
        part.to_empty(device="cpu" if "params" in layout.offload else device)
        fill(part)
        _buffers_to(part, device)
    if meshes is None or exact or not _replicates(layout):
        return part
    return _replicate(part, layout, meshes.dense, find_unused=find_unused)


def _replicates(layout: Layout) -> bool:
    """Whether the whole network is DDP's."""
    return layout.is_plain and layout.fsdp == 1 and layout.dp != 1


def _shards(layout: Layout, *, exact: bool = False) -> bool:
    """Whether FSDP2 holds the parameters: wherever there are data ranks and DDP can't. Where sums
    are exact, only where there are shards."""
    sizes = dense_sizes(layout)
    if exact:
        return sizes["fsdp"] != 1
    return sizes["dp"] * sizes["fsdp"] != 1 and not _replicates(layout)


def _buffers_to(part: nn.Module, device: torch.device) -> None:
    """Move what computes but isn't a parameter: those may wait on the host."""
    for module in part.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


def _share_sequences(parts: list[nn.Module], layout: Layout, meshes: Meshes | None) -> None:
    """Give every attention one core that talks to the other ranks of the sequence."""
    assert meshes is not None
    assert meshes.context is not None
    networks = [cast(Divisible, part) for part in parts]
    groups = context_groups(meshes.context, layout.ulysses)
    attend = make_attend(networks[0].attend, groups)
    for network in networks:
        network.set_attend(attend)


def _share_layers(
    part: nn.Module, layout: Layout, meshes: Meshes, comm: Comm, tp_plan: TpPlan | None
) -> None:
    """What the ranks of the inner axes do together inside a layer."""
    axes = [axis for axis in ("ep", "tp") if getattr(layout, axis) != 1]
    if axes and expert_layers(part):
        mesh = meshes.dense if meshes.experts is None else meshes.experts
        messages = messages_of(comm.ep.compress, comm.compress_from)
        expert_parallel(part, mesh[tuple(axes)], messages)
    if layout.cp != 1:
        assert meshes.context is not None
        share_sequences(part, meshes.context["cp"])
    if tp_plan is not None and layout.tp != 1:
        parallelize(part, tp_plan, meshes.dense["tp"])
    elif layout.tp != 1:
        network = cast(Divisible, part)
        tensor_parallel(part, network.placements(), meshes.dense["tp"], layout.sequence_parallel)
        if layout.async_tp:
            enable_async(meshes.dense["tp"])


def arithmetic(
    layout: Layout, device_type: str, *, exact: bool = False
) -> AbstractContextManager[Any]:
    """The context in which forward and loss run.

    FSDP2 casts parameters itself, and bf16 parameters need no cast; elsewhere autocast does it, and
    everywhere where sums are exact: FSDP2 casts norms and the like too, which autocast doesn't.
    """
    dtype = DTYPES[layout.precision]
    if dtype == DTYPES[layout.param_dtype] or (_shards(layout) and not exact):
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype)


def prepare_micro_batch(
    module: nn.Module, layout: Layout, number: int, total: int, *, exact: bool = False
) -> None:
    """Say which communication the next forward and backward pass does.

    Args:
        module: as `apply` left it, not a pipeline.
        layout: the same.
        number: of this micro-batch, from 0.
        total: micro-batches of the step.
        exact: FSDP2 reduces gradients in every micro-batch, or not at all.
    """
    is_last = number == total - 1
    if isinstance(module, FSDPModule):
        # Replicas of parts of a network are shards of one element: whole all the time.
        reduces = layout.scatters_each if exact else is_last or _zero(layout) > 1
        fsdp.prepare_micro_batch(module, _zero(layout), is_last, reduces=reduces)
    elif isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = is_last


def _zero(layout: Layout) -> int:
    return layout.zero or 1


def _shard(
    part: nn.Module,
    layout: Layout,
    meshes: Meshes,
    comm: Comm,
    device: torch.device,
    *,
    exact: bool,
) -> None:
    """FSDP2, block by block, over whatever data ranks there are."""
    dense = meshes.dense
    dtype = DTYPES[layout.param_dtype if exact else layout.precision]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != DTYPES[layout.param_dtype] else None,
        # Gradients of many ranks are added up, which 8 bits of mantissa are too few for.
        reduce_dtype=torch.float32 if dtype.itemsize < 4 else None,
    )
    if policy.param_dtype is not None:
        keep_type(part)
    offload = host_shards(device) if "params" in layout.offload else OffloadPolicy()
    algorithm = algorithm_of(comm.fsdp, meshes.ranks_per_node)
    options = (_zero(layout), policy, offload, algorithm)
    if meshes.experts is not None:
        experts = [layer.experts for layer in expert_layers(part)]
        axes = _data_axes(meshes.experts, "edp", "efsdp", exact=exact)
        fsdp.shard_units(experts, axes, *options, fsdp_dim)
    blocks = [placed.block for placed in blocks_of(part) if placed.parent is not None]
    # Replicas whose sums are ours FSDP2 doesn't hear of.
    axes = _data_axes(dense, "dp", "fsdp", exact=exact or sums_replicas(comm))
    fsdp.shard(part, blocks, axes, *options)


def _data_axes(mesh: DeviceMesh, replicas: str, shards: str, *, exact: bool) -> DeviceMesh:
    return mesh[shards] if exact or mesh[replicas].size() == 1 else mesh[replicas, shards]


def _replicate(
    module: nn.Module, layout: Layout, mesh: DeviceMesh, *, find_unused: bool
) -> nn.Module:
    # DDP gives all ranks the buffers of rank 0 before each forward pass. How many tokens went to
    # each expert is each rank's own, and running statistics are averaged (`statistics`).
    kept = ("expert_load", *RUNNING)
    own = [name for name, _ in module.named_buffers() if name.endswith(kept)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, own)
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("dp"),
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **_bucket_sizes(layout.bucket_mib),
    )


def _bucket_sizes(bucket_mib: float) -> dict[str, Any]:
    """DDP's arguments for buckets of a size, with a small first one, which is soon on its way.

    DDP's own small first bucket is that of its default size alone (torch 2.13); sizes of single
    buckets, of which the last holds for all others, came with torch 2.13.
    """
    if not _TAKES_SIZES or bucket_mib <= _FIRST_BUCKET_MIB:
        return {"bucket_cap_mb": bucket_mib}
    return {"bucket_cap_mb_list": [_FIRST_BUCKET_MIB, bucket_mib]}
