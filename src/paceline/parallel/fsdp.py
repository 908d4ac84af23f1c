"""Sharded data parallel by FSDP2, in the three degrees of ZeRO, with replicas or without.

All three keep a shard of parameters, gradients and optimizer state on each rank *between* steps.
What differs is what a step keeps whole, and what that saves in communication:

| zero | parameters | gradients |
|---|---|---|
| 3 | gathered for each forward and each backward, freed after | reduced in each micro-batch |
| 2 | gathered once a step, kept to its end | reduced in each micro-batch |
| 1 | gathered once a step, kept to its end | kept whole, reduced once a step |

Over a mesh (replicas, shards), HSDP, the sum over the replicas is done once a step in all three.

FSDP2: torch.distributed.fsdp.fully_shard, https://arxiv.org/abs/2304.11277; ZeRO:
https://arxiv.org/abs/1910.02054.
"""

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from paceline.parallel.shard_collectives import ShardAlgorithm, exchange_by


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    algorithm: ShardAlgorithm | None = None,
) -> None:
    """Shard a module with FSDP2, in place: each block is gathered and reduced as one message.

    Args:
        module: on the mesh's device or on meta; parameters may be DTensors over other axes (tp).
        blocks: the repeated layers in it; the rest forms one more unit.
        mesh: (shards) or (replicas, shards); either may have size 1.
        zero: 1, 2 or 3; see the table above.
        policy: types of arithmetic and of reduction.
        offload: where shards wait.
        algorithm: who scatters gradients and gathers parameters; the backend by default.
    """
    shard_units(blocks, mesh, zero, policy, offload, algorithm)
    # The rest is in use from the beginning of the forward to the end of the backward pass.
    unit = fully_shard(
        module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload
    )
    if algorithm is not None:
        exchange_by(unit, algorithm.reduce, algorithm.gather)


def shard_units(
    units: Iterable[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    algorithm: ShardAlgorithm | None = None,
    split: Callable[[nn.Parameter], Shard] | None = None,
) -> None:
    """Shard inner modules, each a unit of its own; arguments as of `shard`, to be called before it.

    Args:
        split: the dimension of a parameter to split; the first one by default. Another one must be
            divisible by the number of shards.
    """
    for unit in units:
        if any(True for _ in unit.parameters()):
            sharded = fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=zero == 3,
                shard_placement_fn=split,
                mp_policy=policy,
                offload_policy=offload,
            )
            if algorithm is not None:
                exchange_by(sharded, algorithm.reduce, algorithm.gather)


def prepare_micro_batch(module: FSDPModule, zero: int, is_last: bool, *, reduces: bool) -> None:
    """Say what the next forward and backward pass gathers, frees and reduces.

    Call it before the forward pass of each micro-batch of a step. What an earlier micro-batch left
    gathered is not gathered again. Gradients that aren't reduced stay whole.
    """
    module.set_requires_gradient_sync(reduces)
    module.set_requires_all_reduce(is_last)
    module.set_reshard_after_backward(is_last or zero == 3)
    # Not the last one: go on without waiting for the reductions.
    module.set_is_last_backward(is_last)


def free_gathered(module: nn.Module) -> None:
    """Free what forward passes without a backward pass (evaluation) left gathered."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
