"""Exact replicas: gradients summed up in an order that doesn't depend on who computed them.

The micro-batches of a step are numbered through all ranks, in the order of their samples. A rank
takes the gradients of each one out of the parameters as soon as they are there, and keeps partial
sums over the tree of the numbers (`partial_sums`). At the end of the step these are exchanged
(`ordered_exchange`): over the shards of a parameter first, where it has some, then over its
replicas. So one rank, any number of replicas or shards, and pipelines get the same bits.

DDP isn't used, and FSDP2 gathers parameters and leaves gradients to this module. They are whole on
every rank up to the step's end, as many sums as `partial_sums` says. With ZeRO 2 and 3 FSDP2's
units hand them over as soon as they are there, micro-batch by micro-batch, and a rank keeps sums of
its shards only. The ranks take micro-batches in turns (`Job.interleave`), so that those are few.

A weight with two uses (tied embeddings) lies on two stages of a pipeline, which sum up each for
itself. So the gradients of its uses are kept apart on one rank as well, and added at the end.

With tp, cp and ep a gradient is a sum over ranks within a micro-batch already, in an order of
theirs. cp's parts of a micro-batch count as micro-batches, and experts have a tree of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.comm.local_part import local_part
from paceline.comm.mesh import Meshes
from paceline.comm.rendezvous import collective_timeout
from paceline.config.errors import InputError
from paceline.config.schedule import Schedule
from paceline.parallel.ep import expert_layers
from paceline.parallel.ordered_exchange import OrderedExchange
from paceline.parallel.partial_sums import PartialSums, TreeNode
from paceline.parallel.replicas import Replicas, kept_buffers
from paceline.parallel.shard_collectives import ShardReduceScatter, held_by
from paceline.parallel.stages import StageModules

_DENSE, _EXPERTS = ("dp", "fsdp"), ("edp", "efsdp")
"""Axes of replicas and shards, in the mesh of what all share and in that of experts."""


class ExactReplicas(Replicas):
    """The gradients of a module's parameters, exactly.

    Args:
        module: as `parallel.apply` made it for exact sums.
        names: of its parameters.
        meshes: of all ranks; None: there is one.
        accumulation: micro-batches of this rank.
        schedule: of a pipeline.
        scatters_each: whether FSDP2's units reduce gradients in every micro-batch.
        may_miss: whether a step may leave a parameter without a gradient, which is zero then.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        meshes: Meshes | None,
        accumulation: int,
        schedule: Schedule | None,
        *,
        scatters_each: bool = False,
        may_miss: bool = False,
    ) -> None:
        self._names, self._may_miss = names, may_miss
        self._partners = _Partners(meshes, accumulation, schedule, scatters_each)
        parts = list(module) if isinstance(module, StageModules) else [module]
        places = self._partners.places
        # Ranks with the same two stages (DualPipe) exchange them in the same order.
        order = sorted(range(len(parts)), key=lambda index: places[index][1])
        self._units = {parts[i]: list(self._units_of(parts[i], places[i])) for i in order}
        self.num_parts = self._partners.grid(_DENSE).num_parts
        self._buffers, self._versions = kept_buffers(module), list[int]()

    def describe(self) -> str:
        """What is exact."""
        return (
            "Gradients, their norm and losses are summed in an order that doesn't depend on the "
            "ranks (elastic.exact)."
        )

    def begin(self, step: int | None) -> None:
        """Nothing is left of the step before."""
        for unit in self._all_units:
            unit.begin()
        self._versions = [buffer._version for buffer in self._buffers]

    def number(self, micro_batch: int) -> int:
        """Of one of this rank's micro-batches, among those of all ranks."""
        return self._partners.own_numbers(_DENSE, [micro_batch])[0]

    def take(self, micro_batch: int, part: nn.Module | None = None) -> None:
        """Take the gradients of a micro-batch out of the parameters."""
        for unit in self._all_units if part is None else self._units[part]:
            unit.take(micro_batch)

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange, and put the sums into the parameters' gradients.

        Raises:
            InputError: a parameter had no gradient in the whole step, or a forward pass changed a
                buffer.
        """
        if any(b._version != was for b, was in zip(self._buffers, self._versions, strict=True)):
            raise InputError(
                "elastic.exact = true needs a module whose forward pass changes no buffers, and "
                "this one has running statistics or the like, which are each rank's own: take "
                "them out (GroupNorm for BatchNorm), or set elastic.exact = false."
            )
        for unit in self._all_units:
            if unit.missing and not self._may_miss:
                name = self._names[min(unit.missing, key=lambda each: self._names[each])]
                raise InputError(
                    f"{name} had no gradient in a step, and elastic.exact = true needs one of "
                    "every parameter that is trained: use it, or take it out by "
                    "requires_grad_(False), or say find_unused_parameters=True."
                )
            unit.finish()

    def sent(self) -> dict[str, float]:
        """Since `begin`, by axis."""
        sent: dict[str, float] = {}
        for unit in self._all_units:
            for axis, exchanges in unit.exchanges.items():
                for exchange in exchanges:
                    sent[f"{axis}.bytes"] = sent.get(f"{axis}.bytes", 0) + exchange.sent_bytes
        return sent

    @property
    def _all_units(self) -> Iterable["_Unit"]:
        return (unit for units in self._units.values() for unit in units)

    def _units_of(self, part: nn.Module, place: tuple[int, int]) -> Iterable["_Unit"]:
        experts: set[nn.Parameter] = set()
        if self._partners.has_experts:
            layers = expert_layers(part)
            experts.update(p for layer in layers for p in layer.experts.parameters())
        for held in _held_parameters(part, experts, self._partners.scatters_each):
            if held.parameters:
                axes = _EXPERTS if experts.intersection(held.parameters) else _DENSE
                is_streamed = self._partners.scatters_each and isinstance(held, _Shards)
                kind = _StreamedUnit if is_streamed else _Unit
                yield kind(held, self._partners, axes, place)


class _Held(Protocol):
    """Parameters whose gradients are exchanged together."""

    parameters: list[nn.Parameter]
    """One comes again for its second use."""

    def take(self) -> list[Tensor | None]:
        """Their gradients, which they have no longer: this rank's part, or all of it."""

    def empty(self, index: int) -> Tensor:
        """Zeros like the gradient of one of them."""

    def split(self, gradients: list[Tensor], num_ranks: int) -> Tensor:
        """Cut gradients among the ranks that hold shards: (ranks, values)."""

    def put(self, sums: list[Tensor]) -> None:
        """Make sums the gradients: those of `take`, or one flat tensor where they were split."""


