"""The gradients of a rank between the last backward pass and the optimizer: completed, measured,
scaled.

The norm of the whole gradient is one formula for every layout. Each rank adds up the squares of the
shards it holds, each divided by the number of ranks that hold the same shard. One sum over all
ranks of the world gives the square of the norm. (torch's get_total_norm takes neither DTensors of
several meshes nor pipeline stages.)

Where sums are exact, the squares of each row are added up by themselves, in one order, and then
rows as `exact_sums` does. A rank takes its share of the rows that others hold as well.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.local_part import local_part
from paceline.comm.mesh import Meshes, num_shards
from paceline.config.layout import Layout
from paceline.parallel import tp_plan
from paceline.parallel.exact_sums import exact_sums, row_squares
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
        *,
        exact: bool = False,
        is_planned: bool = False,
    ) -> None:
        """`is_planned`: tp cuts the module by a person's plan."""
        self._module, self._is_exact = module, exact
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in trained]
        self._tied = TiedParameters()
        if meshes is not None and layout.pp != 1:
            self._tied = find_tied_parameters(trained, meshes.dense)
            if exact and layout.schedule == "dualpipe":
                self._tied = self._tied.without_copies()
        ranks_of_a_stage = layout.num_ranks // layout.pp
        self._num_holders = [
            ranks_of_a_stage * self._tied.num_holders.get(name, 1) / num_shards(parameter)
            for name, parameter in trained
        ]
        self._places = _places(trained, meshes, self._tied.first) if exact else []
        self._experts = [parameter for parameter in self._parameters if _is_expert(parameter)]
        self._num_expert_ranks = layout.ep
        self._planned = trained if is_planned and layout.tp != 1 else []
        self._to_check = meshes.dense.get_group("tp") if self._planned and meshes else None

    def finish(self) -> Tensor:
        """Complete the gradients after the last micro-batch.

        Returns:
            this rank's share of the squared norm of the whole gradient: () fp64; as an exact sum
            (WIDTH,) where sums are exact.
        """
        finish_gradients(self._module)
        self._tied.sum_gradients()
        self._finish_planned()
        if self._is_exact:
            return self._exact_squared_norm()
        self._average_experts()
        return self._squared_norm()

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a () tensor."""
        held = [local_part(p.grad) for p in self._parameters if p.grad is not None]
        torch._foreach_mul_(held, factor.to(held[0]))

    def _finish_planned(self) -> None:
        """Complete what a person's plan cuts; after the first step, look whether it is right."""
        tp_plan.finish_gradients(parameter for _, parameter in self._planned)
        if self._to_check is not None:
            tp_plan.check_whole_gradients(self._planned, self._to_check)
            self._to_check = None

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

    def _exact_squared_norm(self) -> Tensor:
        squares = []
        each = zip(self._parameters, self._places, self._num_holders, strict=True)
        for parameter, place, holders in each:
            if parameter.grad is not None:
                rows = torch.atleast_1d(local_part(parameter.grad))
                first, last = (len(rows) * share // round(holders) for share in (place, place + 1))
                squares.append(row_squares(rows[first:last]))
        return exact_sums(torch.cat(squares)[None])[0]


def _places(
    named: Sequence[tuple[str, nn.Parameter]], meshes: Meshes | None, first: Mapping[str, int]
) -> list[int]:
    """This rank's number among those that hold the same of each parameter, copies counted."""
    seen: Counter[str] = Counter()
    places = []
    for name, parameter in named:
        place = first.get(name, 0) + seen[name]
        seen[name] += 1
        if meshes is not None:
            mesh = meshes.experts if _is_expert(parameter) else meshes.dense
            assert mesh is not None
            for axis in mesh.mesh_dim_names or ():
                if axis != "pp" and axis not in _split_axes(parameter):
                    place = place * mesh[axis].size() + mesh.get_local_rank(axis)
        places.append(place)
    return places


def _split_axes(parameter: Tensor) -> set[str]:
    """Axes of the mesh along which ranks hold different pieces of a parameter."""
    if not isinstance(parameter, DTensor):
        return set()
    pairs = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return {axis for axis, placement in pairs if not placement.is_replicate()}


def _is_expert(parameter: Tensor) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "ep" in (names or ())
