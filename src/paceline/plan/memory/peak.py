"""The peak of a step: memory by term, at the moment when there is most of it.

While a step runs activations fall and gradients grow, so the peak is at one of a few moments:

- "loss": all activations, and the logits with their gradients;
- "backward": still (nearly) all activations, and what the backward pass of a block needs besides:
  its activations made again, gradients between its operators, parameters on their way in and
  gradients on their way out;
- "end": the last block's backward pass, when all gradients are there;
- "next": the backward pass after a pipeline rank's first, beside the gradients of that;
- "optimizer": no activations, but what the update works with.

The terms returned are those of the worst moment, so that they sum to the peak.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.data_groups import dense_groups
from paceline.plan.memory import activations, states
from paceline.plan.memory.buffers import (
    context_bytes,
    exchange_bytes,
    sent_bytes,
    sequence_bytes,
    slack_bytes,
)
from paceline.plan.memory.comm_state import comm_state_bytes
from paceline.plan.memory.expert_units import ExpertUnits, expert_units
from paceline.plan.memory.logits import logits_bytes
from paceline.plan.memory.parameter_counts import (
    ParameterCounts,
    counts_of,
    largest_matrix,
    trained_counts,
)
from paceline.plan.memory.split_backward import bytes_left_to_weights
from paceline.plan.points import Array, Points, Setting
from paceline.plan.prediction import MEMORY_TERMS
from paceline.plan.stages import Holdings

_FP32 = 4
# `paceline.train.optim._CHUNK`: numbers whose state is worked on at once, where it has to be.
_CHUNK = 2**24
# Tensors as large as a matrix that coding its moments anew takes, seen with torch's tracker; and as
# large as a chunk where state is fetched: moments and master copy, of two chunks.
_ROOM_CODING = 6
_ROOM_FETCHED = 6
# Blocks whose offloaded activations are on the device (`paceline.parallel.offload`).
_ON_DEVICE = 2
# Of a block's gradients those that are there when its inner layer's backward pass needs most: that
# of the down projection.
_SHARE_INSIDE = 0.25

Terms = dict[str, Array]
_ZERO = np.zeros(1)


class _Line(NamedTuple):
    """Bytes that change evenly while the blocks' backward passes go on."""

    start: Array
    end: Array

    def at(self, done: Array) -> Array:
        """When a share of the blocks is done, 0 to 1."""
        return self.start + done * (self.end - self.start)


class _Parts(NamedTuple):
    """What all moments are made of, worked out once: bytes, (s, n) or (n,), unless said otherwise.

    Moments only add: a search asks for millions of them.
    """

    layers: Array
    """Blocks of a rank, a number."""
    plain: Array
    """Those of them that don't recompute, the last ones."""
    kept: Array
    """Activations of blocks at the end of forward passes."""
    of_plain: Array
    """Activations of a block that doesn't recompute; 0 where they wait on the host."""
    of_other: Array
    """Those of one that does."""
    again: Array
    """What recompute makes of a block besides."""
    between: Array
    """Gradients between a block's operators."""
    ends: Array
    """Activations of final norm and head."""
    grads: _Line
    """Gradients of earlier backward passes, and of the blocks that are done."""
    fresh_ends: Array
    fresh_head: Array
    """Of these, those that are there from the beginning of a backward pass."""
    fresh_block: Array
    """Whole gradients that wait to be reduced."""
    fresh_stage: Array
    """Those of all blocks of a stage, behind the second half of its backward pass."""
    in_stage: Array
    """Blocks of a stage, a number."""
    gathered: _Line
    """Copies of parameters, but the block's in use."""
    cast_head: Array
    block: Array
    """A block's parameters, where they come and go."""
    reduced_block: Array
    reduced_ends: Array
    late_message: Array
    """Of what is reduced last, from the micro-batch before."""
    gathered_at_last: Array
    logits_wait: Array
    logits_peak: Array
    logits_kept: Array
    """Of `logits_wait`, one micro-batch's."""
    sent: Array
    exchange: Array
    experts: ExpertUnits | None
    """Those that are units of their own; the block is then one without experts."""


