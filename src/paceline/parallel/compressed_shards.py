"""Shards in compressed form: FSDP2's reduction of gradients and gathering of parameters.

FSDP2 decides when; its seams `set_custom_reduce_scatter` and `set_custom_all_gather` hand over a
buffer with one row per rank (`comm.compress.shards`). Which parameter lies where in a row is
FSDP2's to know, and read from it, once.

Error feedback of a sum that is scattered costs memory. Each rank owes something of every value that
it codes: it keeps fp32 errors of the whole unit but its own shard, (N-1)/N of 4 bytes for every
parameter. Where the g ranks of a node add up exactly (hierarchical), it codes 1/g of that. Errors
belong to parameters by name, in units of the mean over all data ranks, so another number of shards
or replicas takes over all of them. What a rank doesn't code any more it adds to its next gradient.

Replicas of shards (HSDP) are `compressed_replicas`; ours without compression `shard_collectives`.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.comm.compress.codec import BlockCodec
from paceline.comm.compress.codecs import codec_of
from paceline.comm.compress.shards import CodedRow, CodedShards, PayloadBuffers, Payloads
from paceline.config.comm import Comm, codec
from paceline.parallel.owed_errors import Owners
from paceline.parallel.shard_collectives import ShardAlgorithm, exchange_by, held_by


class UnitPart(NamedTuple):
    """A parameter in a unit's rows."""

    name: str
    shape: torch.Size
    dim: int
    """That is split."""
    chunk: torch.Size
    """Of it that each row has, filled up."""
    is_compressed: bool

    def whole(self, rows: Tensor) -> Tensor:
        """Put the parameter together: (ranks, chunk values) to (num_values,)."""
        filled = torch.cat([row.view(self.chunk) for row in rows], self.dim)
        return filled.narrow(self.dim, 0, self.shape[self.dim]).flatten()

    def rows(self, whole: Tensor, num_ranks: int) -> Tensor:
        """Split it, the inverse of `whole`."""
        filled = whole.new_zeros([*self.chunk]).repeat_interleave(num_ranks, self.dim)
        filled.narrow(self.dim, 0, self.shape[self.dim]).copy_(whole.view(self.shape))
        return torch.stack([part.flatten() for part in filled.chunk(num_ranks, self.dim)])


class _Errors:
    """What a rank owes of the gradients of one unit."""

    def __init__(
        self, parts: Sequence[UnitPart], others: Sequence[int], num_ranks: int, like: Tensor
    ) -> None:
        self._coded = [part for part in parts if part.is_compressed]
        self._others, self._num_ranks = list(others), num_ranks
        sizes = [part.chunk.numel() for part in self._coded]
        self.held = like.new_zeros(len(others), sum(sizes))
        self._views = self.held.split(sizes, 1) if sizes else ()

    def by_name(self) -> dict[str, Tensor]:
        """Of whole parameters: {name: (num_values,)}, zeros for parts that it doesn't code."""
        whole = {}
        for part, view in zip(self._coded, self._views, strict=True):
            rows = view.new_zeros(self._num_ranks, view.shape[1])
            rows[self._others] = view
            whole[part.name] = part.whole(rows)
        return whole

    def take(self, errors: dict[str, Tensor]) -> Tensor | None:
        """Go on with what `by_name` gave, on any number of ranks; what is taken leaves the dict.

        Returns:
            what is owed of rows that this rank doesn't code: (ranks, num_coded); None: nothing.
        """
        if not any(part.name in errors for part in self._coded):
            return None
        left = self.held.new_zeros(self._num_ranks, self.held.shape[1])
        of_parts = left.split([view.shape[1] for view in self._views], 1)
        for part, view, rest in zip(self._coded, self._views, of_parts, strict=True):
            if part.name in errors:
                rest.copy_(part.rows(errors.pop(part.name), self._num_ranks))
                view.copy_(rest[self._others])
        left[self._others] = 0
        return left


class _ShardUnit:
    """One unit of FSDP2, from its first exchange on."""

    def __init__(self, parts: Sequence[UnitPart], trained: Sequence[UnitPart]) -> None:
        self.all = CodedRow.of([(part.chunk.numel(), part.is_compressed) for part in parts])
        self.trained = CodedRow.of([(part.chunk.numel(), part.is_compressed) for part in trained])
        self.trained_parts = trained
        self.seed_name = parts[0].name
        self.errors: _Errors | None = None


