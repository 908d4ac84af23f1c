"""Stages: what each stage of a pipeline holds, as arrays over stages and points.

Legend of shapes: k kinds of block, s stages (or pipeline ranks), n points.
"""

from dataclasses import dataclass

from paceline.plan.points import Array


@dataclass(frozen=True, eq=False)
class StageWork:
    """The work of each stage; without a pipeline there is one, which is first and last.

    A search over many points has three classes of stage (first, inner, last) instead of all: then
    `count` says how many stages of a point are of each class, 0 where there is none.
    """

    layers: Array  # (k, s, n), blocks of each kind
    has_embedding: Array  # (s, n), bool
    has_head: Array  # (s, n), bool
    count: Array  # (s, n)


@dataclass(frozen=True, eq=False)
class Holdings:
    """What each pipeline rank holds in memory, over all its stages."""

    layers: Array  # (k, s, n), blocks of each kind
    in_flight: Array  # (k, s, n), blocks x micro-batches whose activations it holds at its peak
    halves: Array  # (k, s, n), those of them whose backward pass is half done
    embeddings: Array  # (s, n), how many embeddings (DualPipe: a rank may hold first and last)
    heads: Array  # (s, n)
    heads_in_flight: Array  # (s, n), micro-batches whose logits it holds at its peak
    with_grads: Array  # (s, n), share of its blocks whose gradients are there before that