def memory_bytes(setting: Setting, points: Points, holdings: Holdings) -> Terms:
    """Peak memory of each pipeline rank, as the allocator reserves it, by term of MEMORY_TERMS.

    Args:
        setting: model, cluster, stack and batch.
        points: n layouts.
        holdings: what each of s pipeline ranks holds.

    Returns:
        bytes, (s, n) each. `context` is what driver and communication library take outside of the
        allocator. On a CPU there is neither context nor slack: its process's own memory is not
        counted, and freed memory goes back.
    """
    counts = counts_of(setting, points, holdings)
    trained = trained_counts(setting, points, holdings, counts)
    parts = _parts(setting, points, holdings, counts, trained)
    moments = [*_moments(parts), _optimizer(setting, points, trained)]
    teacher = setting.of_teacher
    if teacher is not None:
        moments += _with_teacher(teacher, points, parts)
    goes_on = (holdings.with_grads < 1) & (points.num_micro_batches > 1)
    if goes_on.any():
        moments += _next_moments(_after_a_backward_pass(parts, goes_on))
    shape = np.broadcast_shapes(holdings.heads.shape, parts.kept.shape, (1, len(points)))
    peak: Terms = {name: np.zeros(shape) for name in MEMORY_TERMS}
    total = np.full(shape, -1.0)
    for terms in moments:
        here = sum(terms.values(), np.zeros(1))
        is_worse = here > total
        if not is_worse.any():
            continue
        total = np.where(is_worse, here, total)
        for name in _MOVING:
            np.copyto(peak[name], terms.get(name, _ZERO), where=is_worse)
    waiting = states.grads_before(setting, points, trained, np.ones(1), reduced=True)
    flat = states.flat_copies(setting, points, trained)
    moving = {name: peak[name] for name in _MOVING} | {"waiting": waiting, "flat": flat}
    peak["allocator_slack"] = peak["allocator_slack"] + slack_bytes(setting, points, moving)
    for name, resident in _resident(setting, points, counts, trained).items():
        peak[name] = peak[name] + resident
    if teacher is not None:
        shards = np.where(points.is_fsdp, dense_groups(points).shards, 1)
        peak["params"] = peak["params"] + teacher.model.num_params * points.value_bytes / shards
    peak["context"] = peak["context"] + context_bytes(setting, points)
    return peak


# What comes and goes within a step, and so leaves holes in what the allocator has reserved.
_MOVING = ("grads", "optimizer", "activations", "logits", "gather_buffers", "comm_buffers")


def _resident(
    setting: Setting, points: Points, counts: ParameterCounts, trained: ParameterCounts
) -> Terms:
    """What stays from step to step."""
    outside = setting.has_params_outside(points)
    params = states.resident_params(setting, points, counts)
    state = states.optimizer_bytes_per_param(setting, points) * trained.sharded
    return {
        "params": np.where(outside, 0, params),
        "grads": states.resident_grads(setting, points, trained),
        "optimizer": np.where(outside | points.offload_optimizer.astype(bool), 0, state),
        "comm_buffers": comm_state_bytes(setting, points, trained)
        + states.kept_message(setting, points, trained),
    }


