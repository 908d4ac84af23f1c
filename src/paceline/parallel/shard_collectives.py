"""Shard collectives: FSDP2's exchanges by an algorithm of ours instead of the backend's.

gloo's reduce-scatter is a whole all-reduce whose result is mostly thrown away: twice the bytes.
Ours (`comm.algorithms`) sends each rank's gradients once to where they are added. Parameters are
gathered by the same algorithm.

The seam is FSDP2's `set_custom_reduce_scatter` and `set_custom_all_gather`,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from paceline.comm.collectives import Collectives, members_per_node
from paceline.config.comm import FsdpComm


class ShardAlgorithm(NamedTuple):
    """Who exchanges among the ranks of a group of shards."""

    name: str
    """Of `comm.algorithms`."""
    ranks_per_node: int
    """Of all ranks."""

    def among(self, group: dist.ProcessGroup) -> Collectives:
        """The collectives of a group of shards."""
        return Collectives(group, self.name, members_per_node(group, self.ranks_per_node))

    def reduce(
        self, received: Tensor, values: Tensor, group: dist.ProcessGroup, mean: bool
    ) -> None:
        """Sum or average: each rank's part is its own; `values` are spoiled."""
        self.among(group).reduce_scatter(received, values, mean=mean)

    def gather(self, whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        """Fill `whole` with the parts of all ranks."""
        self.among(group).all_gather(whole, part)


Reduce = Callable[[Tensor, Tensor, dist.ProcessGroup, bool], None]
Gather = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""As `ShardAlgorithm`'s methods."""


class ShardCollective:
    """What FSDP2 wants of every exchange."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for one exchange's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class ShardReduceScatter(ShardCollective):
    """What `FSDPModule.set_custom_reduce_scatter` takes."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Leave in the output this rank's part of the reduced input, which is spoiled.

        FSDP2 made the input for this call only, and asks for sums or means.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
            raise NotImplementedError(f"a reduce-scatter with {op}, asynchronous: {async_op}")
        self._reduce(output_tensor, input_tensor, group, op == dist.ReduceOp.AVG)


class ShardAllGather(ShardCollective):
    """What `FSDPModule.set_custom_all_gather` takes."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill the output with the inputs of all ranks, before it returns.

        FSDP2 takes None for work that is done.
        """
        self._gather(output_tensor, input_tensor, group)


def algorithm_of(comm: FsdpComm, ranks_per_node: int) -> ShardAlgorithm | None:
    """What the Job wants instead of the backend; None: nothing, or nobody resolved "auto"."""
    if comm.algorithm in ("auto", "backend"):
        return None
    return ShardAlgorithm(comm.algorithm, ranks_per_node)


def exchange_by(unit: FSDPModule, reduce: Reduce, gather: Gather) -> None:
    """Make one unit of FSDP2 scatter gradients and gather parameters in a way of ours."""
    seam: Any = unit  # the interfaces that it names are private to torch
    seam.set_custom_reduce_scatter(ShardReduceScatter(reduce))
    seam.set_custom_all_gather(ShardAllGather(gather))


def held_by(unit: FSDPModule) -> list[Any]:
    """What FSDP2 knows of a unit's parameters, in the order of its rows.

    There is no public way to ask. torch 2.13 lets a unit have several groups of parameters, one for
    each mesh, where 2.11 has one.
    """
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [each for group in groups if group is not None for each in group.fsdp_params]
