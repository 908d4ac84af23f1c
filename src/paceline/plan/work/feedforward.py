"""The feed-forward layer of a block: dense, or experts with their router and exchange."""

import math

import numpy as np

from paceline.config.layers import Experts
from paceline.config.layout import PRECISIONS
from paceline.config.model import Model
from paceline.plan.collectives import num_domains
from paceline.plan.points import Array, Points, Setting
from paceline.plan.work.lists import (
    FP32,
    LINEAR,
    PLAIN,
    WIDE,
    CollectiveOp,
    MatmulOp,
    MemoryOp,
    PartWork,
    Sizes,
    like,
    rows_of_each,
)

_FP8 = PRECISIONS.index("fp8")
# Small kernels and host bookkeeping of routing: scores, top-k, sort, counts (models/moe.py).
_ROUTING_KERNELS = 24
# Sorting 8-byte keys, counting and scattering indices: passes over the copies' numbers.
_ROUTING_BYTES_PER_COPY = 8 * 20
# A number in fp8 on its way, with its part of an fp32 scale for 128 of them.
_DISPATCHED_BYTES = 1 + 4 / 128
# An exchange of tokens over NCCL's all-to-all of as many bytes, those that stay included: 1.09 to
# 1.34 on NVLink (8 to 36 ranks, bf16), 0.89 to 1.09 over InfiniBand (2 to 8 nodes of H100), by the
# measurements of https://github.com/deepseek-ai/DeepEP, docs/README_Hybrid-EP.md.
_TOKENS_TIME = 1.1


def feed_forward(model: Model, points: Points, sizes: Sizes) -> PartWork:
    """A dense layer, of which each tp rank has some columns."""
    biases = ((3 if model.gated else 2) - 1) * model.ffn_size / points.tp + model.hidden_size
    layer = _mlp(model, sizes, model.ffn_size / points.tp)
    return layer + PartWork(params=biases) if model.bias else layer


def _mlp(model: Model, sizes: Sizes, ffn: Array) -> PartWork:
    """A feed-forward layer that all tokens of the rank pass."""
    m, k = sizes.tokens, like(model.hidden_size)
    inward = _inward(sizes, MatmulOp(m, ffn, k, LINEAR), 2 if model.gated else 1)
    outward = MatmulOp(m, k, ffn, LINEAR, ends_block=True)
    matrices = 3 if model.gated else 2
    return PartWork(
        products=(*inward, outward),
        sweeps=_activation(model, sizes, m * ffn),
        params=matrices * model.hidden_size * ffn,
        tensors=len(inward) + 1,
    )


def _inward(sizes: Sizes, product: MatmulOp, number: int) -> tuple[MatmulOp, ...]:
    """Products of one input, each by itself or all in one."""
    if not sizes.merged:
        return (product._replace(readers=number),) * number
    return (product._replace(n=number * product.n),)


def _activation(model: Model, sizes: Sizes, numbers: Array) -> tuple[MemoryOp, ...]:
    """silu(gate) x up, or GELU, with their gradients: passes over tensors of the inner width."""
    passes = (3, 5, 5, 9) if model.gated else (2, 2, 3, 3)
    fused_forward, forward, fused_backward, backward = passes
    value = numbers * sizes.value_bytes
    return (
        MemoryOp(
            value * np.where(sizes.fused, fused_forward, forward),
            np.where(sizes.fused | (not model.gated), 1.0, 2.0),
            False,
        ),
        MemoryOp(
            value * np.where(sizes.fused, fused_backward, backward),
            np.where(sizes.fused | (not model.gated), 1.0, 3.0),
            True,
        ),
    )


def _expert_activation(
    model: Model, experts: Experts, sizes: Sizes, numbers: Array
) -> tuple[MemoryOp, ...]:
    """As `_activation`; limited gates are worked on kernel by kernel (models/feedforward.py)."""
    if experts.gate_limit is None:
        return _activation(model, sizes, numbers)
    value = numbers * sizes.value_bytes
    return MemoryOp(16 * value, like(7), False), MemoryOp(26 * value, like(9), True)


def expert_layer(setting: Setting, experts: Experts, points: Points, sizes: Sizes) -> PartWork:
    """Router, exchange, the experts of this rank, and those that every token passes."""
    model = setting.model
    cut = setting.stack.expert_tp == "tp"
    # Whole experts on every tp rank: each works on its own share of the tokens.
    tokens = sizes.tokens if cut else sizes.tokens / points.tp
    rows = tokens * experts.experts_per_token
    ffn = experts.ffn_size / points.tp if cut else like(experts.ffn_size)
    routed = _routed(setting, experts, points, sizes, rows, ffn)
    shared = PartWork()
    if experts.shared_ffn_size:
        shared = _mlp(model, sizes, experts.shared_ffn_size / points.tp)
    return _router(setting, experts, tokens) + routed + shared