def _parts(
    setting: Setting,
    points: Points,
    holdings: Holdings,
    counts: ParameterCounts,
    trained: ParameterCounts,
) -> _Parts:
    on_host = points.offload_activations.astype(bool)
    away = np.maximum(on_host, setting.stack.offloaded_share)
    in_flight = (1 - away) * holdings.in_flight + np.minimum(away * holdings.in_flight, _ON_DEVICE)
    whole = activations.kept_whole(setting, points)
    other = activations.kept_recomputing(setting, points)
    share = activations.recomputing_share(points)
    held = share * other + (1 - share) * whole  # (k, n)
    halves = bytes_left_to_weights(setting, points)  # (k, n)
    layers = np.maximum(holdings.layers.sum(0), 1)
    # Where most of them are on the host, those on the device are as many to the end.
    weights = (1 - away) * holdings.layers / layers
    wait, peak = logits_bytes(setting, points)
    others = np.maximum(holdings.heads_in_flight - 1, 0)
    zero, one = np.zeros(1), np.ones(1)
    copies = counts
    if setting.finetune.is_narrow:
        copies = counts_of(setting, points, holdings, copies=True)
    again = activations.recomputed(setting, points, whole, other)
    between = activations.between_operators(setting, points)
    exchange = exchange_bytes(setting, points)
    experts = expert_units(setting, points, copies, trained, again)
    if experts is not None:
        dense = np.array([[not kind.has_experts] for kind in block_kinds_of(setting.model)])
        again = np.where(experts.is_there, dense * again, again)
        alone = activations.between_operators(setting, points, of_experts=False)
        between = np.where(experts.is_there, dense.any() * alone, between)
        exchange = np.where(experts.is_there, sequence_bytes(setting, points), exchange)
    return _Parts(
        layers=layers,
        plain=layers * (1 - share),
        kept=(in_flight * held[:, None] + holdings.halves * halves[:, None]).sum(0),
        of_plain=(weights * whole[:, None]).sum(0),
        of_other=(weights * other[:, None]).sum(0),
        again=again.max(0),
        between=between,
        ends=activations.kept_ends(setting, points) * holdings.heads_in_flight,
        grads=_Line(
            states.grads_before(setting, points, trained, holdings.with_grads),
            states.grads_before(setting, points, trained, one),
        ),
        fresh_ends=states.fresh_ends(setting, points, trained),
        fresh_head=states.fresh_head(setting, points, trained),
        fresh_block=states.fresh_block(setting, points, trained),
        fresh_stage=states.fresh_stage(points, holdings, trained),
        in_stage=layers / np.maximum(points.stages_per_rank, 1),
        gathered=_Line(
            states.stays_gathered(setting, points, copies, zero),
            states.stays_gathered(setting, points, copies, one),
        ),
        cast_head=states.cast_head(points, copies),
        block=states.gathered_block(setting, points, copies),
        reduced_block=states.reduced_block(setting, points, trained),
        reduced_ends=states.reduced_ends(setting, points, trained),
        late_message=states.late_message(setting, points, trained),
        gathered_at_last=states.gathered_at_last(setting, points, copies),
        logits_wait=others * wait,
        logits_peak=np.where(holdings.heads_in_flight > 0, others * wait + peak, 0),
        logits_kept=np.minimum(others, 1) * wait,
        sent=sent_bytes(setting, points, holdings),
        exchange=exchange,
        experts=experts,
    )


def _moments(parts: _Parts) -> Iterator[Terms]:
    """The terms of _MOVING at each moment that may be the peak, but the update."""
    yield _loss(parts)
    last = parts.layers - 1
    done = [np.zeros(1), np.minimum(1, last), last]
    if np.any((parts.plain > 0) & (parts.plain < parts.layers)):
        done.append(np.minimum(parts.plain, last))  # the first one that recomputes
    for blocks_done in done:
        if parts.experts is not None:
            yield from _through_experts(parts, parts.experts, blocks_done)
            blocks_done = parts.experts.dense_blocks.nearest(blocks_done)
        yield _inside(parts, blocks_done)
        yield _edge(parts, blocks_done)
    yield _root(parts)
    if np.any(parts.fresh_stage):
        yield _second_half(parts)


def _next_moments(parts: _Parts) -> Iterator[Terms]:
    """Those that may be the peak where gradients grow no more: at the beginning of a backward pass,
    and of its first block that recomputes."""
    yield _loss(parts)
    yield _inside(parts, np.zeros(1))
    if np.any((parts.plain > 0) & (parts.plain < parts.layers)):
        yield _inside(parts, np.minimum(parts.plain, parts.layers - 1))


def _after_a_backward_pass(parts: _Parts, goes_on: Array) -> _Parts:
    """Where gradients came with the backward pass at the peak and more are to follow, the next one:
    a micro-batch's activations and logits are gone, and all gradients there."""
    start = np.where(goes_on, parts.grads.end, parts.grads.start)
    return parts._replace(
        kept=np.where(goes_on, _left(parts, parts.layers), parts.kept),
        grads=_Line(start, parts.grads.end),
        logits_wait=parts.logits_wait - goes_on * parts.logits_kept,
        logits_peak=parts.logits_peak - goes_on * parts.logits_kept,
    )


def _loss(parts: _Parts) -> Terms:
    """The backward pass of the loss, before that of the head asks for parameters."""
    return {
        "grads": parts.grads.start,
        "activations": parts.kept + parts.ends,
        "logits": parts.logits_peak,
        "gather_buffers": parts.gathered.start + parts.cast_head,
        "comm_buffers": parts.sent + parts.late_message,
    }


