"""Activations: what the forward pass of a block leaves for its backward pass, per operator.

Counted from what autograd saves in `paceline.models` (tests compare with torch's own tracker), in
numbers per token, times the bytes of a number. One storage counts once, however many operators
save a view of it. With h the residual stream, a block keeps

- the stream at the entry of each norm (h), and the norm's output (h) for the products that read it,
- queries, keys, values after their rotation, attention's output, and 4 bytes per head and token
  (fused attention); scores, and what dropout made of them, where attention isn't fused,
- of the feed-forward layer gate, up, silu(gate) and their product: 4 widths kernel by kernel, 3
  where SwiGLU is one kernel or a compiler fuses it. A compiler also makes the norms' outputs anew
  (it takes 6 h off a Llama-3 block by torchao's published peaks, which is what this gives).

What differs by surroundings:

- autocast (16-bit arithmetic on fp32 parameters without FSDP2): the stream stays in fp32, and each
  product saves a 16-bit copy of its own input;
- a CPU has no fused RMS norm: normalised values are saved beside the stream, both in fp32 at least;
  where adapters alone are trained, they aren't, nor what the head reads; the narrow values between
  an adapter's products are;
- tp divides heads and columns; norms and the stream too with sequence parallelism, but what the
  products read was gathered, and is whole unless the stack gathers it once more;
- experts work on rows that were sent to them: tokens x experts per token x imbalance; copies of hot
  experts are kept, but where a block recomputes.

Papers: https://arxiv.org/abs/2205.05198 (34 + 5as/h and its selective and full recompute),
https://arxiv.org/abs/2205.14135 (fused attention).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paceline.config.layers import Experts
from paceline.config.layout import PRECISIONS, RECOMPUTE
from paceline.config.model import Model
from paceline.plan.adapters import kept_by_adapters, room_for_narrow
from paceline.plan.block_kinds import BlockKind, block_kinds_of
from paceline.plan.memory.logits import logits_bytes
from paceline.plan.memory.parameter_counts import copied_of_block
from paceline.plan.points import Array, Points, Setting

_FP32 = 4
_INT64 = 8
_SINK_WIDTH = 8
"""Numbers that a sink adds to heads (models/attention.py)."""


class BlockShape(NamedTuple):
    """What the formulas of a block read: columns of n points."""

    tokens: Array
    """Of a micro-batch, that attention and products of a rank work on."""
    stream_tokens: Array
    """Of these, the ones whose residual stream this rank holds."""
    read_tokens: Array
    """Of these, the ones of which it keeps what products read."""
    tp: Array
    value: Array
    """Bytes of a number in products."""
    kept: Array
    """Of these, the ones that wait of a number that a linear layer's product reads."""
    stream: Array
    """Bytes of a number in the residual stream."""
    autocast: Array
    """Whether each product casts its own input."""
    compiled: Array
    fused: Array
    """Whether SwiGLU is one kernel."""
    expert_tp: Array
    """Ranks that share each expert's columns."""
    routed_tokens: Array
    """Of the tokens, the ones that this rank sends to experts: its share, if these are whole."""
    places: Array
    """Numbers that are kept of where the copy of a token goes: by expert, and on another rank by
    sender too."""
    is_cpu: bool
    trains_all: bool
    """Whether norms and head have gradients, or only adapters."""


def shape_of(setting: Setting, points: Points) -> BlockShape:
    """What the formulas of a block read of the points."""
    tokens = points.micro_batch * setting.seq_len / points.cp
    shared = np.where(points.sequence_parallel.astype(bool), points.tp, 1)
    value, param = points.value_bytes, points.param_bytes
    autocast = (value != param) & ~points.is_fsdp
    compiled = points.compile.astype(bool)
    eight_bit = (points.precision == PRECISIONS.index("fp8")) & setting.stack.keeps_fp8
    return BlockShape(
        tokens=tokens,
        stream_tokens=tokens / shared,
        read_tokens=tokens / shared if setting.stack.regathers_tp else tokens,
        tp=points.tp,
        value=value,
        kept=np.where(eight_bit, 1, value),
        stream=np.where(autocast, np.maximum(value, param), value),
        autocast=autocast,
        compiled=compiled,
        fused=compiled | (setting.stack.elementwise == "fused"),
        expert_tp=np.where(setting.stack.expert_tp == "tp", points.tp, 1),
        routed_tokens=tokens / np.where(setting.stack.expert_tp == "tp", 1, points.tp),
        places=np.where(points.ep > 1, 4, 2),
        is_cpu=setting.device.is_cpu,
        trains_all=not setting.finetune.is_adapted,
    )