def _router(setting: Setting, experts: Experts, tokens: Array) -> PartWork:
    hidden = like(setting.model.hidden_size)
    arithmetic = WIDE if setting.stack.elementwise == "eager" else PLAIN
    products = [MatmulOp(tokens, like(experts.num_experts), hidden, arithmetic)]
    if experts.shared_gate:
        products.append(MatmulOp(tokens, like(1), hidden, PLAIN))
    copies = tokens * experts.experts_per_token
    scores = tokens * experts.num_experts * FP32 * 6 + copies * _ROUTING_BYTES_PER_COPY
    return PartWork(
        products=tuple(products),
        sweeps=(
            MemoryOp(scores, like(_ROUTING_KERNELS), False),
            MemoryOp(scores / 2, like(_ROUTING_KERNELS / 2), True),
        ),
        params=hidden * sum(product.n for product in products) + experts.num_experts * experts.bias,
        tensors=len(products) + experts.bias,
    )


def _routed(
    setting: Setting,
    experts: Experts,
    points: Points,
    sizes: Sizes,
    rows: Array,
    ffn: Array,
) -> PartWork:
    """The busiest rank's experts, and the way of the tokens' copies there and back."""
    model, value = setting.model, sizes.value_bytes
    busy = rows * np.where(points.ep > 1, setting.busiest_load, 1.0)
    own = np.maximum(experts.num_experts / points.ep, 1)
    used = own + np.where(points.ep > 1, setting.comm.ep.hot_experts, 0)
    hidden = like(model.hidden_size)
    matrices = 3 if model.gated else 2
    arithmetic = LINEAR if setting.stack.fp8_experts else PLAIN
    inward = _inward(sizes, MatmulOp(busy, ffn, hidden, arithmetic, used), matrices - 1)
    outward = MatmulOp(busy, hidden, ffn, arithmetic, used, ends_block=not experts.shared_ffn_size)
    fused = setting.stack.fuses_experts
    biases = (2 * ffn + model.hidden_size) * experts.bias
    return PartWork(
        products=(*inward, outward),
        sweeps=(
            *(() if fused else _expert_activation(model, experts, sizes, busy * ffn)),
            *_by_expert(setting, points, sizes, busy * model.hidden_size, busy * ffn, used),
            *_reordering(setting, experts, points, busy * model.hidden_size * value),
        ),
        exchanges=(
            *_dispatch(setting, experts, points, rows * model.hidden_size, value),
            *_copies(setting, points, matrices * model.hidden_size * ffn + biases, value),
        ),
        expert_params=own * (matrices * model.hidden_size * ffn + biases),
        tensors=(len(inward) + 1) * rows_of_each(setting, outward)[1] + matrices * experts.bias,
        host_syncs=np.where(points.ep > 1, 1.0, 0.0),
    )


def _by_expert(
    setting: Setting, points: Points, sizes: Sizes, outer: Array, inner: Array, own: Array
) -> tuple[MemoryOp, ...]:
    """Passes over what experts read and give (`outer` numbers) and over their inner width that a
    loop over experts adds, kernel by kernel (megatron/core/transformer/moe/experts.py).

    Rows of each expert are padded to what fp8 products take, and cut again, unless the exchange
    makes room. Gates and their inputs are clamped apart and put together; biases of the second
    product are weighed and added in fp32, expert by expert, put together and cast.
    """
    stack, value = setting.stack, sizes.value_bytes
    if stack.grouped_products == "kernel" or stack.fuses_experts:
        return ()
    pads = (points.precision == _FP8) & stack.fp8_experts & (stack.expert_exchange == "copies")
    forward = backward = np.where(pads, 4.0, 0.0) * outer * value
    kernels = np.where(pads, 2.0, 0.0)
    if stack.expert_biases == "eager":
        clamps = 2 * inner * value
        forward = forward + 4 * clamps + outer * (2 * value + 6 * FP32)
        backward = backward + 5 * clamps + outer * (6 * value + 7 * FP32)
        kernels = kernels + 4 + 2 * own
    return MemoryOp(forward, kernels, False), MemoryOp(backward, kernels, True)


def _reordering(
    setting: Setting, experts: Experts, points: Points, copies_bytes: Array
) -> tuple[MemoryOp, ...]:
    """Copies are picked, put in the order of the experts, put back, weighed and added up.

    Fused, picking writes each copy and reads the tokens once, adding up does the reverse; what an
    all-to-all brings is sorted by experts in between, there and back. Where tokens travel once, the
    copies are made of what arrived.
    """
    spread = points.ep > 1
    orders, kernels = np.where(spread, 4.0, 2.0) + 3, np.where(spread, 4.0, 2.0) + 3
    passes = 2 * orders
    if setting.stack.elementwise == "fused":
        arrived, sorts = np.ones(1), np.where(spread, 4.0, 0.0)
        if setting.stack.expert_exchange == "tokens":
            arrived, sorts = _places(experts, points.ep), np.zeros(1)
        passes = 2 * (1 + arrived / experts.experts_per_token) + sorts
        kernels = 2 + sorts / 2
    num_bytes = passes * copies_bytes
    return MemoryOp(num_bytes, kernels, False), MemoryOp(num_bytes, kernels + 2, True)


