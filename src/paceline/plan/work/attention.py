"""The attention layer of a block: its products, its core, and the exchanges of context parallelism.

Papers: ring attention https://arxiv.org/abs/2310.01889, Ulysses https://arxiv.org/abs/2309.14509.
"""

import numpy as np

from paceline.config.layers import LatentAttention
from paceline.config.model import Model, mean_keys
from paceline.plan.points import Array, Points, Setting
from paceline.plan.work.lists import (
    FP32,
    LINEAR,
    AttentionOp,
    CollectiveOp,
    MatmulOp,
    MemoryOp,
    PartWork,
    Sizes,
    like,
)


def plain_attention(model: Model, points: Points, sizes: Sizes) -> PartWork:
    """The products around the core: queries, keys and values, and the way back."""
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    m, k = sizes.tokens, like(hidden)
    # Where there are more tp ranks than key heads, each makes a part of one and gathers the rest.
    own_key = np.maximum(key / points.tp, model.head_dim)
    has_biases = model.qkv_bias or model.bias
    biases = (query + 2 * key if has_biases else 0) / points.tp + (hidden if model.bias else 0)
    biases = biases + (model.num_heads if model.sinks else 0) / points.tp
    norms = 2.0 * model.head_dim if model.qk_norm else 0.0
    turned = (query / points.tp + own_key) * (model.rope_dim / model.head_dim)
    rotated = _rotation(sizes, turned) if model.rope_dim else ()
    outward = MatmulOp(m, k, query / points.tp, LINEAR)
    key_or_value = MatmulOp(m, key / points.tp, k, LINEAR, readers=3)
    inward: tuple[MatmulOp, ...] = (MatmulOp(m, query / points.tp, k, LINEAR, readers=3),)
    inward += (key_or_value, key_or_value)
    if sizes.merged:
        inward = (MatmulOp(m, (query + 2 * key) / points.tp, k, LINEAR),)
    return PartWork(
        products=(*inward, outward),
        sweeps=rotated + (_head_norms(sizes, query / points.tp + own_key) if norms else ()),
        exchanges=_key_heads(model, points, sizes),
        params=hidden * 2 * (query + key) / points.tp + biases + norms,
        tensors=len(inward) + 1 + (len(inward) if has_biases else 0) + (2 if norms else 0),
    )


def _key_heads(model: Model, points: Points, sizes: Sizes) -> tuple[CollectiveOp, ...]:
    """A gather of a key head's keys and values among the ranks that share it, and a scatter of
    their gradients' sums."""
    sharers = np.maximum(points.tp / model.num_kv_heads, 1)
    whole = 2 * sizes.tokens * model.head_dim * sizes.value_bytes
    gather = CollectiveOp("tp", "all_gather", whole, sharers, like(1), 1.0, False, "selective")
    return gather, gather._replace(op="reduce_scatter", backward=True, again="")


def _rotation(sizes: Sizes, width: Array) -> tuple[MemoryOp, ...]:
    """Rotary positions of queries and keys; eager, the products are in fp32 (models/rope.py)."""
    value = sizes.value_bytes
    eager = 5 * value + 6 * FP32
    per_number = np.where(sizes.fused, 2 * value, eager)
    kernels = np.where(sizes.fused, 2.0, 10.0)
    num_bytes = sizes.tokens * width * per_number
    return MemoryOp(num_bytes, kernels, False), MemoryOp(num_bytes, kernels, True)


def _head_norms(sizes: Sizes, width: Array) -> tuple[MemoryOp, ...]:
    passed = sizes.tokens * width * sizes.value_bytes
    kernels = np.where(sizes.fused, 1.0, 2.0)
    return MemoryOp(2 * passed, kernels, False), MemoryOp(4 * passed, 2 * kernels, True)


def latent_attention(
    model: Model, latent: LatentAttention, points: Points, sizes: Sizes
) -> PartWork:
    """The products of latent attention; the narrow vectors are whole on every tp rank."""
    hidden, tp = model.hidden_size, points.tp
    query = model.num_heads * latent.head_dim / tp
    pair = model.num_heads * (latent.nope_dim + latent.v_dim) / tp
    value = model.num_heads * latent.v_dim / tp
    m, k = sizes.tokens, like(hidden)
    narrow = like(latent.kv_rank + latent.rope_dim)
    products = [
        MatmulOp(m, narrow, k, LINEAR),
        MatmulOp(m, pair, like(latent.kv_rank), LINEAR),
        MatmulOp(m, k, value, LINEAR),
    ]
    if latent.q_rank is None:
        products.append(MatmulOp(m, query, k, LINEAR))
    else:
        rank = like(latent.q_rank)
        products += [MatmulOp(m, rank, k, LINEAR), MatmulOp(m, query, rank, LINEAR)]
    params = sum(product.n * product.k for product in products)
    ranks = (latent.q_rank or 0) + latent.kv_rank
    turned = (model.num_heads / tp + 1) * latent.rope_dim
    # Heads are put together from parts that are rotated and parts that aren't: one copy each.
    copies = 2 * m * (query + pair) * sizes.value_bytes
    return PartWork(
        products=tuple(products),
        sweeps=(
            *_rotation(sizes, turned),
            *_head_norms(sizes, like(ranks)),
            MemoryOp(np.where(sizes.fused, 0.5, 1.0) * copies, like(3), False),
            MemoryOp(np.where(sizes.fused, 0.5, 1.0) * copies, like(3), True),
        ),
        params=params + ranks,
        tensors=len(products) + (1 if latent.q_rank is None else 2),
    )