def _with_teacher(setting: Setting, points: Points, parts: _Parts) -> Iterator[Terms]:
    """While a teacher reads the micro-batch, its logits beside the network's; and the backward
    pass of the loss, which keeps the divergence's gradient besides (`paceline.train.distill`).

    Args:
        setting: the teacher's.
        points: n layouts.
        parts: of the network.
    """
    model, value = setting.model, points.value_bytes
    blocks = [model.num_block_params(layer) for layer in range(model.num_layers)]
    gathered = model.num_params - sum(blocks) + 2 * max(blocks)
    tokens = points.micro_batch * setting.seq_len
    logits = tokens * model.vocab_size * value
    # Nothing is kept for a backward pass: stream and norm, and the inside of the feed-forward.
    mixture, width = model.experts, model.ffn_size
    if mixture is not None:
        width = mixture.experts_per_token * mixture.ffn_size + mixture.shared_ffn_size
    inside = 2 * model.hidden_size + (3 if model.gated else 2) * width
    at_loss = _loss(parts)
    yield at_loss | {"logits": at_loss["logits"] + logits}
    yield at_loss | {
        "activations": at_loss["activations"] + tokens * inside * value,
        "logits": parts.logits_wait + 2 * logits,
        "gather_buffers": at_loss["gather_buffers"] + points.is_fsdp * gathered * value,
    }


def _inside(parts: _Parts, blocks_done: Array) -> Terms:
    """In the inner layer of a block's backward pass, after those of `blocks_done` blocks."""
    again = np.where(blocks_done >= parts.plain, parts.again, 0)
    reduced = np.where(blocks_done > 0, parts.reduced_block, parts.late_message)
    return _of_backward(parts, blocks_done, _SHARE_INSIDE) | {
        "activations": _left(parts, blocks_done) + again + parts.between,
        "comm_buffers": parts.sent + parts.exchange + reduced,
    }


def _edge(parts: _Parts, blocks_done: Array) -> Terms:
    """At the end of a block's backward pass: its activations are free, its gradients go out."""
    return _of_backward(parts, blocks_done, 1.0) | {
        "activations": _left(parts, blocks_done + 1),
        "comm_buffers": parts.sent + parts.reduced_block,
    }


def _through_experts(parts: _Parts, units: ExpertUnits, blocks_done: Array) -> Iterator[Terms]:
    """The backward pass of a block whose experts are a unit of their own, see `expert_units`."""
    experts, beside, path = units.experts, units.beside, units.path
    blocks_done = units.blocks.nearest(blocks_done)
    done, makes_again = blocks_done / parts.layers, blocks_done >= parts.plain
    activations = _left(parts, blocks_done) + np.where(makes_again, units.again, 0)
    activations = activations - path.around + units.stream
    behind = activations - path.rows - path.inside
    grads = parts.grads.at(units.grads_done(blocks_done, parts.layers)) + parts.fresh_head
    gathered = parts.gathered.at(done) + beside.copy
    both = gathered + experts.copy
    without = gathered - units.kept_copy
    # The next block's, which may be one without experts.
    after = np.where(blocks_done + 1 < units.dense_blocks.first, beside.copy, parts.block)
    ahead = np.where(blocks_done + 1 < parts.layers, after, 0)
    last = np.where(blocks_done > 0, beside.message, parts.late_message)

    def moment(activations: Array, grads: Array, gathered: Array, comm: Array) -> Terms:
        terms = {
            "activations": np.maximum(activations, 0),
            "grads": grads,
            "gather_buffers": gathered,
            "comm_buffers": parts.sent + comm,
            "logits": parts.logits_wait,
        }
        return {name: units.is_there * term for name, term in terms.items()}

    # The experts come in: behind the gradients of their results, or as the block recomputes.
    coming = np.where(makes_again, behind, activations + units.rows)
    yield moment(coming, grads, gathered + experts.copy + units.arriving, last)
    # There, their last product: rows as they are sent, and as it gives them. Then rows go back: in
    # the order of the product, of the senders, and as they arrive.
    product = np.where(makes_again, 2 * units.rows, 0)
    yield moment(activations + product, grads, both + makes_again * units.arrived, last)
    yield moment(activations + 1.5 * product, grads, both, last)
    grads = grads + units.shared
    # Gradients of copied experts are put together.
    behind = behind - units.hot_copies
    own = 1 - units.hot_share
    activations = behind + own * (path.rows + path.inside)
    hot = units.hot_parts + units.hot_sums
    yield moment(activations + units.rows, grads, both + ahead, last + hot)
    # Gradients of rows on their way to them, or of their inner width.
    at_work = activations + 2 * np.maximum(units.rows, units.inner)
    first = grads + units.first * experts.fresh
    yield moment(at_work, first, both + ahead, last + units.hot_sums)
    # The last product, whose rows have two gradients and one for each of its columns.
    last_product = behind + own * path.rows + 2 * units.rows + units.inner
    yield moment(last_product, grads + experts.fresh, both + ahead, last + units.hot_sums)
    # Their gradients go out.
    out = grads + np.maximum(experts.fresh, units.shard)
    yield moment(behind + units.rows, out, without + ahead, experts.message + units.turned)
    # Attention's inner layer, and the end of the block.
    grads = grads + units.kept_shard
    yield moment(behind, grads, without + ahead, experts.message + units.sequence)
    at_end = grads - units.shared + beside.fresh
    yield moment(_left(parts, blocks_done + 1), at_end, without + ahead, experts.message)


