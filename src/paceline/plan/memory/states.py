"""States: what a rank holds for its parameters, in bytes.

| between steps | bytes per parameter of this rank's shard |
|---|---|
| parameters | as stored, at ZeRO-1, -2 and -3 alike |
| moments | `Stack.moments_bytes`, ours 8 (16 of fp64); 2.03 as 8-bit codes, a scale for 256 |
| state of other optimizers | `Optim.state_bytes`, twice that of fp64 |
| master copy | 4, of 16-bit parameters |

Within a step FSDP2 gathers, in the type of the arithmetic: at ZeRO-3 the block in use and the one
ahead, before that everything. Gradients that are reduced once a step (ZeRO-1 with several
micro-batches) are whole until then, in fp32 where several are added up.
What is in no block is reduced last in each backward pass, and FSDP2 lets go of that message only
when the next one is made: with several micro-batches, in the next one's backward pass. DDP's
buckets are there all the time; beside them the gradients of micro-batches that aren't reduced are
added up in tensors of their own, which the last micro-batch copies into the buckets. Replicas of a
part of a network are FSDP2's too, as shards of one rank: whole all the time.

Stacks that hold whole 16-bit parameters (`Stack.states`) have these, and at ZeRO-1 whole gradients,
from step to step; only moments and master copy are shards (6 + 12/d bytes per parameter with fp32
gradients, https://github.com/NVIDIA/Megatron-LM, docs of its distributed optimizer).

Source: `paceline.parallel.fsdp`, `paceline.train.optim`; ZeRO https://arxiv.org/abs/1910.02054.
"""

import numpy as np

from paceline.plan.data_groups import dense_groups
from paceline.plan.memory.parameter_counts import (
    ParameterCounts,
    largest_of_block,
    lasting_buffers,
)
from paceline.plan.memory.split_backward import has_split_backward
from paceline.plan.points import Array, Points, Setting
from paceline.plan.stages import Holdings

_FP32 = 4
# `paceline.kernels.adamw.eight_bit`: a code of a byte, and an fp32 scale for 256 codes.
_CODE_BYTES = 1 + 4 / 256
# DeepSpeed's default `reduce_bucket_size`: https://www.deepspeed.ai/docs/config-json
_MESSAGE = 5e8


def optimizer_bytes_per_param(setting: Setting, points: Points) -> Array:
    """Moments and the master copy: (n,)."""
    working = np.maximum(points.param_bytes, _FP32)
    as_numbers = setting.moments_bytes * working / _FP32
    moments = np.where(points.optimizer_8bit, 2 * _CODE_BYTES, as_numbers)
    return moments + np.where(has_master(setting, points), _FP32, 0)


def has_master(setting: Setting, points: Points) -> Array:
    """Whether an fp32 copy of the parameters is kept: (n,), bool."""
    return (points.param_bytes < _FP32) & setting.stack.keeps_master


