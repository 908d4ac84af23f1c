"""Work: the operators of a network's parts, as data: what a rank computes, moves and sends.

A part is a block of some kind, the embedding, or the head with the loss. For each of them the work
of one micro-batch on one rank is listed: matrix products, attention cores, sweeps (kernels that
only move data) and exchanges (collectives in the way of the computation). Nothing is timed here;
`paceline.plan.price.step` does that, in a few calls for all parts together. Sizes are columns over
points (`paceline.plan.points`), so that a list stands for one layout or for millions.

How it works: the lists follow what our own runtime runs (`paceline.models`, `paceline.parallel`),
counted operator by operator, and the features of a Stack change them where other systems do
otherwise: fused element-wise kernels, scores in memory, experts that tp doesn't cut.

It is not a tracer: it knows decoders, whose shapes a Model gives. Collectives of the data axes are
not here, for they belong to units of parameters: see `paceline.plan.price.data_axes`.

Papers: activation sizes and sequence parallel https://arxiv.org/abs/2205.05198; ring attention
https://arxiv.org/abs/2310.01889; Ulysses https://arxiv.org/abs/2309.14509.
"""

from dataclasses import replace

import numpy as np

from paceline.config.layout import PRECISIONS
from paceline.plan.block_kinds import BlockKind
from paceline.plan.points import Array, Points, Setting
from paceline.plan.work.adapters import frozen, with_adapters
from paceline.plan.work.attention import core, latent_attention, plain_attention
from paceline.plan.work.feedforward import expert_layer, feed_forward
from paceline.plan.work.lists import (
    FP32,
    LINEAR,
    PLAIN,
    WIDE,
    AttentionOp,
    CollectiveOp,
    MatmulOp,
    MemoryOp,
    PartWork,
    Sizes,
    autocasts,
    enter_or_leave,
    like,
    rows_of_each,
    sizes_of,
)

__all__ = [
    "LINEAR",
    "PLAIN",
    "WIDE",
    "AttentionOp",
    "CollectiveOp",
    "MatmulOp",
    "MemoryOp",
    "PartWork",
    "Sizes",
    "autocasts",
    "block_work",
    "embedding_work",
    "head_work",
    "rows_of_each",
    "sizes_of",
]

_FP8 = PRECISIONS.index("fp8")
# Passes over fp32 logits, read or written (megatron/core/tensor_parallel/cross_entropy.py of
# https://github.com/NVIDIA/Megatron-LM): the largest, its difference, the exponential, their sum
# and the quotient; backward the product with the loss's gradient.
_STEPS_FORWARD, _STEPS_BACKWARD = 8, 2


def block_work(setting: Setting, points: Points, kind: BlockKind) -> PartWork:
    """A block of this kind."""
    model, sizes = setting.model, sizes_of(setting, points)
    attention = (
        plain_attention(model, points, sizes)
        if model.latent is None
        else latent_attention(model, model.latent, points, sizes)
    )
    dense_or_experts = (
        feed_forward(model, points, sizes)
        if model.experts is None or not kind.has_experts
        else expert_layer(setting, model.experts, points, sizes)
    )
    whole = (
        attention
        + core(setting, points, sizes, kind.window)
        + dense_or_experts
        + _stream(setting, sizes)
        + _biases(setting, points, sizes)
        + _tensor_parallel(setting, points, sizes, kind.has_experts)
    )
    if not setting.finetune.is_adapted:
        return whole
    first = 0 if model.latent is not None else len(attention.products) - 1
    return with_adapters(setting, points, sizes, kind, whole, first)


def embedding_work(setting: Setting, points: Points) -> PartWork:
    """The look-up, and what its gradient does to the table."""
    model, sizes = setting.model, sizes_of(setting, points)
    positions = model.num_position_params
    table = (model.num_embedding_params + positions) / points.tp
    stream = sizes.tokens * model.hidden_size * sizes.stream_bytes
    part = PartWork(
        sweeps=(
            MemoryOp((5 if positions else 2) * stream, like(3 if positions else 1), False),
            # The gradient of the table is dense: it is filled with zeros, then rows are added.
            MemoryOp(table * sizes.stream_bytes + 3 * stream, like(3), True),
        ),
        # Each tp rank has some rows of the table: the sum goes to the stream.
        exchanges=enter_or_leave(points, stream, 2.0 if positions else 1.0, leave=True),
        params=table,
        tensors=2 if positions else 1,
    )
    return replace(frozen(part), reached=0.0) if setting.finetune.is_adapted else part


def head_work(setting: Setting, points: Points) -> PartWork:
    """The last norm, the head and the loss."""
    model, sizes = setting.model, sizes_of(setting, points)
    hidden, vocab = model.hidden_size, model.vocab_size / points.tp
    asked = sizes.tokens * setting.loss_share
    logits = asked * vocab
    forward, backward = _loss_bytes(setting, sizes)
    stream = sizes.stream_tokens * hidden * sizes.stream_bytes
    products: tuple[MatmulOp, ...] = (MatmulOp(asked, vocab, like(hidden), PLAIN),)
    layer = 0
    if model.head_layer:  # on the tokens that a rank has of the stream: a product, GELU, a norm
        products += (MatmulOp(sizes.stream_tokens, like(hidden), like(hidden), PLAIN),)
        layer = 4
    own = 0 if model.tie_embeddings else model.num_embedding_params
    own += model.vocab_size if model.head_bias else 0
    part = PartWork(
        products=products,
        sweeps=(
            MemoryOp((2 + layer) * stream, like(1 + layer / 2), False),
            MemoryOp((4 + 2 * layer) * stream, like(2 + layer), True),
            MemoryOp(logits * forward, like(4), False),
            MemoryOp(logits * backward, like(3), True),
        ),
        exchanges=_head_exchanges(points, sizes, hidden),
        params=model.num_end_norm_params + model.num_head_layer_params + own / points.tp,
        tensors=(1 if model.tie_embeddings else 2) + (4 if model.head_layer else 0),
    )
    return frozen(part) if setting.finetune.is_adapted else part