def _of_backward(parts: _Parts, blocks_done: Array, share: float) -> Terms:
    """What both have: gradients with a share of this block's, logits of other micro-batches, and
    parameters in use and on their way in."""
    done = blocks_done / parts.layers
    ahead = np.where(blocks_done + 1 < parts.layers, 2, 1)
    return {
        "grads": parts.grads.at(done) + parts.fresh_head + share * parts.fresh_block,
        "logits": parts.logits_wait,
        "gather_buffers": parts.gathered.at(done) + ahead * parts.block,
    }


def _left(parts: _Parts, blocks_done: Array) -> Array:
    """Activations of blocks after the backward passes of some."""
    plain = np.minimum(blocks_done, parts.plain)
    freed = plain * parts.of_plain + (blocks_done - plain) * parts.of_other
    return np.maximum(parts.kept - freed, 0)


def _root(parts: _Parts) -> Terms:
    """The very end of a backward pass, when FSDP2 reduces what is in no block."""
    return {
        "grads": parts.grads.end + parts.fresh_ends,
        "gather_buffers": parts.gathered_at_last,
        "comm_buffers": parts.reduced_ends,
    }


def _second_half(parts: _Parts) -> Terms:
    """The end of a W at ZeRO-2: its activations are free, the first of its gradients go out."""
    reduced = parts.reduced_block
    if parts.experts is not None:
        reduced = np.maximum(reduced, parts.experts.experts.message)
    return {
        "grads": parts.grads.end + parts.fresh_ends + parts.fresh_stage,
        "activations": _left(parts, parts.in_stage),
        "logits": parts.logits_wait,
        "gather_buffers": parts.gathered.start,
        "comm_buffers": parts.sent + reduced,
    }


def _optimizer(setting: Setting, points: Points, counts: ParameterCounts) -> Terms:
    """The update in place, or in chunks where state is decoded, cast or fetched; kernel by kernel
    over groups it makes one more tensor of everything."""
    working = np.maximum(points.param_bytes, _FP32)
    chunk = np.minimum(counts.sharded, _CHUNK) * working
    tensor = np.minimum(largest_matrix(setting, points), _CHUNK) * working
    room = (
        chunk * (points.param_bytes < _FP32)
        + (2 * chunk + _ROOM_CODING * tensor) * points.optimizer_8bit
        + _ROOM_FETCHED * chunk * points.offload_optimizer
        + states.widened_grads(setting, points, counts)
    )
    if setting.stack.optimizer == "foreach":
        room = room + counts.sharded * working
    return {
        "grads": states.grads_before(setting, points, counts, np.ones(1), reduced=True),
        "optimizer": np.where(setting.has_params_outside(points), 0, room),
    }


def checkpoint_spike_bytes(setting: Setting, points: Points, holdings: Holdings) -> Array:
    """Host memory that saving a checkpoint takes besides, per device: (s, n).

    A rank's shard of parameters, moments (as fp32 numbers, also where they are 8-bit codes) and
    master copy is copied to the host before the step goes on, and written from there.
    """
    counts = counts_of(setting, points, holdings)
    trained = trained_counts(setting, points, holdings, counts)
    working = np.maximum(points.param_bytes, _FP32)
    master = np.where(states.has_master(setting, points), _FP32, 0)
    moments = 2 * working if setting.state_bytes is None else setting.state_bytes * working / _FP32
    return counts.sharded * points.param_bytes + trained.sharded * (moments + master)
