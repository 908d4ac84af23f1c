"""How operators work on DTensors: each rank on its own shard, with nothing sent.

An operator that launches kernels is opaque, so DTensor has to be told what it may do. Rows (all
dimensions but the last) are independent of each other: tensors of rows stay sharded along any of
these, tensors that all rows share are whole on every rank, and what is summed over rows comes out
as a partial sum. Inputs that lie otherwise are redistributed first, by DTensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.kernels.operator import Operator


def by_rows(operator: Operator, takes: str, gives: str, num_whole_dims: int = 1) -> None:
    """Tell DTensor of an operator on rows.

    Args:
        operator: its first tensor is one of rows.
        takes: what its first arguments are, those that may be tensors: "rows" or "whole", in order.
        gives: what its results are: "rows", or a "sum" over them.
        num_whole_dims: last dimensions that may not be sharded; 0 where the operator works element
            by element.
    """
    if not dist.is_available():
        return
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def ways(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        num_dims = arguments[0].ndim
        places = Replicate(), *(Shard(dim) for dim in range(num_dims - num_whole_dims))
        return [(_results(place), _inputs(place, arguments)) for place in places]

    def _results(place: Any) -> list[Any]:
        total = Partial() if place.is_shard() else place
        return [place if kind == "rows" else total for kind in gives.split()]

    def _inputs(place: Any, arguments: Sequence[Any]) -> list[Any]:
        kinds = takes.split()
        kinds += ["no tensor"] * (len(arguments) - len(kinds))
        placed = {"rows": place, "whole": Replicate(), "no tensor": None}
        return [
            None if argument is None else placed[kind]
            for kind, argument in zip(kinds, arguments, strict=True)
        ]

    register_sharding(getattr(torch.ops.paceline, operator.name).default)(ways)