# ---- one block ---------------------------------------------------------------------------------


def kept_whole(setting: Setting, points: Points) -> Array:
    """Bytes that a block of each kind keeps without recompute: (k, n)."""
    whole = _per_kind(setting, points, _whole_block)
    if not setting.comm.ep.hot_experts:
        return whole
    return whole + copied_of_block(setting, points) * points.value_bytes


def kept_input(setting: Setting, points: Points) -> Array:
    """Bytes of a block's input: (n,)."""
    shape = shape_of(setting, points)
    return shape.stream_tokens * setting.model.hidden_size * shape.stream


def kept_recomputing(setting: Setting, points: Points) -> Array:
    """Bytes that a block of each kind keeps where it recomputes: (k, n)."""
    full = np.broadcast_to(kept_input(setting, points), (1, len(points)))
    if not np.any(points.recompute == RECOMPUTE.index("selective")):
        return full
    kinds = len(block_kinds_of(setting.model))
    if setting.stack.recompute_granularity == "attention":
        selective = _per_kind(setting, points, _all_but_scores)
    else:
        selective = _per_kind(setting, points, _products)
    selected = points.recompute == RECOMPUTE.index("selective")
    return np.where(selected, selective, np.broadcast_to(full, (kinds, full.shape[1])))


def block_activations(setting: Setting, points: Points) -> Array:
    """Bytes that one micro-batch leaves in a block of each kind, mean over a stage: (k, n)."""
    share = recomputing_share(points)
    whole = kept_whole(setting, points)
    if not np.any(share):
        return whole
    return share * kept_recomputing(setting, points) + (1 - share) * whole


def recomputed(setting: Setting, points: Points, whole: Array, kept: Array) -> Array:
    """Bytes that a block's backward pass computes again and holds besides: (k, n).

    Args:
        setting: the model and the stack.
        points: n layouts.
        whole: what a block keeps without recompute, as `kept_whole` gives it.
        kept: what one keeps that recomputes, as `kept_recomputing` gives it.
    """
    share = recomputing_share(points)
    if not np.any(share):
        return np.zeros((1, 1))
    again = whole - kept
    is_selective = points.recompute == RECOMPUTE.index("selective")
    if setting.stack.recompute_granularity != "attention" and np.any(is_selective):
        apart = _results_apart(setting, shape_of(setting, points))
        again = again + np.where(is_selective, apart, 0)
    return np.where(share > 0, np.maximum(again, 0), 0)


def recomputing_share(points: Points) -> Array:
    """Part of a stage's blocks that recompute: (n,)."""
    none = points.recompute == RECOMPUTE.index("none")
    return np.where(none, 0, points.recompute_share)


def _per_kind(
    setting: Setting,
    points: Points,
    count: Callable[[Setting, BlockKind, Points, BlockShape], Array],
) -> Array:
    shape = shape_of(setting, points)
    rows = [count(setting, kind, points, shape) for kind in block_kinds_of(setting.model)]
    return np.stack([np.broadcast_to(row, (len(points),)) for row in rows])


def _whole_block(setting: Setting, kind: BlockKind, points: Points, shape: BlockShape) -> Array:
    stack = setting.stack
    keeps_scores = setting.attention == "unfused" and "core_attn" not in stack.remakes
    scores = _scores(setting, shape) if keeps_scores else 0
    return _all_but_scores(setting, kind, points, shape) + scores


