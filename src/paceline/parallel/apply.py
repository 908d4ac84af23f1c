"""Put a module on a mesh as its Layout says: one function, in one order.

The order matters: recompute first (it decides what a block keeps), then compile (it should see the
recomputed block), then shards or replicas (their hooks stay outside the compiled code).

Works with any `nn.Module`. A module's *blocks* (its repeated layers) are the units of recompute,
compile and sharding: the children of its outermost `ModuleList`s and `Sequential`s, or, where it
has none, the module as a whole.

FSDP2: https://arxiv.org/abs/2304.11277 (design), torch.distributed.fsdp.fully_shard (code).
Selective recompute: https://arxiv.org/abs/2205.05198, by operator as in torch.utils.checkpoint.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.config.errors import InputError
from paceline.config.layout import Layout

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_KEPT_OPERATORS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def parallelize(module: nn.Module, layout: Layout, mesh: DeviceMesh | None) -> nn.Module:
    """Wrap a module for training under a concrete Layout.

    Args:
        module: any module, on the device it trains on, the same on every rank.
        layout: concrete; its dp x fsdp are the sizes of the mesh.
        mesh: axes ("dp", "fsdp"), or None for a single rank.

    Returns:
        the module to call: itself, changed in place (FSDP2, one rank), or a DDP wrapper around it.
    """
    module.to(DTYPES[layout.param_dtype])
    if layout.recompute in ("selective", "full"):
        _recompute(module, selective=layout.recompute == "selective")
    if layout.compile is True:
        for _, _, block in _blocks(module):
            block.compile()
    if mesh is None:
        return module
    if layout.fsdp != 1:
        return _shard(module, layout, mesh)
    return _replicate(module, layout, mesh)


def arithmetic(layout: Layout, device_type: str) -> AbstractContextManager[Any]:
    """The context in which forward and loss run.

    FSDP2 casts parameters itself, and bf16 parameters need no cast; elsewhere autocast does it.
    """
    casts_itself = layout.precision == layout.param_dtype or layout.fsdp != 1
    if casts_itself:
        return nullcontext()
    assert layout.precision != "auto"
    return torch.autocast(device_type, dtype=DTYPES[layout.precision])


def sync_gradients(module: nn.Module, wanted: bool) -> None:
    """Say whether the next backward pass exchanges gradients.

    Only the last micro-batch of a step needs to: the others accumulate on each rank.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
    elif isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = wanted


def _shard(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, block by block; with dp > 1 each replica is a sharded group (HSDP)."""
    assert layout.precision != "auto"
    dtype = DTYPES[layout.precision]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if layout.precision != layout.param_dtype else None,
        # Gradients of many ranks are added up, which 8 bits of mantissa are too few for.
        reduce_dtype=torch.float32 if dtype.itemsize < 4 else None,
    )
    axes = mesh["dp", "fsdp"] if layout.dp != 1 else mesh["fsdp"]
    shard = partial(fully_shard, mesh=axes, mp_policy=policy)
    for _, _, block in _blocks(module):
        if block is not module and any(True for _ in block.parameters()):
            shard(block)
    shard(module)
    return module


def _replicate(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> nn.Module:
    assert layout.bucket_mib != "auto"
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=layout.bucket_mib,
        gradient_as_bucket_view=True,
    )


def _recompute(module: nn.Module, selective: bool) -> None:
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matrix_products)
    for parent, name, block in list(_blocks(module)):
        if parent is None:
            raise InputError(
                f"layout.recompute has nothing to work on: {type(module).__name__} has no "
                'ModuleList or Sequential of layers; set it to "none".'
            )
        parent.register_module(name, checkpoint_wrapper(block, **options))


def _keep_matrix_products(
    _context: Any, operator: Any, *_args: Any, **_kw: Any
) -> CheckpointPolicy:
    """Keep what is slow to compute again; recompute norms, activations and the like."""
    if operator in _KEPT_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _blocks(module: nn.Module) -> Iterator[tuple[nn.Module | None, str, nn.Module]]:
    """The repeated layers as (parent, name in it, block); the module itself where it has none."""
    found = list(_children_of_lists(module))
    if found:
        yield from found
    else:
        yield None, "", module


def _children_of_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for name, child in module.named_children():
            yield module, name, child
        return
    for child in module.children():
        yield from _children_of_lists(child)
