"""Muon: the products that make its update orthogonal, and what ranks swap for them.

How it works, as `train/update_rules.py` does it: matrices that ranks share are swapped, so that
each rank has some of them whole; five iterations of Newton-Schulz take three products each of the
shorter side with itself or with the matrix; what they give is swapped back. Here all matrices are
taken to be shared out evenly.

Papers: https://kellerjordan.github.io/posts/muon/, https://arxiv.org/abs/2502.16982.

Legend of shapes: n points.
"""

from collections.abc import Iterator

import numpy as np

from paceline.config.layout import PRECISIONS
from paceline.config.model import Model
from paceline.plan.data_groups import dense_groups
from paceline.plan.points import Array, Points, Setting
from paceline.plan.price.pace import exchanged_s
from paceline.plan.rates import matmul_s

_ITERATIONS = 5
_FP32 = PRECISIONS.index("fp32")


def muon_s(setting: Setting, points: Points, stepped: Array) -> Array:
    """Seconds of products and exchanges for so many stepped parameters: (n,)."""
    in_fp32 = points.precision == _FP32
    products_s = np.where(in_fp32, *(_product_s(setting, kind) for kind in ("fp32", "bf16")))
    shards, sent = dense_groups(points), stepped * np.where(in_fp32, 4, 2)
    swaps_s = sum(
        2 * exchanged_s(setting.cluster, setting.stack, "all_to_all", sent, ranks, stride)
        for ranks, stride in ((shards.shards, shards.shard_stride), (points.tp, 1))
    )
    return products_s * stepped + swaps_s


def block_matrices(model: Model, layer: int) -> Iterator[tuple[int, int, int]]:
    """How many matrices a block has of each kind, and their sides."""
    hidden, latent, experts = model.hidden_size, model.latent, model.experts
    if latent is None:
        query, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        yield from ((2, query, hidden), (2, keys, hidden))
    else:
        query = model.num_heads * latent.head_dim
        if latent.q_rank is not None:
            yield 1, latent.q_rank, hidden
        yield 1, query, latent.q_rank or hidden
        yield 1, latent.kv_rank + latent.rope_dim, hidden
        yield 1, model.num_heads * (latent.nope_dim + latent.v_dim), latent.kv_rank
        yield 1, model.num_heads * latent.v_dim, hidden
    per_layer = 3 if model.gated else 2
    if experts is None or not model.has_experts(layer):
        yield per_layer, model.ffn_size, hidden
        return
    yield 1, experts.num_experts, hidden
    yield per_layer * experts.num_experts, experts.ffn_size, hidden
    if experts.shared_ffn_size:
        yield per_layer, experts.shared_ffn_size, hidden
        if experts.shared_gate:
            yield 1, 1, hidden


def _product_s(setting: Setting, precision: str) -> float:
    """Seconds for each parameter of the network, those outside of blocks included."""
    model, found = setting.model, 0.0
    for layer in range(model.num_layers):
        for count, rows, columns in block_matrices(model, layer):
            short, long = min(rows, columns), max(rows, columns)
            shapes = ((short, short, long), (short, short, short), (short, long, short))
            one = sum(float(matmul_s(setting.device, precision, *each)) for each in shapes)
            found += count * _ITERATIONS * one
    return found / model.num_params