def _all_but_scores(setting: Setting, kind: BlockKind, points: Points, shape: BlockShape) -> Array:
    hidden = setting.model.hidden_size
    masks = 2 * hidden * shape.stream_tokens if setting.stack.dropout else 0
    return (
        _norms(setting.model, shape)
        + _attention(setting, kind, points, shape)
        + _feed_forward(setting, kind, shape)
        + shape.tokens * shape.value * kept_by_adapters(setting, kind)
        + masks
        - sum(_remade(setting, kind, shape).values(), np.zeros(1))
    )


def _norms(model: Model, shape: BlockShape) -> Array:
    """What the norms of a block save; norms of one input save it once, if they save it as it is."""
    norms = model.num_block_norms
    if model.residual in ("sequential", "post_norm") or model.norm == "rms":
        return norms * _norm(model, shape)
    return _norm(model, shape) + (norms - 1) * shape.stream_tokens * 2 * _FP32


def _norm(model: Model, shape: BlockShape) -> Array:
    """What a norm of the stream saves of its input, and its reciprocal root mean square; a layer
    norm also the mean."""
    if model.norm == "layer":
        return shape.stream_tokens * (model.hidden_size * shape.stream + 2 * _FP32)
    return shape.stream_tokens * (model.hidden_size * _norm_input(shape.stream, shape) + _FP32)


def _norm_input(given: Array, shape: BlockShape) -> Array:
    """Bytes per number that a norm keeps of an input of so many bytes."""
    copies = 1 + shape.trains_all  # normalised ones for the weight's gradient
    unfused = copies * np.maximum(given, _FP32) if shape.is_cpu else given
    return np.where(shape.compiled, given, unfused)


def _product_input(width: float, readers: int, shape: BlockShape) -> Array:
    """What products keep of an input that several of them read."""
    copies = np.where(shape.autocast, readers, 1)
    gathered_or_again = np.where(shape.compiled & (shape.tp == 1), 0, copies)
    return shape.read_tokens * width * shape.kept * gathered_or_again


# ---- attention ---------------------------------------------------------------------------------


def _attention(setting: Setting, kind: BlockKind, points: Points, shape: BlockShape) -> Array:
    """From the norm's output to what the output product reads, without scores."""
    model = setting.model
    heads = model.num_heads * model.value_dim
    fused = setting.attention != "unfused"
    lse = model.num_heads * _FP32 if fused else 0
    copy = np.where(shape.kept < shape.value, shape.kept, 0)  # for the product that follows
    per_token = heads * (_num_outputs(points) * shape.value + copy) + lse
    if model.sinks:  # what a kernel gave, and the part of it that isn't padding
        per_token = per_token + model.num_heads * (model.value_dim + _SINK_WIDTH) * shape.value
    if model.latent is not None:
        return _latent(model, shape) + shape.tokens * per_token / shape.tp
    masked = kind.window is not None and kind.window < setting.seq_len
    one_each = masked or not model.causal or not model.has_fused_attention
    per_token = per_token + _queries_keys_values(model, one_each, points) * shape.value
    if model.qk_norm:
        normed = (model.num_heads + model.num_kv_heads) * model.head_dim
        per_token = per_token + normed * _norm_input(shape.value, shape)
    read = _product_input(model.hidden_size, 3, shape)
    return read + shape.tokens * per_token / shape.tp + _mask(setting, masked, points, shape)


def _num_outputs(points: Points) -> Array:
    """Copies of attention's output: both exchanges of a shared sequence make one of their own."""
    return np.where(points.cp > 1, 2, 1)


def _queries_keys_values(model: Model, one_each: bool, points: Points) -> Array:
    """Numbers per token, before tp. Under all but the plain causal mask each query head has a copy
    of its key head; Ulysses repeats key heads until each rank has one."""
    kv_heads = model.num_kv_heads
    repeats = np.maximum(1, points.ulysses * points.tp / kv_heads)
    if one_each:
        repeats = np.where(points.cp == 1, model.num_heads / kv_heads, repeats)
    width = model.head_dim + (_SINK_WIDTH if model.sinks else 0)
    return (model.num_heads + 2 * kv_heads * repeats) * width


def _mask(setting: Setting, masked: bool, points: Points, shape: BlockShape) -> Array:
    """What is added to the scores under a window, written out for one sample; rings have tiles."""
    return np.where(points.cp == 1, masked * setting.seq_len**2 * shape.value, 0)