def _loss_bytes(setting: Setting, sizes: Sizes) -> tuple[Array, Array]:
    """Bytes moved per logit: a copy in fp32, log-softmax, and their gradients (decoder.py)."""
    value = sizes.value_bytes
    if setting.stack.logits == "fp32":
        upcast = np.where(value < FP32, value + FP32, 0)
        if setting.stack.steps_loss:
            return upcast + _STEPS_FORWARD * FP32, _STEPS_BACKWARD * FP32 + upcast
        return upcast + 2 * FP32, 3 * FP32 + upcast
    if setting.stack.logits == "bf16":
        return 2 * value, 3 * value
    return 1 * value, 2 * value  # chunk by chunk, the gradient in place


def _head_exchanges(points: Points, sizes: Sizes, hidden: int) -> tuple[CollectiveOp, ...]:
    """The head sees all tokens; of each token's loss the largest score is found, then two sums."""
    whole = sizes.tokens * hidden * sizes.value_bytes
    largest, sums = (
        CollectiveOp("tp", "all_reduce", n * sizes.tokens * FP32, points.tp, like(1), 1.0, False)
        for n in (1, 2)
    )
    return (*enter_or_leave(points, whole, 1.0, leave=False), largest, sums)


def _stream(setting: Setting, sizes: Sizes) -> PartWork:
    """Norms, residual sums, casts and dropout: what happens to the residual stream."""
    hidden, norms = setting.model.hidden_size, setting.model.num_block_norms
    stream = sizes.stream_tokens * hidden * sizes.stream_bytes
    # Two norms (or one) and two sums; fused, each sum and norm is one pass over two inputs and
    # outputs. Backward: each norm, and the sum of the gradients of the branches (three of q, k and
    # v, two of gate and up).
    forward, backward = np.where(sizes.fused, 8, 10), np.where(sizes.fused, 14, 26)
    forward, backward = forward - 2 * (2 - norms), backward - 4 * (2 - norms)
    if setting.finetune.is_adapted:  # no product with normalised values, and no sum of it
        backward = backward - np.where(sizes.fused, 0, 4 * norms)
    kernels, backward_kernels = np.where(sizes.fused, 3.0, 4.0), np.where(sizes.fused, 6.0, 12.0)
    dropped = 4.0 if setting.stack.dropout else 0.0
    casts = np.where(sizes.casts, 5 * sizes.tokens * hidden * 6, 0)
    return PartWork(
        sweeps=(
            MemoryOp(stream * (forward + dropped) + casts, kernels + 5 * sizes.casts, False),
            MemoryOp(
                stream * (backward + dropped) + casts, backward_kernels + 5 * sizes.casts, True
            ),
        ),
        params=like(float(norms * setting.model.norm_params)),
        tensors=norms,
        in_block=True,
    )


def _biases(setting: Setting, points: Points, sizes: Sizes) -> PartWork:
    """Biases of linear layers and norms (GPT, BERT). Adding one is part of the next kernel; its
    gradient is a sum over the tokens. Published networks without gates have them, said or not.
    """
    model = setting.model
    if setting.finetune.is_adapted or (model.gated and not model.bias) or model.experts is not None:
        return PartWork()
    width = (3 * model.hidden_size + model.ffn_size) / points.tp + 2 * model.hidden_size
    summed = sizes.tokens * width * sizes.value_bytes
    return PartWork(sweeps=(MemoryOp(summed, like(4), True),), tensors=6)


def _tensor_parallel(setting: Setting, points: Points, sizes: Sizes, has_experts: bool) -> PartWork:
    """Attention and feed-forward are entered and left once each (parallel/tp.py).

    Selective recompute keeps sums over ranks, not what is gathered; a full one that stops early
    doesn't come to the sum that ends the block.
    """
    whole = sizes.tokens * setting.model.hidden_size * sizes.value_bytes
    # Whole experts take their share of the tokens as it lies: only attention is cut.
    layers = 1.0 if has_experts and setting.stack.expert_tp == "one" else 2.0
    spared = layers - 1.0 if setting.stack.recompute_stops_early else 0.0
    eight_bit = (points.precision == _FP8) & (setting.stack.tp_gather_dtype == "fp8")
    gathered = np.where(eight_bit, 1 / sizes.value_bytes, 1.0)
    return PartWork(
        exchanges=enter_or_leave(
            points, whole, layers, leave=False, gathered=gathered, again="selective"
        )
        + enter_or_leave(
            points, whole, layers, leave=True, gathered=gathered, again="full", spared=spared
        )
    )
