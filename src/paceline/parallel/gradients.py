"""The gradients of a rank between the last backward pass and the optimizer: completed, measured,
scaled.

The norm of the whole gradient is one formula for every layout: each rank adds up the squares of the
shards it holds, each divided by the number of ranks that hold the same shard, and one sum over all
ranks of the world gives the square of the norm. (torch's get_total_norm takes neither DTensors of
several meshes nor pipeline stages.)
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.mesh import Meshes, local_part
from paceline.config.frozen import size
from paceline.config.layout import Layout
from paceline.parallel.tied_parameters import TiedParameters, find_tied_parameters
from paceline.parallel.tp import finish_gradients


class Gradients:
    """What it takes to turn what a rank's backward passes left into the gradient of the step."""

    def __init__(
        self,
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        meshes: Meshes | None,
        layout: Layout,
    ) -> None:
        self._module = module
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in trained]
        self._twins = TiedParameters()
        if meshes is not None and layout.pp != 1:
            self._twins = find_tied_parameters(trained, meshes.dense)
        ranks_of_a_stage = layout.num_ranks // size(layout.pp)
        self._num_holders = [
            ranks_of_a_stage * self._twins.num_holders.get(name, 1) / _num_shards(parameter)
            for name, parameter in trained
        ]
        self._experts = [parameter for parameter in self._parameters if _is_expert(parameter)]
        self._num_expert_ranks = size(layout.ep)

    def finish(self) -> Tensor:
        """Complete the gradients after the last micro-batch.

        Returns:
            this rank's share of the squared norm of the whole gradient: () fp64.
        """
        finish_gradients(self._module)
        self._twins.sum_gradients()
        self._average_experts()
        return self._squared_norm()

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a () tensor."""
        held = [local_part(p.grad) for p in self._parameters if p.grad is not None]
        torch._foreach_mul_(held, factor.to(held[0]))

    def _average_experts(self) -> None:
        """Divide by ep: an expert's gradient came from the tokens of all ep ranks at once.

        Every rank's loss is a mean over its own tokens, and data parallelism averages the gradients
        over ranks; for experts it knows only of the ranks that hold the same ones.
        """
        held = [local_part(p.grad) for p in self._experts if p.grad is not None]
        if held:
            torch._foreach_mul_(held, 1 / self._num_expert_ranks)

    def _squared_norm(self) -> Tensor:
        held = [
            (local_part(p.grad), holders)
            for p, holders in zip(self._parameters, self._num_holders, strict=True)
            if p.grad is not None
        ]
        gradients = [gradient for gradient, _ in held]
        dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double()
        weights = torch.tensor([1 / holders for _, holders in held], dtype=torch.float64)
        return norms.square() @ weights.to(norms.device)


def _num_shards(parameter: Tensor) -> int:
    """In how many different pieces the ranks of a parameter's mesh hold it."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )


def _is_expert(parameter: Tensor) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "ep" in (names or ())
