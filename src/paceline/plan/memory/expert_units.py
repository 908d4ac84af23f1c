"""Experts that are a unit of FSDP2's own: what their part of a block's backward pass holds.

Under ep other ranks hold the same experts than hold the same other parameters of a block, so that
FSDP2 has two units in it (`paceline.parallel.apply`). A backward pass comes to the block, to its
experts in the middle of it, leaves them, and then the block. What differs from one unit:

- the experts come in after the other parameters, and behind them those of the next block do. FSDP2
  splits them along another dimension than the first (`paceline.parallel.ep.fsdp_dim`), so they come
  by way of a copy; where a rank is alone with its experts nothing is gathered, and the copy that
  the arithmetic reads is made on the spot;
- their gradients go out in a message of their own, while the gradients of shared experts wait.
  Splitting along that dimension makes one more copy of a matrix;
- that message is there until the block's own gradients go out, and beside it the reduced shard;
- a block that recomputes brings them in within its second forward pass, and there FSDP2 keeps the
  message through that of the experts.

Seen in torch 2.13, torch.distributed.fsdp._fully_shard._fsdp_param_group and
_fsdp_collectives.
"""

from typing import NamedTuple

import numpy as np

from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.data_groups import dense_groups, expert_groups
from paceline.plan.memory import states
from paceline.plan.memory.activations import (
    ExpertPath,
    expert_path,
    shape_of,
    stream_gradients,
)
from paceline.plan.memory.buffers import hot_sums_bytes, sequence_bytes
from paceline.plan.memory.parameter_counts import (
    ParameterCounts,
    copied_of_block,
    experts_apart,
)
from paceline.plan.points import Array, Points, Setting

_FP32 = 4


class Unit(NamedTuple):
    """Bytes of a unit, (n,)."""

    copy: Array
    """Of its parameters, where they come and go."""
    fresh: Array
    """Whole gradients."""
    message: Array
    """These on their way out."""


class Places(NamedTuple):
    """When backward passes of blocks of a sort come: after how many others, (n,) each."""

    first: Array
    last: Array

    def nearest(self, blocks_done: Array) -> Array:
        """Of these, the one next to this number of blocks."""
        return np.clip(blocks_done, self.first, self.last)


class ExpertUnits(NamedTuple):
    """Of blocks whose experts are a unit of their own: bytes, (n,) each; else 0."""

    is_there: Array
    """Whether there are any, bool."""
    blocks: Places
    dense_blocks: Places
    """The others. Everything else here is not of these."""
    experts: Unit
    beside: Unit
    """The other parameters of the block."""
    arriving: Array
    """What the experts come by, besides their copies."""
    arrived: Array
    """What stays of it through their forward pass, where a block recomputes."""
    kept_copy: Array
    """Copies of experts that were there for the whole step and are free behind their backward."""
    shared: Array
    """Whole gradients of shared experts."""
    first: Array
    """Part of the experts' gradients that is there when their inner layer is at work: those of the
    matrix behind it; a number."""
    turned: Array
    """A matrix's gradients, as they were before they were put in the order of the shards."""
    shard: Array
    """Of gradients, as they are reduced."""
    kept_shard: Array
    """What is there of it from then on that wasn't before."""
    path: ExpertPath
    again: Array
    """What recompute makes of such a block besides."""
    stream: Array
    """Gradients of the stream."""
    rows: Array
    """Gradients of the rows of experts."""
    inner: Array
    """Those of their inner width."""
    sequence: Array
    """What attention exchanges."""
    hot_sums: Array
    """Gradients of copied experts on their way."""
    hot_parts: Array
    """These as they come, and in the type of the sum where it is wider."""
    hot_copies: Array
    """Their weights, which are free once these are made, as what is kept of their rows."""
    hot_share: Array
    """Of the rows, those of copied experts if loads are even; a number."""
    more_grads: Array
    """Of the gradients of a mean block, how many such a block has beyond them; a number."""

    def grads_done(self, blocks_done: Array, layers: Array) -> Array:
        """The share of a rank's gradients that so many blocks have, 0 to 1.

        The first backward passes may all be of such blocks; then the others have the less.
        """
        first = self.dense_blocks.first
        rest = first * (layers - blocks_done) / np.maximum(layers - first, 1)
        return (blocks_done + self.more_grads * np.minimum(blocks_done, rest)) / layers


