"""Replicas of shards in compressed form: the replicate axis of HSDP, through the queue.

FSDP2 sums over replicas itself when it is given a mesh with two axes, and offers no seam for that.
So it gets the axis of shards alone, and what it leaves in a parameter's gradient is the mean over
one replica's ranks. FSDP2 calls the parameters' own hooks after it has reduced a unit's gradients.
Then the unit's shards are averaged over the replicas as DDP's buckets are (`replicate`), while the
backward pass goes on.

Errors are kept as shards of the parameters they belong to, so a checkpoint knows where they lie and
any number of shards can go on with them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.comm.collectives import Collectives
from paceline.comm.compress.feedback import BufferPart, ErrorFeedback
from paceline.comm.compress.means import (
    CompressedMean,
    Compressor,
    UncompressedRest,
    buffer_part,
    exact_bytes,
    exact_mean,
    mean_of_parts,
)
from paceline.comm.local_part import local_part
from paceline.comm.queue import CollectiveQueue, Job
from paceline.config.comm import Comm
from paceline.parallel.owed_errors import Owners


@dataclass(eq=False)
class _ReplicaUnit:
    """One unit of FSDP2, and what is kept for it from step to step."""

    parameters: list[nn.Parameter]
    parts: tuple[BufferPart, ...]
    mean: CompressedMean | None
    """None where nothing in it is compressed."""
    flat: Tensor
    """(values of this rank's shards,) fp32 or fp64."""
    num_arrived: int = 0
    """Gradients of this step."""
    views: list[Tensor] = field(init=False)
    """Of `flat`, of each parameter."""

    def __post_init__(self) -> None:
        self.views = list(self.flat.split([part.num_values for part in self.parts]))

    def gradients(self) -> list[Tensor]:
        """This rank's shards of them, flat."""
        held = [parameter.grad for parameter in self.parameters]
        return [local_part(gradient).flatten() for gradient in held if gradient is not None]

    def exact(self) -> list[Tensor]:
        """Views of the parameters that are not compressed."""
        pairs = zip(self.parts, self.views, strict=True)
        return [view for part, view in pairs if not part.is_compressed]


class CompressedReplicaMean:
    """The mean of the replicas' gradients, unit by unit.

    Args:
        module: sharded by FSDP2 over an axis without the replicas; hooks are registered here.
        compressor: of the larger ones; None: of none.
        collectives: among the replicas, which sum up exactly.
        num_reductions: how often in a step FSDP2 reduces a unit's gradients.
        owners: of the errors.
    """

    section = "replica_error"
    """Of a checkpoint: {number: {name: a DTensor of the parameter's form}}, see `Owners`."""

    def __init__(
        self,
        module: nn.Module,
        compressor: Compressor | None,
        collectives: Collectives,
        comm: Comm,
        num_reductions: int,
        owners: Owners,
    ) -> None:
        self._owners, self._comm, self._compressor = owners, comm, compressor
        self._collectives, self._num_reductions = collectives, num_reductions
        self._queue = CollectiveQueue(next(module.parameters()).device, comm.priority)
        self._rest = UncompressedRest(collectives)
        self._is_exact = True
        self._arrived: list[_ReplicaUnit] = []
        self.feedback = ErrorFeedback(collectives.group.rank(), collectives.group.size())
        self.sent_bytes = 0
        """What this rank sent since `begin`."""
        self._parameters = {label: parameter for parameter, label in owners.labels.items()}
        self._units = [self._unit(parameters) for parameters in _own_parameters(module)]
        for unit in self._units:
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(unit))

    def describe(self) -> str:
        """What travels in which form, a sentence for a person."""
        dp = self._comm.dp
        form = f"summed up exactly, by the algorithm {dp.algorithm}"
        if dp.compress != "none":
            form = f"sent as {dp.compress}, with error feedback"
        return f"Between replicas gradients are {form}."

    def begin(self, step: int) -> None:
        """Say which step's gradients come next, from 0."""
        self._is_exact = self._compressor is None or step < self._comm.warmup_steps
        self.sent_bytes = 0

    def finish(self) -> None:
        """Wait until the gradients of the last backward pass are the mean of all replicas.

        Raises:
            RuntimeError: a parameter had no gradient.
            Exception: what went wrong on the queue's thread, with its traceback.
        """
        for unit in self._units:
            if unit not in self._arrived:
                raise RuntimeError(
                    f"{unit.parts[0].name} or a neighbour had no gradient, which replicas in a "
                    'form of ours need: use comm.dp.compress = "none".'
                )
        self._queue.submit(self._rest.average())
        self._queue.flush()
        self._queue.submit(self._conclude())
        self._queue.flush()
        self._queue.wait()
        self._arrived = []

    def _hook(self, unit: _ReplicaUnit) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            unit.num_arrived += 1
            if unit.num_arrived == self._num_reductions * len(unit.parameters):
                unit.num_arrived = 0
                self._arrived.append(unit)
                self._queue.submit(self._average(unit))

        return arrived

    def _average(self, unit: _ReplicaUnit) -> Job:
        torch._foreach_copy_(unit.views, unit.gradients())
        if self._is_exact or unit.mean is None:
            yield from exact_mean(unit.flat, self._collectives)
            self.sent_bytes += exact_bytes(unit.flat.nbytes, self._collectives.group.size())
            return
        self._rest.take(unit.exact())
        yield from unit.mean.average(unit.flat, self.feedback.span(unit.parts, unit.flat))
        self.sent_bytes += unit.mean.sent_bytes

    def _conclude(self) -> Job:
        """Give FSDP2's gradients the means; waits for nothing."""
        yield from ()
        num_bytes = self._rest.put_back()
        self.sent_bytes += exact_bytes(num_bytes, self._collectives.group.size())
        for unit in self._arrived:
            torch._foreach_copy_(unit.gradients(), unit.views)

    def _unit(self, parameters: list[nn.Parameter]) -> _ReplicaUnit:
        held = [local_part(parameter) for parameter in parameters]
        parts = tuple(map(self._part, parameters, held))
        wide = torch.promote_types(held[0].dtype, torch.float32)
        flat = held[0].new_empty(sum(part.num_values for part in parts), dtype=wide)
        return _ReplicaUnit(parameters, parts, mean_of_parts(self._compressor, parts, flat), flat)

    def _part(self, parameter: nn.Parameter, held: Tensor) -> BufferPart:
        label, least = self._owners.labels[parameter], self._comm.compress_from
        return buffer_part(label, parameter, held.shape, self._compressor, least)

    @property
    def held(self) -> list[Tensor]:
        """The buffers that hold all errors."""
        return self.feedback.held

    def squared_norm(self) -> Tensor:
        """The sum of squares of this rank's errors: () fp64."""
        return self.feedback.squared_norm()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps: {number: {name: error, a DTensor like the parameter}}."""
        (errors,) = self.feedback.state().values()
        shaped = {label: _like(self._parameters[label], error) for label, error in errors.items()}
        return self._owners.numbered(shaped)

    def targets(
        self, saved: Iterable[str], _room: Callable[[str], Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """Room for the part of a saved state that this rank loads, in the same form.

        Args:
            saved: paths of the tensors that were saved: "replica_error.0.layer.weight".
        """

        def shard(_path: str, label: str) -> Tensor:
            parameter = self._parameters[label]
            held = local_part(parameter)
            wide = torch.promote_types(held.dtype, torch.float32)
            return _like(parameter, held.new_zeros(held.numel(), dtype=wide))

        return self._owners.to_load(self.section, saved, shard)

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on with what `targets` gave, now filled."""
        self.feedback.load(
            {
                number: {label: local_part(error).flatten() for label, error in errors.items()}
                for number, errors in self._owners.labelled(state).items()
            }
        )


def _like(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """This rank's values of something of a parameter's form."""
    if not isinstance(parameter, DTensor):
        return flat.view(parameter.shape)
    return DTensor.from_local(
        flat.view(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _own_parameters(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The parameters that are trained of each unit of FSDP2, without those of units inside it."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    seen: set[nn.Parameter] = set()
    for unit in reversed(units):
        assert isinstance(unit, nn.Module)
        own = [p for p in unit.parameters() if p.requires_grad and p not in seen]
        seen.update(own)
        if own:
            yield own
