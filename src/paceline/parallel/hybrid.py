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
from paceline.parallel import compressed_replicas, compressed_shards
from paceline.parallel.compressed_replicas import CompressedReplicaMean
from paceline.parallel.compressed_shards import CompressedShardCollectives, ShardPosition
from paceline.parallel.replicas import COMM_SECTION, Replicas, State
from paceline.parallel.shard_collectives import ShardAlgorithm


class HybridReduction(Replicas):
    """The exchanges of a sharded network that are in a form of ours; one of them at least.

    Args:
        shards: over the ranks that share the parameters; None: FSDP2's own.
        replicas: over those that have the same shards; None: FSDP2's own, or there are none.
        comm: of the Job.
    """

    section = COMM_SECTION

    def __init__(
        self,
        shards: CompressedShardCollectives | None,
        replicas: CompressedReplicaMean | None,
        comm: Comm,
    ) -> None:
        self._shards, self._replicas, self._comm = shards, replicas, comm
        self.feedback = HybridErrors(shards, replicas)

    def describe(self) -> str:
        """Of shards and of replicas."""
        told = [] if self._shards is None else [self._shards.describe()]
        if self._replicas is not None:
            dp = self._comm.dp
            form = f"summed up exactly, by the algorithm {dp.algorithm}"
            if dp.compress != "none":
                form = f"sent as {dp.compress}, with error feedback"
            told.append(f"Between replicas gradients are {form}.")
        return " ".join(told)

    def begin(self, step: int | None) -> None:
        """Both begin; a step's number is always known."""
        assert step is not None, "only DDP has a backward pass without effect"
        for exchange in self._both():
            exchange.begin(step)

    def finish(self) -> None:
        """Only replicas have a thread of their own."""
        if self._replicas is not None:
            self._replicas.finish()

    def sent(self) -> dict[str, float]:
        """Since `begin`, by axis."""
        axes = {"fsdp.bytes": self._shards, "dp.bytes": self._replicas}
        return {name: each.sent_bytes for name, each in axes.items() if each is not None}

    def squared_error(self) -> Tensor:
        """Over both axes."""
        return self.feedback.squared_norm()

    def correct(self, is_bad: Tensor, scale: Tensor | None) -> None:
        """What is owed stays finite, and is of the new scale."""
        for errors in self.feedback.held:
            if is_bad.device.type != "cpu" or is_bad:
                torch.where(is_bad, errors.nan_to_num(0.0, 0.0, 0.0), errors, out=errors)
            if scale is not None:
                errors.mul_(scale)

    def state(self) -> State:
        """What a checkpoint keeps: the errors of both, each in a section of its own."""
        kept: State = {}
        if self._shards is not None:
            kept[compressed_shards.ERRORS] = self._shards.state()
        if self._replicas is not None:
            kept[compressed_replicas.ERRORS] = self._replicas.state()
        return kept

    def targets(self, saved: Iterable[str], room: Callable[[str], Tensor]) -> State:
        """Of both, each in a section of its own."""
        wanted: State = {}
        if self._shards is not None:
            wanted[compressed_shards.ERRORS] = self._shards.targets(saved, room)
        if self._replicas is not None:
            wanted[compressed_replicas.ERRORS] = self._replicas.targets(saved)
        return wanted

    def load(self, state: State) -> None:
        """Of both."""
        if self._shards is not None:
            self._shards.load(state[compressed_shards.ERRORS])
        if self._replicas is not None:
            self._replicas.load(state[compressed_replicas.ERRORS])

    def _both(self) -> list[CompressedShardCollectives | CompressedReplicaMean]:
        return [each for each in (self._shards, self._replicas) if each is not None]


class HybridErrors:
    """What a rank owes over both axes."""

    def __init__(
        self, shards: CompressedShardCollectives | None, replicas: CompressedReplicaMean | None
    ) -> None:
        self._shards = shards
        self._replicas = None if replicas is None else replicas.feedback

    @property
    def held(self) -> list[Tensor]:
        """The buffers that hold all errors."""
        both = [each.held for each in (self._shards, self._replicas) if each is not None]
        return [errors for each in both for errors in each]

    def squared_norm(self) -> Tensor:
        """The sum of squares of this rank's errors: () fp64."""
        both = [each for each in (self._shards, self._replicas) if each is not None]
        return torch.stack([each.squared_norm().cpu() for each in both]).sum()


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
    """Give FSDP2's units the exchanges that a Job asks for; None: FSDP2's own, or no FSDP2.

    Args:
        module: as `parallel.apply` left it.
        names: of its parameters.
        comm: of the Job.
        layout: of the Job.
        meshes: of all ranks.
        accumulation: micro-batches of a step.
    """
    if meshes is None or not any(isinstance(each, FSDPModule) for each in module.modules()):
        return None
    shards = replicas = None
    if not {comm.fsdp.compress, comm.fsdp.compress_weights} <= {"none", "auto"}:
        shards = _shards(module, names, comm, meshes)
    if sums_replicas(comm):
        num_reductions = accumulation if layout.zero in (2, 3) else 1
        replicas = _replicas(module, names, comm, meshes, num_reductions)
    return HybridReduction(shards, replicas, comm) if shards or replicas else None


def _shards(
    module: nn.Module, names: Mapping[nn.Parameter, str], comm: Comm, meshes: Meshes
) -> CompressedShardCollectives:
    dp, fsdp = meshes.dense["dp"], meshes.dense["fsdp"]
    rank = dp.get_local_rank() * fsdp.size() + fsdp.get_local_rank()
    by = "backend" if comm.fsdp.algorithm == "auto" else comm.fsdp.algorithm
    place = ShardPosition(fsdp.size(), dp.size(), rank)
    return CompressedShardCollectives(
        module, names, comm, ShardAlgorithm(by, meshes.ranks_per_node), place
    )


def _replicas(
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    comm: Comm,
    meshes: Meshes,
    num_reductions: int,
) -> CompressedReplicaMean:
    group = meshes.dense.get_group("dp")
    chosen = codec(comm.dp.compress)
    compressor = None if chosen.kind == "none" else compressor_of(chosen, group)
    by = "backend" if comm.dp.algorithm == "auto" else comm.dp.algorithm
    collectives = Collectives(group, by, members_per_node(group, meshes.ranks_per_node))
    return CompressedReplicaMean(module, names, compressor, collectives, comm, num_reductions)