def resident_params(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """Bytes of the parameters between steps: (s, n)."""
    number = np.where(lasting_buffers(setting, points), counts.whole, counts.sharded)
    # What buffers were filled from: other tensors lie among it by the time it is free.
    left = _copies_grads(setting, points) & (_grad_bytes(setting, points.param_bytes) > 2)
    return points.param_bytes * np.where(left, 2, 1) * number


def resident_grads(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """Bytes of gradients that are there from step to step: (s, n)."""
    own = _grad_bytes(setting, points.param_bytes)
    beside = (
        0 if setting.stack.adds_into_buffer else points.value_bytes * (points.value_bytes < own)
    )
    return np.where(_keeps_grads(setting, points), counts.whole * (own + beside), 0)


def _keeps_grads(setting: Setting, points: Points) -> Array:
    return lasting_buffers(setting, points) & (points.zero < 2)


def _grad_bytes(setting: Setting, param: Array) -> Array:
    """Bytes of a gradient that waits, where those of the stored parameters take so many."""
    return {"fp32": np.full(1, 4.0), "bf16": np.full(1, 2.0), "param": param}[
        setting.stack.grad_dtype
    ]


def _gathers(setting: Setting, points: Points) -> Array:
    """Whether FSDP2 gathers and frees parameters: (n,), bool."""
    return points.is_fsdp & ~lasting_buffers(setting, points)


def keeps_whole(points: Points) -> Array:
    """Whether FSDP2 keeps parameters gathered for the whole step: (n,), bool."""
    return points.is_fsdp & ((points.zero < 3) | (dense_groups(points).shards == 1))


def sums_whole(points: Points) -> Array:
    """Whether gradients are added up whole and reduced once a step: (n,), bool."""
    late = (points.zero < 2) | (dense_groups(points).shards == 1)
    return points.is_fsdp & late & (points.num_micro_batches > 1)


def grads_before(
    setting: Setting, points: Points, counts: ParameterCounts, share: Array, reduced: bool = False
) -> Array:
    """Gradients of the blocks that had a backward pass: (s, n).

    They come block by block, in the first micro-batch's backward pass, but for DDP's buckets, which
    are there at any time. FSDP2 adds up what it reduces late in the type of the reduction.

    Args:
        setting: its stack says the type of gradients.
        points: n layouts.
        counts: of parameters.
        share: of the blocks that had one in this step, 0 to 1.
        reduced: as the optimizer finds them.
    """
    each = _grad_bytes(setting, points.param_bytes)
    waiting = coming = each * counts.sharded
    several = points.num_micro_batches > 1
    if not reduced:
        summed = _grad_bytes(setting, np.maximum(points.value_bytes, _FP32))
        waits_whole = sums_whole(points) & ~lasting_buffers(setting, points)
        waiting = np.where(waits_whole, summed * counts.whole, waiting)
        waiting = waiting * np.where(several & points.is_ddp, 2, 1)
        ends = np.where(points.is_fsdp, counts.ends / dense_groups(points).shards, 0)
        coming = coming - each * ends
    elsewhere = setting.has_params_outside(points) | _keeps_grads(setting, points)
    there = np.where(points.is_ddp, waiting, share * np.where(several, waiting, coming))
    return np.where(elsewhere, 0, there)


def fresh_block(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """A block's gradients of a backward pass that wait to be reduced or added: (n,)."""
    kept = _keeps_grads(setting, points)
    alone = (points.num_micro_batches == 1) & ~points.is_ddp & ~kept
    own = np.where(alone, points.param_bytes, 0)
    unit = _unit(setting, points, counts)
    return np.where(points.is_fsdp & ~kept, points.value_bytes * unit, own * counts.block)


def fresh_stage(points: Points, holdings: Holdings, counts: ParameterCounts) -> Array:
    """Gradients of a stage's blocks that wait for the end of a second half (W), where FSDP2 would
    reduce them block by block, but has no hooks: (s, n)."""
    waits = points.is_fsdp & (points.zero == 2) & has_split_backward(points)
    # The stage with the embedding has its whole backward pass in the first half.
    waits = waits & (holdings.embeddings < points.stages_per_rank)
    blocks = (counts.whole - counts.ends) / points.stages_per_rank
    return np.where(waits, blocks * points.value_bytes, 0)


def fresh_ends(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """The same of parameters in no block, with FSDP2, which reduces them when the pass is over:
    (s, n)."""
    sharded = points.is_fsdp & ~_keeps_grads(setting, points)
    return np.where(sharded, counts.ends * points.value_bytes, 0)


def fresh_head(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """Of these, those that are there from the beginning of a backward pass, the head's: (s, n).

    A GPU's allocator seems to have room for the embedding's too all the time, which come at the
    very end: torchtitan's published reserved peaks are met with it.
    """
    if not setting.device.is_cpu:
        return fresh_ends(setting, points, counts)
    return fresh_ends(setting, points, counts._replace(ends=counts.head))


def stays_gathered(
    setting: Setting, points: Points, counts: ParameterCounts, done: Array | float = 0.0
) -> Array:
    """Copies of parameters that the arithmetic reads beyond one block's: (s, n).

    With FSDP2 all of them, or at ZeRO-3 the ends. With autocast 16-bit copies of the blocks'
    matrices, but of blocks that recompute only the one at work.

    Args:
        setting: its stack says what stays whole, and needs no copy.
        points: n layouts.
        counts: of parameters.
        done: share of the blocks whose backward pass is done; the last one of a step frees them.
    """
    blocks = counts.whole - counts.ends
    frees = (points.num_micro_batches == 1) & (points.pp == 1)
    gathered = counts.ends + np.where(keeps_whole(points), blocks * (1 - frees * done), 0)
    share = np.where(points.recompute > 0, points.recompute_share, 0)
    cast = blocks * (1 - share) * (1 - done) + counts.block * (share > 0)
    copies = np.where(points.is_fsdp, gathered, np.where(_casts(points), cast, 0))
    return np.where(lasting_buffers(setting, points), 0, copies * points.value_bytes)


def cast_head(points: Points, counts: ParameterCounts) -> Array:
    """The head's copy under autocast, which its own backward pass frees: (s, n)."""
    return np.where(_casts(points), counts.head, 0) * points.value_bytes


def _casts(points: Points) -> Array:
    return (points.value_bytes < points.param_bytes) & ~points.is_fsdp


def gathered_block(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """A block's parameters on their way in, or in use, where they come and go: (n,)."""
    comes_and_goes = _gathers(setting, points) & ~keeps_whole(points)
    return np.where(comes_and_goes, _unit(setting, points, counts), 0) * points.value_bytes


def reduced_block(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """A block's gradients on their way out, as FSDP2 copies them into one message: (n,).

    DDP's buckets are the gradients themselves.
    """
    is_copied = _gathers(setting, points) & ~sums_whole(points)
    unit = _unit(setting, points, counts) * reduced_bytes(setting, points)
    return np.where(is_copied, unit, 0)


def reduced_bytes(setting: Setting, points: Points) -> Array:
    """Bytes of a gradient on its way out: (n,)."""
    if setting.stack.gather_unit == "matrix":
        return points.value_bytes
    return np.maximum(points.value_bytes, _FP32)


def _unit(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """Parameters gathered, or gradients reduced, at a time: a block's, a product's, or a
    message's: (n,)."""
    if setting.stack.gather_unit == "matrix":
        return np.minimum(counts.block, largest_of_block(setting, points))
    in_messages = setting.stack.states == "buffers" and not setting.stack.adds_into_buffer
    return np.minimum(counts.block, _MESSAGE) if in_messages else counts.block


def reduced_ends(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """The same for what is in no block: (s, n)."""
    is_copied = _gathers(setting, points) & ~sums_whole(points)
    return np.where(is_copied, counts.ends * reduced_bytes(setting, points), 0)


def late_message(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """The last message of the micro-batch before, until the next one is made: (s, n)."""
    return np.where(points.num_micro_batches > 1, reduced_ends(setting, points, counts), 0)


def gathered_at_last(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """Copies of parameters when the ends are reduced, whose own FSDP2 has freed by then: (s, n)."""
    stay = stays_gathered(setting, points, counts, 1.0)
    alone = (points.num_micro_batches == 1) & (points.pp == 1)
    frees = points.is_fsdp & (alone | ((points.zero == 3) & (points.pp == 1)))
    return np.where(frees, stay - counts.ends * points.value_bytes, stay)


def widened_grads(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """The fp32 copies of a shard's 16-bit gradients that an update outside of the buffers makes,
    parameter by parameter: (s, n)."""
    narrow = _grad_bytes(setting, points.param_bytes) < _FP32
    makes = lasting_buffers(setting, points) & narrow & setting.stack.adds_into_buffer
    return np.where(makes, _FP32 * counts.sharded, 0)


def flat_copies(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """Where products don't add into the buffer, gradients are copied into one tensor for the
    update, a whole shard's, of 16-bit ones in fp32 as well: (s, n)."""
    given = _grad_bytes(setting, points.param_bytes)
    update = np.where(given < _FP32, (given + _FP32) * counts.sharded, 0)
    return np.where(_copies_grads(setting, points), update, 0)


def kept_message(setting: Setting, points: Points, counts: ParameterCounts) -> Array:
    """The buffer that such gradients are reduced in, there from its first use on: (s, n)."""
    given = _grad_bytes(setting, points.param_bytes)
    message = np.where(
        dense_groups(points).shards > 1, np.minimum(counts.whole, _MESSAGE) * given, 0
    )
    return np.where(_copies_grads(setting, points), message, 0)


def _copies_grads(setting: Setting, points: Points) -> Array:
    """Whether lasting buffers are filled by copies (DeepSpeed): (n,), bool."""
    return lasting_buffers(setting, points) & (not setting.stack.adds_into_buffer)
