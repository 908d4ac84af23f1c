"""Hybrid: what a sharded network exchanges in compressed form, over shards and over replicas.

`compressed_shards` and `compressed_replicas` as one, for the trainer: a step begins and ends for
both, both keep errors, and a checkpoint has the errors of both.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.comm.collectives import Collectives, members_per_node
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.mesh import Meshes
from paceline.config.comm import Comm, codec
from paceline.config.layout import Layout
from paceline.parallel.compressed_replicas import CompressedReplicaMean
from paceline.parallel.compressed_shards import CompressedShardCollectives
from paceline.parallel.owed_errors import Owners
from paceline.parallel.replicas import COMM_SECTION, Replicas, State, correct_errors
from paceline.parallel.shard_collectives import ShardAlgorithm


class HybridReduction(Replicas):
    """The exchanges of a sharded network that are in a form of ours.

    Args:
        exchanges: by axis, one at least: "fsdp" over the ranks that share the parameters, "dp" over
            those that have the same shards. What is left out FSDP2 does.
    """

    section = COMM_SECTION

    def __init__(
        self, exchanges: Mapping[str, CompressedShardCollectives | CompressedReplicaMean]
    ) -> None:
        self._exchanges = exchanges

    def describe(self) -> str:
        """Of shards and of replicas."""
        return " ".join(each.describe() for each in self._exchanges.values())

    def begin(self, step: int | None) -> None:
        """Both begin; a step's number is always known."""
        assert step is not None, "only DDP has a backward pass without effect"
        for each in self._exchanges.values():
            each.begin(step)

    def finish(self) -> None:
        """Of both."""
        for each in self._exchanges.values():
            each.finish()

    def sent(self) -> dict[str, float]:
        """Since `begin`, by axis."""
        return {f"{axis}.bytes": each.sent_bytes for axis, each in self._exchanges.items()}

    def squared_error(self) -> Tensor:
        """Over both axes."""
        return torch.stack([e.squared_norm().cpu() for e in self._exchanges.values()]).sum()

    def correct(self, is_bad: Tensor, scale: Tensor | None) -> None:
        """What is owed stays finite, and is of the new scale."""
        for each in self._exchanges.values():
            correct_errors(each.held, is_bad, scale)

    def state(self) -> State:
        """What a checkpoint keeps: the errors of both, each in a section of its own."""
        return {each.section: each.state() for each in self._exchanges.values()}

    def targets(self, saved: Iterable[str], room: Callable[[str], Tensor]) -> State:
        """Of both, each in a section of its own."""
        return {each.section: each.targets(saved, room) for each in self._exchanges.values()}

    def load(self, state: State) -> None:
        """Of both."""
        for each in self._exchanges.values():
            each.load(state[each.section])


def sums_replicas(comm: Comm) -> bool:
    """Whether the mean over replicas of shards is ours and not FSDP2's."""
    by_backend = comm.dp.algorithm in ("auto", "backend")
    return comm.dp.compress not in ("auto", "none") or not by_backend


def hybrid_reduction_of(
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    comm: Comm,
    layout: Layout,
    meshes: Meshes | None,
    accumulation: int,
) -> HybridReduction | None:
    """Give FSDP2's units the exchanges that a Job asks for; None: FSDP2's own, or no FSDP2."""
    if meshes is None or not any(isinstance(each, FSDPModule) for each in module.modules()):
        return None
    exchanges: dict[str, CompressedShardCollectives | CompressedReplicaMean] = {}
    if not {comm.fsdp.compress, comm.fsdp.compress_weights} <= {"none", "auto"}:
        exchanges["fsdp"] = _shards(module, names, comm, meshes)
    if sums_replicas(comm):
        # DualPipe's copies of a stage have half of the micro-batches each.
        batches = accumulation // (2 if layout.schedule == "dualpipe" else 1)
        num_reductions = batches if layout.zero >= 2 else 1
        exchanges["dp"] = _replicas(module, names, comm, meshes, num_reductions)
    return HybridReduction(exchanges) if exchanges else None


def _shards(
    module: nn.Module, names: Mapping[nn.Parameter, str], comm: Comm, meshes: Meshes
) -> CompressedShardCollectives:
    dp, fsdp = meshes.dense["dp"], meshes.dense["fsdp"]
    rank = dp.get_local_rank() * fsdp.size() + fsdp.get_local_rank()
    owners = Owners(names, rank, dp.size() * fsdp.size(), meshes)
    by = "backend" if comm.fsdp.algorithm == "auto" else comm.fsdp.algorithm
    algorithm = ShardAlgorithm(by, meshes.ranks_per_node)
    return CompressedShardCollectives(module, comm, algorithm, dp.size(), owners)


def _replicas(
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    comm: Comm,
    meshes: Meshes,
    num_reductions: int,
) -> CompressedReplicaMean:
    group = meshes.dense.get_group("dp")
    compressor = compressor_of(codec(comm.dp.compress), group)
    by = "backend" if comm.dp.algorithm == "auto" else comm.dp.algorithm
    collectives = Collectives(group, by, members_per_node(group, meshes.ranks_per_node))
    owners = Owners(names, group.rank(), group.size(), meshes)
    return CompressedReplicaMean(module, compressor, collectives, comm, num_reductions, owners)