def _places(experts: Experts, num_places: Array) -> Array:
    """Expected places, of so many that share the experts, where a token has any of its own.

    A token that chooses groups first has experts in these alone: of the groups in a place, or of
    the places that share a group, some are not chosen.
    """
    chosen_experts = experts.num_experts * experts.groups_per_token / experts.num_groups
    groups = np.maximum(experts.num_groups / num_places, 1)
    own = experts.num_experts / np.maximum(num_places, experts.num_groups)
    missed: Array = np.zeros(1)
    for here in range(experts.groups_per_token + 1):
        # So many of the place's groups are chosen, and the token's experts all in others.
        none: Array = np.ones(1)
        for taken in range(experts.experts_per_token):
            none = none * np.maximum(1 - here * own / (chosen_experts - taken), 0)
        missed = missed + _chance(experts, groups, here) * none
    return num_places * (1 - missed)


def _chance(experts: Experts, groups: Array, chosen: int) -> Array:
    """Chance that a token chooses so many of these `groups` of experts (hypergeometric)."""
    total, picks = experts.num_groups, experts.groups_per_token
    found: Array = np.full(1, float(math.comb(picks, chosen)))
    for taken in range(picks):
        left = groups - taken if taken < chosen else total - groups - (taken - chosen)
        found = found * np.maximum(left, 0) / (total - taken)
    return found


def _sent_share(setting: Setting, experts: Experts, points: Points, stride: Array) -> Array:
    """Of the copies' bytes, those that travel, as an all-to-all would count them.

    Tokens that stay on their rank, or node, pass through the same buffers.
    """
    if setting.stack.expert_exchange == "copies":
        return np.ones(1)
    nodes = num_domains(setting.cluster, points.ep, stride)
    places = np.where(nodes > 1, nodes, points.ep)
    staying = np.maximum(1 - 1 / places, 0.5)
    tokens = _places(experts, places) / experts.experts_per_token
    return _TOKENS_TIME * tokens / staying


def _dispatch(
    setting: Setting, experts: Experts, points: Points, numbers: Array, value_bytes: Array
) -> tuple[CollectiveOp, ...]:
    """To the experts and back, forward and backward; all wait for the busiest rank.

    Rows of copied experts don't travel: each is taken to have the mean load, and all together what
    the busiest rank has above the mean.
    """
    stride = points.tp if setting.stack.expert_tp == "tp" else like(1)
    eight_bit = (points.precision == _FP8) & (setting.stack.dispatch_dtype == "fp8")
    each = np.where(eight_bit, (_DISPATCHED_BYTES + value_bytes) / 2, value_bytes)
    share = _sent_share(setting, experts, points, stride)
    hot = setting.comm.ep.hot_experts
    if hot:
        above = (setting.expert_imbalance - 1) / points.ep
        share = share * np.maximum(1 - hot / experts.num_experts - above, 0)
    busy = numbers * each * setting.busiest_load * share

    def exchange(backward: bool) -> CollectiveOp:
        again = "" if backward else "full"
        return CollectiveOp("ep", "all_to_all", busy, points.ep, stride, 2.0, backward, again)

    counts = like(8.0) * points.ep
    told = CollectiveOp("ep", "all_to_all", counts, points.ep, stride, 1.0, False, "selective")
    return exchange(False), exchange(True), told


def _copies(
    setting: Setting, points: Points, numbers: Array, value_bytes: Array
) -> tuple[CollectiveOp, ...]:
    """Weights of hot experts to all ranks of ep, and gradients back, in fp32 at least, where they
    train; owners send and sum up what is theirs. `numbers`: of an expert."""
    hot = setting.comm.ep.hot_experts
    if not hot:
        return ()
    stride = points.tp if setting.stack.expert_tp == "tp" else like(1)
    there = ("ep", "broadcast", hot * numbers * value_bytes, points.ep, stride, 1.0, False)
    if setting.finetune.is_adapted:
        return (CollectiveOp(*there, "selective"),)
    sums = hot * numbers * np.maximum(value_bytes, FP32)
    # A reduction sends what a broadcast does, the other way.
    back = CollectiveOp("ep", "broadcast", sums, points.ep, stride, 1.0, True)
    return CollectiveOp(*there, "selective"), back