class CompressedShardCollectives:
    """The exchanges of a module's units, and what this rank owes of them.

    Args:
        module: sharded by FSDP2; the seams of its units are set here.
        algorithm: who exchanges what is not compressed.
        num_replicas: of the shards.
        owners: of the errors, among the ranks of all replicas.
    """

    section = "shard_error"
    """Of a checkpoint: {number: {name: (num_values,)}}, see `Owners`."""

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        algorithm: ShardAlgorithm,
        num_replicas: int,
        owners: Owners,
    ) -> None:
        self._comm, self._num_replicas, self._owners = comm, num_replicas, owners
        self.algorithm = algorithm
        self._gradients = _codec(comm.fsdp.compress)
        self._weights = _codec(comm.fsdp.compress_weights)
        self._units: dict[FSDPModule, _ShardUnit] = {}
        self._loaded: dict[str, Tensor] = {}
        self._step, self._is_exact = 0, True
        # On CUDA each of the two has a stream of its own, where they never wait for each other.
        self._rooms = {"reduce": PayloadBuffers(), "gather": PayloadBuffers()}
        self.sent_bytes = 0
        """What this rank sent since `begin`."""
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                exchange_by(unit, partial(self.reduce, unit), partial(self.gather, unit))

    def describe(self) -> str:
        """What travels in which form, a sentence for a person."""
        clauses = []
        if self._gradients is not None:
            where = " between nodes" if self.algorithm.name == "hierarchical" else ""
            clauses.append(f"gradients as {self._comm.fsdp.compress}{where}, with error feedback")
        if self._weights is not None:
            clauses.append(f"parameters as {self._comm.fsdp.compress_weights}")
        exact = f"tensors below {self._comm.compress_from} values exactly"
        warmup = self._comm.warmup_steps
        if warmup and self._gradients is not None:
            exact = f"{exact}, gradients in the first {warmup} steps too"
        return f"Between shards travel {' and '.join(clauses)}; {exact}."

    def begin(self, step: int) -> None:
        """Say which step comes next, from 0."""
        self._step, self._is_exact = step, step < self._comm.warmup_steps
        self.sent_bytes = 0

    def finish(self) -> None:
        """Nothing is left to do: FSDP2 has waited for each exchange."""

    def reduce(
        self,
        unit: FSDPModule,
        received: Tensor,
        values: Tensor,
        group: dist.ProcessGroup,
        mean: bool,
    ) -> None:
        """Sum or average a unit's gradients, each row at its rank; `values` are spoiled."""
        if mean:
            values.mul_(1 / group.size())
        if self._gradients is None or self._is_exact:
            self.algorithm.among(group).reduce_scatter(received, values)
            self.sent_bytes += _exact_bytes(values, group)
            return
        known = self._known(unit)
        payloads = Payloads(self._gradients, known.trained, values.dtype)
        _must_fill(known.trained, len(received), "gradients")
        coded = CodedShards(self.algorithm.among(group), self._rooms["reduce"])
        if known.errors is None:
            known.errors = _Errors(known.trained_parts, coded.others, group.size(), values)
            owed = known.errors.take(self._loaded)
            if owed is not None:
                for row, of_row in zip(values.view(group.size(), -1), owed, strict=True):
                    payloads.owe(row, of_row)
        held = known.errors.held
        self.sent_bytes += coded.reduce_scatter(payloads, received, values, held)

    def gather(
        self, unit: FSDPModule, whole: Tensor, part: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Fill `whole` with the unit's parameters, as each rank's part of them is sent."""
        if self._weights is None:
            self.algorithm.among(group).all_gather(whole, part)
            self.sent_bytes += _exact_bytes(whole, group)
            return
        known = self._known(unit)
        _must_fill(known.all, len(part), "parameters")
        # The same in forward and backward pass, and in every replica.
        seed = zlib.crc32(f"{known.seed_name} {self._step} {group.rank()}".encode())
        payloads = Payloads(self._weights, known.all, part.dtype)
        coded = CodedShards(self.algorithm.among(group), self._rooms["gather"])
        drawn = seed if self._weights.is_unbiased else None
        self.sent_bytes += coded.all_gather(payloads, whole, part, drawn)

    def _known(self, unit: FSDPModule) -> _ShardUnit:
        if unit not in self._units:
            held = held_by(unit)
            parts = [self._part(each) for each in held]
            trained = [
                part
                for part, each in zip(parts, held, strict=True)
                if each.sharded_param.requires_grad
            ]
            self._units[unit] = _ShardUnit(parts, trained)
        return self._units[unit]

    def _part(self, held: Any) -> UnitPart:
        parameter = held.sharded_param
        return UnitPart(
            self._owners.labels[parameter],
            parameter.shape,
            held.fsdp_placement.dim,
            held.padded_sharded_param_size,
            parameter.numel() >= self._comm.compress_from,
        )

    @property
    def held(self) -> list[Tensor]:
        """The buffers that hold all errors."""
        return [unit.errors.held for unit in self._units.values() if unit.errors is not None]

    def squared_norm(self) -> Tensor:
        """The sum of squares of this rank's errors, of the mean: () fp64."""
        if not self.held:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm(self.held)).double() / self._num_replicas
        return norms.square().sum()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps: {number: {name: (num_values,)}}, in units of the mean."""
        errors = {label: owed / self._num_replicas for label, owed in self._loaded.items()}
        for unit in self._units.values():
            if unit.errors is not None:
                owed = unit.errors.by_name()
                errors |= {label: error / self._num_replicas for label, error in owed.items()}
        return self._owners.numbered(errors)

    def targets(
        self, saved: Iterable[str], room: Callable[[str], Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """The part of a saved state that this rank loads, in the same form.

        Args:
            saved: paths of the tensors that were saved: "shard_error.0.layer.weight".
        """
        paths = saved if self._gradients else ()
        return self._owners.to_load(self.section, paths, lambda path, _: room(path))

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on with what `targets` gave, now filled."""
        self._loaded = {}
        for errors in self._owners.labelled(state).values():
            for label, error in errors.items():
                self._loaded[label] = self._loaded.get(label, 0) + error * self._num_replicas
        self._units.clear()


def _must_fill(row: CodedRow, num_values: int, what: str) -> None:
    """Refuse a row that isn't what the parameters give.

    Raises:
        RuntimeError: some parameters had no gradient, which only an exact exchange can bear.
    """
    if row.num_values != num_values:
        raise RuntimeError(
            f"a row has {num_values} values where its parameters have {row.num_values}: compressed "
            f'{what} need a gradient for every parameter; use comm.fsdp.compress = "none".'
        )


def _codec(name: str) -> BlockCodec | None:
    chosen = codec(name)
    return None if chosen.kind == "none" else codec_of(chosen)


def _exact_bytes(whole: Tensor, group: dist.ProcessGroup) -> int:
    """The least that each rank can send to scatter sums or gather parts."""
    return whole.nbytes * (group.size() - 1) // group.size()