class _Unit:
    """Parameters that are summed up together, in a step."""

    def __init__(
        self, held: _Held, partners: "_Partners", axes: tuple[str, str], place: tuple[int, int]
    ) -> None:
        self._held, self._num_parts = held, partners.grid(axes).num_parts
        self._number = lambda index: partners.own_numbers(axes, [index])[0]
        self._shards = self._exchanges_of_shards(partners, axes, place)
        self._replicas = partners.replicas(axes, place)
        self.exchanges = {"fsdp": self._shards, "dp": [self._replicas] if self._replicas else []}
        """By axis, those that there are."""
        self.begin()

    def _exchanges_of_shards(
        self, partners: "_Partners", axes: tuple[str, str], place: tuple[int, int]
    ) -> list[OrderedExchange]:
        if not isinstance(self._held, _Shards):
            return []
        return [partners.shards(axes, partners.through(place[0]))]

    def begin(self) -> None:
        """Of a step."""
        self.sums = PartialSums(self._num_parts)
        self.missing = set(self._held.parameters)
        for exchange in (each for some in self.exchanges.values() for each in some):
            exchange.sent_bytes = 0

    def take(self, micro_batch: int) -> None:
        """Add a micro-batch."""
        self.sums.add(TreeNode(0, self._number(micro_batch)), self._taken())

    def _taken(self) -> list[Tensor]:
        """Gradients in fp32 at least."""
        gradients = []
        for index, gradient in enumerate(self._held.take()):
            if gradient is None:
                gradient = self._held.empty(index)
            else:
                self.missing.discard(self._held.parameters[index])
            gradients.append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        return gradients

    def finish(self) -> None:
        """Exchange the sums, and put them into the gradients."""
        for exchange in self._shards:
            num_ranks = exchange.group.size()
            for node, gradients in self.sums.nodes.items():
                self.sums.nodes[node] = [self._held.split(gradients, num_ranks)]
            self.sums = exchange.scatter(self.sums)
        self._held.put(self._total())

    def _total(self) -> list[Tensor]:
        """Of all replicas."""
        if self._replicas is None:
            return self.sums.take_root()
        return self._replicas.everywhere(self.sums)