def _latent(model: Model, shape: BlockShape) -> Array:
    """The narrow vectors with their norms, whole on every tp rank, and what heads make of them."""
    latent = model.latent
    assert latent is not None
    ranks = latent.kv_rank + (latent.q_rank or 0)
    narrow = ranks * (_norm_input(shape.value, shape) + shape.value)
    read = _product_input(model.hidden_size, 2, shape)
    return read + shape.tokens * (narrow + _latent_heads(model, shape) / shape.tp)


def _latent_heads(model: Model, shape: BlockShape) -> Array:
    """Bytes per token, before tp, of queries, keys and values made of the narrow vectors."""
    latent = model.latent
    assert latent is not None
    # The flash kernel of a CPU takes values as wide as keys, and gives as wide a result.
    v_dim = 2 * model.head_dim if shape.is_cpu else latent.nope_dim + latent.v_dim
    return model.num_heads * (2 * model.head_dim + v_dim) * shape.value


def _scores(setting: Setting, shape: BlockShape) -> Array:
    """Of attention that isn't fused: the weights, with dropout its mask and result, and where
    scores are capped, them and the weights in fp32."""
    keys = setting.seq_len
    per_score = 2 * shape.value + 1 if setting.stack.dropout else shape.value
    if setting.model.score_cap is not None:
        per_score = per_score + shape.value + np.where(shape.value < _FP32, _FP32, 0)
    return shape.tokens * keys * setting.model.num_heads / shape.tp * per_score


# ---- feed-forward ------------------------------------------------------------------------------


def _feed_forward(setting: Setting, kind: BlockKind, shape: BlockShape) -> Array:
    model = setting.model
    if kind.has_experts and model.experts is not None:
        return _expert_layer(setting, model.experts, shape)
    read = _product_input(model.hidden_size, 2 if model.gated else 1, shape)
    if model.residual == "parallel_shared":  # attention reads it too
        read = np.where(shape.autocast, read, 0)
    inner = _inner_bytes(model, shape, shape.kept) * model.ffn_size / shape.tp
    return read + shape.tokens * inner


def _inner_bytes(model: Model, shape: BlockShape, kept: Array, limited: bool = False) -> Array:
    """Of the tensors of the inner width that a feed-forward layer keeps, bytes per column: in the
    last one, which a product reads, `kept` per number."""
    eager, fused = (4, 3) if model.gated else (2, 2)
    is_fused = shape.fused if model.activation == "silu" and not limited else shape.compiled
    if limited:  # gate and up before and after their limits, the sigmoid, both products
        eager = 7
    return (np.where(is_fused, fused, eager) - 1) * shape.value + kept


def _expert_layer(setting: Setting, experts: Experts, shape: BlockShape) -> Array:
    hidden = setting.model.hidden_size
    routed = shape.routed_tokens * _router(hidden, experts, shape)
    path = _path(setting, experts, shape)
    return _product_input(hidden, 1, shape) + path.around + path.rows + path.inside + routed


class ExpertPath(NamedTuple):
    """What a layer with experts keeps, but of the router: bytes, (n,)."""

    around: Array
    """Of shared experts, and what the routed ones gave: free before their own backward pass."""
    rows: Array
    """What they read."""
    inside: Array
    """Of their inner width."""


def _path(setting: Setting, experts: Experts, shape: BlockShape) -> ExpertPath:
    model, routed = setting.model, shape.routed_tokens
    rows = experts.experts_per_token * setting.busiest_load
    kept = shape.kept if setting.stack.fp8_experts else shape.value
    limited = experts.gate_limit is not None
    inner = rows * _inner_bytes(model, shape, kept, limited) * experts.ffn_size / shape.expert_tp
    if experts.bias:  # whose row is added to which
        inner = inner + 3 * rows * _INT64
    shared = _inner_bytes(model, shape, shape.kept) * experts.shared_ffn_size / shape.tp
    given = 0 if setting.stack.weighs_in_experts else experts.experts_per_token * shape.value
    return ExpertPath(
        around=shape.tokens * shared + routed * model.hidden_size * given,
        rows=routed * model.hidden_size * rows * kept,
        inside=routed * inner,
    )


