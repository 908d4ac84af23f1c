"""Parameters that several pipeline ranks hold: their gradients are summed over the holders.

Two things tie parameters: tied embeddings, whose weight the first and the last stage
use, and DualPipe, which gives every stage to two ranks. Each holder has the gradient of its own
use; the sum of them is that of the parameter. As all of them start equal and take the same steps,
they stay equal.

It is communication over the axis pp that nothing hides: once a step, after the last micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.comm.collectives import sum_together
from paceline.comm.local_part import local_part
from paceline.comm.mesh import columns
from paceline.comm.records import all_gather

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass
class TiedParameters:
    """What this rank shares with others of its pipeline."""

    num_holders: Mapping[str, int] = field(default_factory=dict)
    """Copies of each of this rank's parameters in the pipeline, those on this rank included."""
    first: Mapping[str, int] = field(default_factory=dict)
    """Copies of each on the pipeline ranks before this one."""
    shared: list[tuple[dist.ProcessGroup, list[list[nn.Parameter]]]] = field(default_factory=list)
    """Per set of holders, the parameters, each with its copies on this rank."""
    local: list[list[nn.Parameter]] = field(default_factory=list)
    """Parameters with several copies on this rank and none elsewhere."""

    def sum_gradients(self) -> None:
        """Give every copy the sum of the gradients of all copies."""
        for copies in self.local:
            _put(copies, _sum(copies))
        for group, parameters in self.shared:
            sums = [_sum(copies) for copies in parameters]
            sum_together(sums, group)
            for copies, total in zip(parameters, sums, strict=True):
                _put(copies, total)

    def without_copies(self) -> "TiedParameters":
        """Of ranks that hold the same stages (DualPipe), whose gradients are summed already: only
        different stages on one rank are left to be added."""
        copies = [*self.local, *(each for _, shared in self.shared for each in shared)]
        local = [each for each in copies if len(each) > 1]
        return TiedParameters(self.num_holders, self.first, local=local)


class CopyCounts(NamedTuple):
    """How many copies of parameters the ranks of a pipeline hold."""

    by_rank: list[dict[str, int]]
    """Of each pipeline rank, by the names that parameters have in the whole network."""
    rank: int
    """This one."""

    def total(self, name: str) -> int:
        """On all ranks."""
        return sum(count.get(name, 0) for count in self.by_rank)

    def before(self, name: str) -> int:
        """On the ranks before this one."""
        return sum(count.get(name, 0) for count in self.by_rank[: self.rank])


def count_copies(names: Iterable[str], dense: DeviceMesh) -> CopyCounts:
    """Learn who holds what; all ranks of a pipeline call it.

    Args:
        names: of this rank's parameters; one comes once for each copy.
        dense: the mesh with the axis "pp".
    """
    pipeline = dense["pp"]
    own = dict(Counter(names))
    counts = [own] if pipeline.size() == 1 else all_gather(own, pipeline.get_group())
    return CopyCounts(counts, pipeline.get_local_rank())


def find_tied_parameters(named: Named, dense: DeviceMesh) -> TiedParameters:
    """Learn from the other ranks of the pipeline who holds what; all ranks of the world call it.

    Args:
        named: this rank's parameters by the names they have in the whole network; a name comes
            once for each copy.
        dense: the mesh with the axis "pp".
    """
    mine: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named:
        mine[name].append(parameter)
    found = count_copies((name for name in mine for _ in mine[name]), dense)
    counts = found.by_rank
    shared: dict[tuple[int, ...], list[list[nn.Parameter]]] = {}
    for holders in _holder_sets(counts):
        names = [name for name in mine if _holders(counts, name) == holders]
        shared[holders] = [mine[name] for name in sorted(names)]
    groups = {holders: _group_of(dense, holders) for holders in shared}  # all ranks, in one order
    return TiedParameters(
        num_holders={name: found.total(name) for name in mine},
        first={name: found.before(name) for name in mine},
        shared=[(groups[holders], copies) for holders, copies in shared.items() if copies],
        local=[
            copies
            for name, copies in mine.items()
            if len(copies) > 1 and len(_holders(counts, name)) == 1
        ],
    )


def _holders(counts: list[dict[str, int]], name: str) -> tuple[int, ...]:
    return tuple(rank for rank, count in enumerate(counts) if name in count)


def _holder_sets(counts: list[dict[str, int]]) -> list[tuple[int, ...]]:
    """The sets of pipeline ranks that share some parameter; the same list on every rank."""
    names = {name for count in counts for name in count}
    sets = {_holders(counts, name) for name in names}
    return sorted(holders for holders in sets if len(holders) > 1)


def _group_of(dense: DeviceMesh, holders: tuple[int, ...]) -> dist.ProcessGroup:
    """This rank's group of holders: every pipeline of the mesh makes its own, so all must call."""
    ranks = [[column[index] for index in holders] for column in columns(dense, "pp")]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    return group


def _sum(copies: list[nn.Parameter]) -> Tensor:
    gradients = [_local_gradient(parameter) for parameter in copies]
    return torch.stack(gradients).sum(dim=0) if len(gradients) > 1 else gradients[0]


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local_part(parameter))
    return local_part(gradient)


def _put(copies: list[nn.Parameter], total: Tensor) -> None:
    for parameter in copies:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _local_gradient(parameter).copy_(total)