class _StreamedUnit(_Unit):
    """Shards whose gradients are exchanged in every micro-batch: by FSDP2, when they are there, or
    after the backward pass where they are those of a second use."""

    _held: "_Shards"

    def _exchanges_of_shards(
        self, partners: "_Partners", axes: tuple[str, str], place: tuple[int, int]
    ) -> list[OrderedExchange]:
        """One for each micro-batch."""
        if self._held.unit is not None:
            seam: Any = self._held.unit
            seam.set_custom_reduce_scatter(ShardReduceScatter(self._reduce))
            seam.set_gradient_divide_factor(1.0)
            seam.set_force_sum_reduction_for_comms(True)
        return [partners.shards(axes, [index]) for index in partners.through(place[0])]

    def begin(self) -> None:
        """Of a step."""
        super().begin()
        self._num_come = 0

    def take(self, micro_batch: int) -> None:
        """Add a micro-batch, which FSDP2 has done already where it reduces."""
        if self._held.unit is None:
            num_ranks = self._shards[micro_batch].group.size()
            self._scatter(self._held.split(self._taken(), num_ranks))
        elif self._num_come == micro_batch + 1:
            self.missing.clear()

    def finish(self) -> None:
        """Put the sums into the gradients, which FSDP2 has done already where it reduces."""
        if self._held.unit is None:
            self._held.put(self._total())

    def _scatter(self, rows: Tensor) -> None:
        """Exchange a micro-batch's gradients: (ranks, values)."""
        leaf = PartialSums(self._num_parts)
        leaf.add(TreeNode(0, self._number(self._num_come)), [rows])
        for node, part in self._shards[self._num_come].scatter(leaf).nodes.items():
            self.sums.add(node, part)
        self._num_come += 1

    @torch.no_grad()
    def _reduce(
        self, received: Tensor, values: Tensor, group: dist.ProcessGroup, _mean: bool
    ) -> None:
        """As FSDP2 asks. It adds up what it receives over micro-batches: zeros and the sum."""
        if self._num_come == len(self._shards):
            raise RuntimeError(
                "a unit of FSDP2 reduced gradients twice in a micro-batch, which elastic.exact = "
                "true can't add up: use each block once in a forward pass, or set layout.zero = 1."
            )
        self._scatter(values.view(group.size(), -1))
        if self._num_come < len(self._shards):
            received.zero_()
        else:
            (total,) = self._total()
            received.copy_(total)