def expert_path(setting: Setting, points: Points) -> ExpertPath:
    """What a layer with experts keeps, of a model that has some."""
    assert setting.model.experts is not None
    return _path(setting, setting.model.experts, shape_of(setting, points))


def _router(hidden: int, experts: Experts, shape: BlockShape) -> Array:
    """Bytes per token: the stream in fp32, scores, choices and places of the copies."""
    wide = np.where(shape.value < _FP32, hidden * _FP32, 0)
    chosen = experts.experts_per_token * ((1 + shape.places) * _INT64 + 2 * _FP32)
    return wide + experts.num_experts * _FP32 + chosen


# ---- recompute ---------------------------------------------------------------------------------


def _remade(setting: Setting, kind: BlockKind, shape: BlockShape) -> dict[str, Array]:
    """Bytes of a block that `Stack.remakes` lets go, by part."""
    model, experts = setting.model, setting.model.experts if kind.has_experts else None
    found: dict[str, Array] = {}
    if model.latent is not None:
        found["mla_up_proj"] = shape.tokens * _latent_heads(model, shape) / shape.tp
    found["layernorm"] = 2 * _product_input(model.hidden_size, 1, shape)
    if experts is None:
        inner = _inner_bytes(model, shape, shape.kept)
        found["mlp"] = shape.tokens * inner * model.ffn_size / shape.tp
    else:
        kept = shape.kept if setting.stack.fp8_experts else shape.value
        rows = shape.routed_tokens * experts.experts_per_token * setting.busiest_load
        found["moe_act"] = rows * kept * experts.ffn_size / shape.expert_tp
        inner = _inner_bytes(model, shape, shape.kept)
        found["shared_experts"] = shape.tokens * inner * experts.shared_ffn_size / shape.tp
    return {name: found[name] for name in setting.stack.remakes if name in found}


def _products(setting: Setting, kind: BlockKind, points: Points, shape: BlockShape) -> Array:
    """Selective recompute: the block's input, results of products, attention and sums.

    A compiler keeps no result that its backward pass doesn't read: that of the down projection.
    """
    model, experts = setting.model, setting.model.experts
    ups = 2 if model.gated else 1
    heads = model.num_heads * (model.value_dim * shape.value + _FP32) / shape.tp
    products = _projections(model, shape, setting) * shape.value / shape.tp
    per_token = heads + products + _sums(setting, shape)
    down = np.where(shape.compiled, 0, 1)
    if not kind.has_experts or experts is None:
        ffn = _every(ups, setting) * model.ffn_size / shape.tp * shape.value
        per_token = per_token + ffn + down * _sums(setting, shape, second=False)
    else:
        copies = experts.experts_per_token * shape.routed_tokens / shape.tokens
        rows = copies * setting.busiest_load
        ffn = rows * _every(ups, setting) * experts.ffn_size / shape.expert_tp
        ffn = ffn + _every(ups, setting) * experts.shared_ffn_size / shape.tp
        sent = np.where(points.ep > 1, rows + copies, 0)
        given = down * (rows + (experts.shared_ffn_size > 0))
        numbers = ffn + (sent + given) * model.hidden_size
        per_token = per_token + numbers * shape.value + experts.num_experts * _FP32
    return kept_input(setting, points) + shape.tokens * per_token


def _every(number: int, setting: Setting) -> float:
    """How many of so many products in a row are kept."""
    return (number + 1) // 2 if setting.stack.recompute_granularity == "half" else number