def core(setting: Setting, points: Points, sizes: Sizes, window: int | None) -> PartWork:
    """Attention proper, whole or around a ring, and the exchanges of context parallelism."""
    model = setting.model
    ring = points.cp / points.ulysses
    local = setting.seq_len / ring
    heads = model.num_heads / points.tp / points.ulysses
    whole = AttentionOp(
        points.micro_batch,
        heads,
        local,
        local,
        (model.head_dim + model.value_dim) / 2,
        like(mean_keys(setting.seq_len, window, model.causal) / setting.seq_len),
        ring,
    )
    # Each further block of a ring is merged into what was found so far, in fp32 (cp/ring.py).
    merged = points.micro_batch * heads * local * model.value_dim * (2 * FP32 + sizes.value_bytes)
    merges = np.where(ring > 1, ring, 0)
    return PartWork(
        cores=(whole,),
        sweeps=(
            MemoryOp(merges * merged, 6 * merges, False),
            MemoryOp(merges * merged, 6 * merges, True),
            *_softmax_sweeps(setting, points, sizes, whole),
        ),
        exchanges=_ring_exchanges(setting, points, sizes, ring)
        + _head_exchange(setting, points, sizes),
    )


def _softmax_sweeps(
    setting: Setting, points: Points, sizes: Sizes, core: AttentionOp
) -> tuple[MemoryOp, ...]:
    """What scores in memory cost beyond one kernel that reads them and writes their softmax.

    Kernel by kernel they are cast to fp32, scaled, masked, normalised and cast back. Megatron's
    fused softmax takes sequences of up to 2,048 keys whose samples x heads divide by four, and
    leaves others to those kernels (fused_kernels/scaled_upper_triang_masked_softmax.h).
    """
    if setting.attention != "unfused":
        return ()
    fits = (core.kv_len <= 2048) & (core.batch * core.heads % 4 == 0)
    chain = ~(sizes.fused & (points.compile | fits))
    scores = core.batch * core.heads * core.q_len * core.kv_len * core.calls
    masks = 1.0 if setting.stack.dropout else 0.0
    dropped = masks * (2 * sizes.value_bytes + 1)
    forward = dropped + chain * (4 * sizes.value_bytes + 25)
    backward = dropped + chain * (4 * sizes.value_bytes + 26)
    return (
        MemoryOp(scores * forward, (masks + 6 * chain) * core.calls, False),
        MemoryOp(scores * backward, (masks + 6 * chain) * core.calls, True),
    )


def _ring_exchanges(
    setting: Setting, points: Points, sizes: Sizes, ring: Array
) -> tuple[CollectiveOp, ...]:
    """Hops of keys and values; backward their gradients travel too, in fp32.

    A gather of all of them sends as much, and is hidden about as well.
    """
    model = setting.model
    is_ring = setting.stack.cp_keys == "ring"
    heads = model.num_kv_heads if is_ring else model.num_heads
    numbers = (
        points.micro_batch
        * (setting.seq_len / ring)
        * np.maximum(heads / points.tp / points.ulysses, 1)
        * (model.head_dim + model.value_dim)
    )
    stride = points.tp * points.ulysses

    def hop(number_bytes: Array, count: Array, backward: bool) -> CollectiveOp:
        # Ours keeps the products of each hop, which selective recomputing doesn't repeat; the
        # messages between them are sent again.
        ours = setting.stack.recompute_granularity == "block"
        again = "" if backward else "selective" if ours else "full"
        num_bytes = numbers * number_bytes
        return CollectiveOp("cp", "send_recv", num_bytes, ring, stride, count, backward, again)

    return (
        hop(sizes.value_bytes, ring - 1, False),
        hop(sizes.value_bytes, ring - 1, True),
        hop(np.maximum(sizes.value_bytes, FP32), ring - 1, True),
    )


def _head_exchange(setting: Setting, points: Points, sizes: Sizes) -> tuple[CollectiveOp, ...]:
    """Ulysses: all-to-alls of q, k, v and the result, forward and backward."""
    model, ulysses = setting.model, points.ulysses
    queries = model.num_heads / points.tp
    keys = np.maximum(model.num_kv_heads / points.tp, ulysses)
    width = (model.head_dim + model.value_dim) / 2
    exchanges = []
    for heads in (queries, keys):
        num_bytes = sizes.tokens * heads * width * sizes.value_bytes
        forward = CollectiveOp("cp", "all_to_all", num_bytes, ulysses, points.tp, 2.0, False)
        exchanges += [forward._replace(again="selective"), forward._replace(backward=True)]
    return tuple(exchanges)