class _SecondUse:
    """Takes the gradient of a weight's second use, which the weight doesn't get."""

    def __init__(self) -> None:
        self._gradient: Tensor | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight."""
        used: Tensor = _SetApart.apply(weight, self)
        return used

    def add(self, gradient: Tensor) -> None:
        """Of one backward pass."""
        before = self._gradient
        self._gradient = gradient if before is None else before + gradient

    def take(self) -> Tensor | None:
        """What has come; it is kept no longer."""
        taken, self._gradient = self._gradient, None
        return taken


class _SetApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, use: _SecondUse) -> Tensor:
        ctx.use = use
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.use.add(gradient)
        return None, None


class _Whole:
    """Parameters that a rank holds all of, or all of its part over tp and ep."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], second_uses: Mapping[nn.Parameter, _SecondUse]
    ) -> None:
        own = [p for p in parameters if p.requires_grad]
        self._uses = [None] * len(own) + [second_uses[p] for p in own if p in second_uses]
        self.parameters = own + [p for p in own if p in second_uses]
        self._forms: list[DTensor | None] = [None] * len(self.parameters)

    def take(self) -> list[Tensor | None]:
        """See `_Held`."""
        taken: list[Tensor | None] = []
        for index, (parameter, use) in enumerate(zip(self.parameters, self._uses, strict=True)):
            if use is not None:
                taken.append(use.take())
                continue
            gradient, parameter.grad = parameter.grad, None
            if isinstance(gradient, DTensor):
                self._forms[index] = gradient
            taken.append(None if gradient is None else local_part(gradient))
        return taken

    def empty(self, index: int) -> Tensor:
        """See `_Held`."""
        return torch.zeros_like(local_part(self.parameters[index].detach()))

    def split(self, gradients: list[Tensor], num_ranks: int) -> Tensor:
        """Never asked: there are no shards."""
        raise NotImplementedError

    def put(self, sums: list[Tensor]) -> None:
        """See `_Held`."""
        for parameter, form, total in zip(self.parameters, self._forms, sums, strict=True):
            gradient = total.to(parameter.dtype)
            _add(parameter, gradient if form is None else _like(form, gradient))
        self._forms = [None] * len(self.parameters)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    """To the gradient of another use, as pipeline ranks add theirs: in the parameter's type."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _like(form: DTensor, local: Tensor) -> Tensor:
    return DTensor.from_local(
        local,
        form.device_mesh,
        form.placements,
        run_check=False,
        shape=form.shape,
        stride=form.stride(),
    )


class _Shards:
    """Parameters of a unit of FSDP2, and what it knows of them.

    Args:
        own: those that are taken from it.
        twice: those of which a second use is taken as well.
        unit: that reduces gradients itself; None: it is told not to.
    """

    def __init__(
        self,
        own: Sequence[Any],
        twice: Sequence[Any],
        second_uses: Mapping[nn.Parameter, _SecondUse],
        unit: FSDPModule | None = None,
    ) -> None:
        self.unit = unit
        self._own, self._held = own, [*own, *twice]
        self._uses = [second_uses[each.sharded_param] for each in twice]
        self.parameters = [each.sharded_param for each in self._held]

    def take(self) -> list[Tensor | None]:
        """See `_Held`."""
        return [_taken(each) for each in self._own] + [use.take() for use in self._uses]

    def empty(self, index: int) -> Tensor:
        """See `_Held`."""
        return torch.zeros_like(local_part(self._held[index].unsharded_param.detach()))

    def split(self, gradients: list[Tensor], num_ranks: int) -> Tensor:
        """See `_Held`: as FSDP2 splits them, the last parts filled up."""
        return torch.cat(
            [
                _rows(gradient, num_ranks, each.fsdp_placement.dim)
                for each, gradient in zip(self._held, gradients, strict=True)
            ],
            1,
        )

    def put(self, sums: list[Tensor]) -> None:
        """See `_Held`."""
        (flat,) = sums
        sizes = [each.padded_sharded_param_size.numel() for each in self._held]
        for each, values in zip(self._held, flat.split(sizes), strict=True):
            parameter, size = each.sharded_param, each.sharded_size
            local = values[: size.numel()].view(size).to(parameter.device, parameter.dtype)
            _add(parameter, each.to_sharded_dtensor(local))


def _taken(held: Any) -> Tensor | None:
    """The whole gradient of a parameter of FSDP2, in whichever place that keeps it."""
    gradient: Tensor | None = None
    whole = getattr(held, "unsharded_param", None)  # there is none before it is gathered first
    if held.unsharded_accumulated_grad is not None:
        gradient = held.unsharded_accumulated_grad_data
        held.unsharded_accumulated_grad = None
    elif whole is not None and whole.grad is not None:
        gradient = held.unsharded_grad_data
        whole.grad = None
    return gradient


def _rows(gradient: Tensor, num_ranks: int, dim: int) -> Tensor:
    """(ranks, values of a shard)"""
    if dim:
        gradient = torch.cat(gradient.chunk(num_ranks, dim))
    size = -(-len(gradient) // num_ranks)
    filled = gradient.new_zeros(num_ranks * size - len(gradient), *gradient.shape[1:])
    return torch.cat([gradient, filled]).view(num_ranks, -1)


def _held_parameters(
    part: nn.Module, experts: set[nn.Parameter], scatters_each: bool
) -> Iterable[_Held]:
    apart = _second_uses(part)
    units = [module for module in part.modules() if isinstance(module, FSDPModule)]
    if units:
        return [held for unit in units for held in _shards_of(unit, apart, scatters_each)]
    others = [parameter for parameter in part.parameters() if parameter not in experts]
    return [_Whole(others, apart), _Whole((p for p in part.parameters() if p in experts), {})]


def _shards_of(
    unit: FSDPModule, second_uses: Mapping[nn.Parameter, _SecondUse], scatters_each: bool
) -> list[_Held]:
    own = [each for each in held_by(unit) if each.sharded_param.requires_grad]
    twice = [each for each in own if each.sharded_param in second_uses]
    if scatters_each:
        return [_Shards(own, [], {}, unit), _Shards([], twice, second_uses)]
    return [_Shards(own, twice, second_uses)]


def _axes(tensor: DTensor) -> tuple[str, ...]:
    return tensor.device_mesh.mesh_dim_names or ()


def _second_uses(part: Any) -> dict[nn.Parameter, _SecondUse]:
    """Let a network with a tied head, that isn't cut and not shared out by tp, keep the gradients
    of its two uses apart."""
    weight = getattr(getattr(part, "embed", None), "weight", None)
    is_tied = hasattr(part, "set_apart") and part.head is None and part.is_first and part.is_last
    if not is_tied or (isinstance(weight, DTensor) and "tp" in _axes(weight)):
        return {}
    assert isinstance(weight, nn.Parameter)
    part.set_apart = _SecondUse()
    return {weight: part.set_apart}


@dataclass(frozen=True)
class _Grid:
    """The data ranks, and how many micro-batches each has."""

    replicas: int
    shards: int
    micro_batches: int
    takes_turns: bool = False
    """Whether the ranks of a replica take micro-batches in turns."""

    @property
    def num_parts(self) -> int:
        """Micro-batches of a step."""
        return self.replicas * self.shards * self.micro_batches

    def numbers(self, replica: int, shard: int, micro_batches: Iterable[int]) -> list[int]:
        """Of a rank's micro-batches, among those of all."""
        if self.takes_turns:
            first = replica * self.micro_batches
            return [(first + index) * self.shards + shard for index in micro_batches]
        first = (replica * self.shards + shard) * self.micro_batches
        return [first + index for index in micro_batches]


