"""How the rotation works on DTensors: each rank turns its own heads, or its own sequences.

Queries and keys are sharded alike: over heads (tensor parallel) with whole tables and weights, or
over the batch, with its tables where each sequence has some. The weights' gradients are then sums
that the ranks have parts of. Along the sequence nothing is sharded here: then the tables are cut as
well, by whoever made them.
"""

from typing import Any

import torch
import torch.distributed as dist

from paceline.kernels.operator import Operator


def register(forward: Operator, backward: Operator) -> None:
    """Tell DTensor of the two operators."""
    if not dist.is_available():
        return
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def places(batch: int, tables: int) -> list[tuple[Any, Any]]:
        """Where heads and tables may lie, together."""
        whole = Replicate()
        by_batch = Shard(0), whole if tables == 1 < batch else Shard(0)
        return [(whole, whole), (Shard(2), whole), by_batch]

    def forward_ways(
        q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, k_weight: Any, eps: float
    ) -> list[tuple[list[Any], list[Any]]]:
        weights = [None if each is None else Replicate() for each in (q_weight, k_weight)]
        return [
            ([heads, heads], [heads, heads, tables, tables, *weights, None])
            for heads, tables in places(q.shape[0], cos.shape[0])
        ]

    def backward_ways(
        q_grad: Any,
        k_grad: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        q_weight: Any,
        k_weight: Any,
        eps: float,
    ) -> list[tuple[list[Any], list[Any]]]:
        weights = [None if each is None else Replicate() for each in (q_weight, k_weight)]
        ways = []
        for heads, tables in places(q_grad.shape[0], cos.shape[0]):
            values = [None if each is None else heads for each in (q, k)]
            total = Partial() if heads.is_shard() and q_weight is not None else Replicate()
            given = [heads, heads, *values, tables, tables, *weights, None]
            ways.append(([heads, heads, total, total], given))
        return ways

    for operator, ways in ((forward, forward_ways), (backward, backward_ways)):
        register_sharding(getattr(torch.ops.paceline, operator.name).default)(ways)
