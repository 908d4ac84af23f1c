"""The feed-forward layer of a block: dense, or experts with their router and exchange."""

import numpy as np

from paceline.config.layers import Experts
from paceline.config.model import Model
from paceline.plan.points import Array, Points, Setting
from paceline.plan.price.work.lists import (
    FP32,
    LINEAR,
    PLAIN,
    WIDE,
    Exchange,
    Product,
    Sizes,
    Sweep,
    Work,
    like,
)

# Small kernels and host bookkeeping of routing: scores, top-k, sort, counts (models/moe.py).
_ROUTING_KERNELS = 24
# Sorting 8-byte keys, counting and scattering indices: passes over the copies' numbers.
_ROUTING_BYTES_PER_COPY = 8 * 20


def feed_forward(model: Model, points: Points, sizes: Sizes) -> Work:
    """A dense layer, of which each tp rank has some columns."""
    return _mlp(model, sizes, model.ffn_size / points.tp)


def _mlp(model: Model, sizes: Sizes, ffn: Array) -> Work:
    """A feed-forward layer that all tokens of the rank pass."""
    m, k = sizes.tokens, like(model.hidden_size)
    inward = _inward(sizes, Product(m, ffn, k, LINEAR), 2 if model.gated else 1)
    outward = Product(m, k, ffn, LINEAR, ends_block=True)
    matrices = 3 if model.gated else 2
    return Work(
        products=(*inward, outward),
        sweeps=_activation(model, sizes, m * ffn),
        params=matrices * model.hidden_size * ffn,
    )


def _inward(sizes: Sizes, product: Product, number: int) -> tuple[Product, ...]:
    """Products of one input, each by itself or all in one."""
    if not sizes.merged:
        return (product,) * number
    return (product._replace(n=number * product.n),)


def _activation(model: Model, sizes: Sizes, numbers: Array) -> tuple[Sweep, ...]:
    """silu(gate) x up, or GELU, with their gradients: passes over tensors of the inner width."""
    passes = (3, 5, 5, 9) if model.gated else (2, 2, 3, 3)
    fused_forward, forward, fused_backward, backward = passes
    value = numbers * sizes.value_bytes
    return (
        Sweep(
            value * np.where(sizes.fused, fused_forward, forward),
            np.where(sizes.fused | (not model.gated), 1.0, 2.0),
            False,
        ),
        Sweep(
            value * np.where(sizes.fused, fused_backward, backward),
            np.where(sizes.fused | (not model.gated), 1.0, 3.0),
            True,
        ),
    )


def expert_layer(setting: Setting, experts: Experts, points: Points, sizes: Sizes) -> Work:
    """Router, exchange, the experts of this rank, and those that every token passes."""
    model = setting.model
    cut = setting.stack.expert_tp == "tp"
    # Whole experts on every tp rank: each works on its own share of the tokens.
    tokens = sizes.tokens if cut else sizes.tokens / points.tp
    rows = tokens * experts.experts_per_token
    ffn = experts.ffn_size / points.tp if cut else like(experts.ffn_size)
    routed = _routed(setting, experts, points, sizes, rows, ffn)
    shared = Work()
    if experts.shared_ffn_size:
        shared = _mlp(model, sizes, experts.shared_ffn_size / points.tp)
    return _router(setting, experts, tokens) + routed + shared


def _router(setting: Setting, experts: Experts, tokens: Array) -> Work:
    hidden = like(setting.model.hidden_size)
    arithmetic = WIDE if setting.stack.elementwise == "eager" else PLAIN
    products = [Product(tokens, like(experts.num_experts), hidden, arithmetic)]
    if experts.shared_gate:
        products.append(Product(tokens, like(1), hidden, PLAIN))
    copies = tokens * experts.experts_per_token
    scores = tokens * experts.num_experts * FP32 * 6 + copies * _ROUTING_BYTES_PER_COPY
    return Work(
        products=tuple(products),
        sweeps=(
            Sweep(scores, like(_ROUTING_KERNELS), False),
            Sweep(scores / 2, like(_ROUTING_KERNELS / 2), True),
        ),
        params=hidden * sum(product.n for product in products),
    )


def _routed(
    setting: Setting,
    experts: Experts,
    points: Points,
    sizes: Sizes,
    rows: Array,
    ffn: Array,
) -> Work:
    """The busiest rank's experts, and the way of the tokens' copies there and back."""
    model, value = setting.model, sizes.value_bytes
    busy = rows * np.where(points.ep > 1, setting.expert_imbalance, 1.0)
    own = np.maximum(experts.num_experts / points.ep, 1)
    hidden = like(model.hidden_size)
    matrices = 3 if model.gated else 2
    arithmetic = LINEAR if setting.stack.fp8_experts else PLAIN
    inward = _inward(sizes, Product(busy, ffn, hidden, arithmetic, own), matrices - 1)
    outward = Product(busy, hidden, ffn, arithmetic, own, ends_block=not experts.shared_ffn_size)
    # Copies are picked, put in the order of the experts, put back, weighed and added up.
    moved = busy * model.hidden_size * value
    orders = np.where(points.ep > 1, 4, 2) + 3
    kernels = np.where(points.ep > 1, 4.0, 2.0) + 3
    return Work(
        products=(*inward, outward),
        sweeps=(
            *_activation(model, sizes, busy * ffn),
            Sweep(2 * orders * moved, kernels, False),
            Sweep(2 * orders * moved, kernels + 2, True),
        ),
        exchanges=_dispatch(setting, points, rows * model.hidden_size * value),
        expert_params=own * matrices * model.hidden_size * ffn,
        host_syncs=np.where(points.ep > 1, 1.0, 0.0),
    )


def _dispatch(setting: Setting, points: Points, num_bytes: Array) -> tuple[Exchange, ...]:
    """To the experts and back, forward and backward; all wait for the busiest rank."""
    stride = points.tp if setting.stack.expert_tp == "tp" else like(1)
    busy = num_bytes * setting.expert_imbalance

    def exchange(backward: bool) -> Exchange:
        again = "" if backward else "full"
        return Exchange("ep", "all_to_all", busy, points.ep, stride, 2.0, backward, again)

    counts = like(8.0) * points.ep
    told = Exchange("ep", "all_to_all", counts, points.ep, stride, 1.0, False, "selective")
    return exchange(False), exchange(True), told