def _projections(model: Model, shape: BlockShape, setting: Setting) -> Array | float:
    """Numbers per token, before tp, that the products before attention give and that are kept."""
    if model.latent is None:
        keys_and_values = _every(2, setting) * model.num_kv_heads
        return (model.num_heads + keys_and_values) * model.head_dim
    latent = model.latent
    narrow = (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim
    wide = model.num_heads * (model.head_dim + latent.nope_dim + latent.v_dim)
    return narrow * shape.tp + wide


def _sums(setting: Setting, shape: BlockShape, second: bool = True) -> Array:
    """Bytes per token of a product that ends in the stream, and of its sum over tp; of the sum
    alone where what tp shares isn't kept whole.

    second: whether this is one that keeping every second product leaves out.
    """
    left_out = second and setting.stack.recompute_granularity == "half"
    summed = np.where(shape.tp > 1, shape.stream_tokens / shape.tokens, 0)
    parts_go = (shape.tp > 1) & setting.stack.regathers_tp
    product = np.where(parts_go, 0, not left_out)
    return setting.model.hidden_size * shape.value * (product + summed)


def _results_apart(setting: Setting, shape: BlockShape) -> Array:
    """Of what selective recompute keeps, the bytes that a block without recompute does not: queries
    and keys before their rotation, and results that end in the stream."""
    model = setting.model
    turned = (model.num_heads + model.num_kv_heads) * model.head_dim * shape.value / shape.tp
    ends = _sums(setting, shape) + _sums(setting, shape, second=False)
    return shape.tokens * (turned + ends)


def between_operators(setting: Setting, points: Points, *, of_experts: bool = True) -> Array:
    """Bytes that the backward pass of a block needs beyond what its forward pass kept: (n,).

    At its worst place, the inner layer: gradients of gate, up and their product, while the product
    itself is free already; and those of the stream, in the sum and in the branch. In fp8 also
    8-bit copies of what a product reads: of its input, of its result's gradient, of its weight.
    Of the parts that are made anew the largest is there. A matrix in 4 bits becomes numbers before
    or after the gradients of the inner layer are there.

    Args:
        setting: the model and the stack.
        points: n layouts.
        of_experts: count blocks with experts too, if there are any.
    """
    model, shape = setting.model, shape_of(setting, points)
    inner = 2 * model.ffn_size / shape.tp
    if model.experts is not None and of_experts:
        copies = model.experts.experts_per_token * shape.routed_tokens / shape.tokens
        rows = copies * setting.busiest_load
        inner = np.maximum(inner, rows * 2 * model.experts.ffn_size / shape.expert_tp)
    if setting.attention == "unfused":
        inner = np.maximum(inner, 2 * setting.seq_len * model.num_heads / shape.tp)
    eight_bit = shape.tokens * (model.hidden_size + inner / 2)
    eight_bit = eight_bit + model.hidden_size * model.ffn_size / shape.tp
    copies = np.where(points.precision == PRECISIONS.index("fp8"), eight_bit, 0)
    kinds = block_kinds_of(model) if setting.stack.remakes else []
    anew = [part for kind in kinds for part in _remade(setting, kind, shape).values()]
    largest = np.max(np.broadcast_arrays(*anew), axis=0) if anew else 0
    gradients = np.maximum(shape.tokens * shape.value * inner, room_for_narrow(setting, points))
    return stream_gradients(setting, points) + gradients + copies + largest


def stream_gradients(setting: Setting, points: Points) -> Array:
    """Bytes of the stream's gradients inside a block, in the sum and in the branch: (n,)."""
    shape = shape_of(setting, points)
    gathered = np.where(shape.tp > 1, shape.tokens * shape.value, 0)
    return setting.model.hidden_size * (2 * shape.stream_tokens * shape.stream + gathered)


# ---- the ends ----------------------------------------------------------------------------------


def kept_ends(setting: Setting, points: Points) -> Array:
    """Bytes that the final norm and the head keep of a micro-batch, besides logits: (n,)."""
    shape = shape_of(setting, points)
    hidden = setting.model.hidden_size
    read = shape.trains_all * shape.read_tokens * hidden * shape.value
    if setting.model.head_layer:  # its product's input and output, its activation, its norm
        read = read + 2 * shape.stream_tokens * hidden * shape.value + _norm(setting.model, shape)
    return _norm(setting.model, shape) + read


def head_activations(setting: Setting, points: Points) -> Array:
    """Bytes that a micro-batch holds at the last stage besides its blocks: (n,)."""
    kept, peak = logits_bytes(setting, points)
    return kept_ends(setting, points) + np.maximum(kept, peak)