class _Partners:
    """Who has which micro-batches of what a rank sums up."""

    def __init__(
        self,
        meshes: Meshes | None,
        accumulation: int,
        schedule: Schedule | None,
        scatters_each: bool,
    ) -> None:
        self.scatters_each = scatters_each
        self._meshes, self._accumulation = meshes, accumulation
        self._schedule = None if meshes is None else schedule
        self._groups: dict[str, dist.ProcessGroup] = {}

    @property
    def has_experts(self) -> bool:
        """Whether ranks share out experts."""
        return self._meshes is not None and self._meshes.experts is not None

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """Direction and stage of what this rank holds."""
        if self._schedule is None or self._meshes is None:
            return [(0, 0)]
        return self._schedule.stages_of(self._meshes.dense.get_local_rank("pp"))

    def grid(self, axes: tuple[str, str]) -> _Grid:
        """Along the axes of replicas and of shards."""
        if self._meshes is None:
            return _Grid(1, 1, self._accumulation)
        mesh = self._mesh(axes)
        sizes = mesh[axes[0]].size(), mesh[axes[1]].size()
        return _Grid(*sizes, self._accumulation, self.scatters_each)

    def own_numbers(self, axes: tuple[str, str], micro_batches: Iterable[int]) -> list[int]:
        """Of this rank's micro-batches."""
        if self._meshes is None:
            return list(micro_batches)
        replica, shard = map(self._mesh(axes).get_local_rank, axes)
        return self.grid(axes).numbers(replica, shard, micro_batches)

    def shards(self, axes: tuple[str, str], micro_batches: Sequence[int]) -> OrderedExchange:
        """Of some micro-batches of each rank, over the ranks that hold the other shards."""
        grid, mesh = self.grid(axes), self._mesh(axes)
        replica = mesh.get_local_rank(axes[0])
        numbers = [grid.numbers(replica, shard, micro_batches) for shard in range(grid.shards)]
        return OrderedExchange(mesh.get_group(axes[1]), numbers, grid.num_parts)

    def replicas(self, axes: tuple[str, str], place: tuple[int, int]) -> OrderedExchange | None:
        """Over the ranks that hold the same of a stage; None: there are no others."""
        grid, stage = self.grid(axes), place[1]
        directions = self._directions(stage)
        if self._meshes is None or grid.replicas * len(directions) == 1:
            return None
        mesh = self._mesh(axes)
        if len(directions) == 1:
            group = mesh.get_group(axes[0])
        else:
            if axes[0] not in self._groups:
                self._groups[axes[0]] = _group_of_both_directions(mesh, axes[0])
            group = self._groups[axes[0]]
        numbers = [
            [
                number
                for shard in range(grid.shards)
                for number in grid.numbers(replica, shard, self.through(direction))
            ]
            for direction in directions
            for replica in range(grid.replicas)
        ]
        return OrderedExchange(group, numbers, grid.num_parts)

    def _mesh(self, axes: tuple[str, str]) -> DeviceMesh:
        assert self._meshes is not None
        mesh = self._meshes.dense if axes == _DENSE else self._meshes.experts
        assert mesh is not None
        return mesh

    def through(self, direction: int) -> list[int]:
        """A rank's micro-batches that take a direction of the pipeline."""
        every, schedule = range(self._accumulation), self._schedule
        return [each for each in every if schedule is None or schedule.direction(each) == direction]

    def _directions(self, stage: int) -> list[int]:
        """In which a stage is passed, in the order of the ranks where it is."""
        if self._schedule is None:
            return [0]
        ranks = [chain[stage] for chain in self._schedule.stage_ranks]
        return sorted(range(len(ranks)), key=ranks.__getitem__)


def _group_of_both_directions(mesh: DeviceMesh, replicas: str) -> dist.ProcessGroup:
    """This rank's group of replicas of the two pipeline ranks that hold the same stages.

    DualPipe gives a rank and the one as far from the other end the same two stages. All ranks of
    the world must call it.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    axes = names.index("pp"), names.index(replicas)
    ranks = torch.as_tensor(mesh.mesh).movedim(axes, (-2, -1)).flatten(0, -3)
    num_stages = ranks.shape[1]
    together = [
        rows[[first, num_stages - 1 - first]].flatten().tolist()
        for rows in ranks
        for first in range(num_stages // 2)
    ]
    group, _ = dist.new_subgroups_by_enumeration(together, timeout=collective_timeout())
    return group