def expert_units(
    setting: Setting,
    points: Points,
    copies: ParameterCounts,
    trained: ParameterCounts,
    again: Array,
) -> ExpertUnits | None:
    """Such units; None: no point has any.

    Args:
        setting: the model and its stack.
        points: n layouts.
        copies: of parameters, as the arithmetic reads them.
        trained: of those that have gradients.
        again: what recompute makes of a block of each kind, (k, n).
    """
    apart, mixture = experts_apart(setting, points), setting.model.experts
    if mixture is None or not np.any(apart):
        return None
    value, shape = points.value_bytes, shape_of(setting, points)
    shards = expert_groups(setting, points).shards
    comes_and_goes, reduces = ~states.keeps_whole(points), ~states.sums_whole(points)
    reduced = states.reduced_bytes(setting, points)

    def unit(gathered: Array, with_gradients: Array) -> Unit:
        return Unit(
            np.where(comes_and_goes, gathered * value, 0),
            with_gradients * value,
            np.where(reduces, with_gradients * reduced, 0),
        )

    experts = unit(copies.experts, trained.experts)
    by_message = np.where(shards > 1, experts.copy, 0)
    num_matrices = 3 if setting.model.gated else 2
    is_adapted = setting.finetune.is_adapted
    shared = num_matrices * setting.model.hidden_size * mixture.shared_ffn_size / points.tp
    alone = points.num_micro_batches == 1
    # The last one of a step frees what it kept.
    frees = ~comes_and_goes & alone & (points.pp == 1)
    # Reduced in a wider type, a shard is there in both.
    widths = reduced + np.where(points.param_bytes < reduced, points.param_bytes, 0)
    outside = setting.has_params_outside(points)
    hot_sums, sum_bytes = hot_sums_bytes(setting, points), np.maximum(value, _FP32)
    rows = shape.routed_tokens * mixture.experts_per_token * setting.busiest_load * value
    with_experts = np.array([[kind.has_experts] for kind in block_kinds_of(setting.model)])
    return ExpertUnits(
        is_there=apart,
        blocks=_places(setting, points, apart, has_experts=True),
        dense_blocks=_places(setting, points, apart, has_experts=False),
        experts=experts,
        beside=unit(copies.beside_experts, trained.beside_experts),
        arriving=2 * by_message,
        arrived=by_message,
        kept_copy=np.where(frees, copies.experts * value, 0),
        shared=np.zeros(1) if is_adapted else shared * value,
        first=np.full(1, 1 / num_matrices),
        turned=np.where(reduces & (shards > 1), experts.fresh / num_matrices, 0),
        shard=trained.experts / shards * np.where(reduces, widths, 0),
        kept_shard=trained.experts / shards * np.where(alone & ~outside, points.param_bytes, 0),
        path=expert_path(setting, points),
        again=(with_experts * again).max(0),
        stream=stream_gradients(setting, points),
        rows=rows * setting.model.hidden_size,
        inner=rows * mixture.ffn_size / shape.expert_tp,
        sequence=sequence_bytes(setting, points),
        hot_sums=hot_sums,
        hot_parts=hot_sums * (value / sum_bytes + (value < sum_bytes)),
        hot_copies=copied_of_block(setting, points).max(0) * value,
        hot_share=np.full(1, setting.comm.ep.hot_experts / mixture.num_experts),
        more_grads=_more_grads(setting, points, trained),
    )


def _more_grads(setting: Setting, points: Points, trained: ParameterCounts) -> Array:
    """Gradients of a block with experts over those of a mean block, less one: (s, n), a number; 0
    where a pipeline cuts the network."""
    whole = states.sums_whole(points)
    dense = np.where(whole, 1, dense_groups(points).shards)
    shards = np.where(whole, 1, expert_groups(setting, points).shards)
    blocks = np.where(whole, trained.whole, trained.sharded) - trained.ends / dense
    mean = np.maximum(blocks, 1) / setting.model.num_layers
    of_block = trained.beside_experts / dense + trained.experts / shards
    return np.where(points.pp == 1, of_block / mean - 1, 0)


def _places(setting: Setting, points: Points, apart: Array, *, has_experts: bool) -> Places:
    """Anywhere, where a pipeline cuts the network or experts are no unit of their own."""
    kinds = [kind for kind in block_kinds_of(setting.model) if kind.has_experts == has_experts]
    layers = [layer for kind in kinds for layer in kind.layers] or [0]
    known, number = apart & (points.pp == 1), setting.model.num_layers - 1
    first = np.where(known, number - max(layers), 0)
    return Places(first, np.where(known, number - min(layers), number))
