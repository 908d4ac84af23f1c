"""Buffers, slack and context: memory that neither states nor activations explain.

What is passed between ranks needs room at both ends: outputs of a stage that wait for their
gradient, keys and values on their way around a ring, rows on their way to experts. The allocator
reserves more than it hands out, and the driver and the communication library take memory that no
allocator sees.
"""

from collections.abc import Mapping

import numpy as np

from paceline.plan.memory.activations import kept_input, shape_of
from paceline.plan.memory.logits import narrow_share
from paceline.plan.memory.parameter_counts import copied_of_block
from paceline.plan.points import Array, Points, Setting
from paceline.plan.stages import Holdings

_FP32 = 4
_GIB = 2**30

# Reserved beyond what comes and goes, for holes that nothing fits: torchtitan's published reserved
# peaks of Llama-3 8B (fp32 loss; eager and compiled, 8 and 128 ranks) leave 0.07 to 0.15, and a
# prediction should rather be too high. Assumed for other systems, and for expandable segments,
# which need less.
SLACK_SHARE = 0.15
# Tensors that were freed while a second stream had them, so that the allocator holds them still: of
# tp those that were gathered and summed; of gathered keys and values those of the forward pass made
# again, and of the backward pass. Two explains tp's published peaks (torchtitan).
_LATE = 2
# A CUDA context with its loaded kernels and cuBLAS workspaces (assumed; 0.4-0.6 GiB are usual).
CONTEXT_BYTES = 0.5 * _GIB
# The same where all kernels of torch, cuBLAS and cuDNN are loaded, as before CUDA 11.7 loaded them
# when called (https://pytorch.org/blog/PyTorch-1.13-release; assumed: 1.5-2 GiB were usual).
WHOLE_CONTEXT_BYTES = 1.7 * _GIB
# NCCL's buffers for one group of ranks (assumed: 0.4 GiB are usual for eight ranks, with 16
# channels or more, buffers each way, and several protocols).
COMMUNICATOR_BYTES = 0.4 * _GIB


def slack_bytes(setting: Setting, points: Points, terms: Mapping[str, Array]) -> Array:
    """What the allocator has reserved beyond the tensors of the peak: (s, n).

    A segment that was freed serves requests that are no larger, so some memory is reserved for one
    moment only: 16-bit logits make no room for what follows them, and shards of gradients lie among
    what activations left (counted up to the general share). What tp gathers and sums comes free
    late, each as long as the whole stream, unless symmetric memory, which isn't the allocator's,
    takes its place.

    Args:
        setting: its device and stack; a CPU's allocator gives memory back.
        points: n layouts.
        terms: at the peak, what comes and goes; "waiting": gradients as the optimizer finds them;
            "flat": tensors of another moment that are too large for any hole.
    """
    if setting.device.is_cpu or setting.stack.allocator == "planned":
        return np.zeros(1)
    others = ("waiting", "flat")
    moving = sum((value for name, value in terms.items() if name not in others), np.zeros(1))
    share = SLACK_SHARE * moving
    absent = np.minimum(np.maximum(terms["waiting"] - terms["grads"], 0), share)
    narrow = terms["logits"] * narrow_share(setting, points)
    stream = shape_of(setting, points).tokens * setting.model.hidden_size * points.value_bytes
    late = np.where((points.tp > 1) & ~points.async_tp.astype(bool), _LATE * stream, 0)
    return share + absent + narrow + late + terms["flat"]


def context_bytes(setting: Setting, points: Points) -> Array:
    """Outside of the allocator: the context, and a communicator for each axis in use: (n,).

    Megatron and DeepSpeed have more: one of all ranks and, where several hold a model, one of these
    for norms and overflows, and one of the two stages that share the embedding.
    """
    if setting.device.is_cpu or setting.stack.allocator == "planned":
        return np.zeros(1)
    axes = (
        *(points.workers, points.dp, points.fsdp),
        *(points.tp, points.pp, points.cp, points.ep),
    )
    communicators = sum(((axis > 1) * 1.0 for axis in axes), np.zeros(1))
    if setting.stack.states == "buffers":
        communicators = communicators + sum(
            there * 1.0
            for there in (points.num_ranks > 1, points.tp * points.pp > 1, points.pp > 1)
        )
    context = {"used": CONTEXT_BYTES, "all": WHOLE_CONTEXT_BYTES}[setting.stack.loads_kernels]
    return context + communicators * COMMUNICATOR_BYTES


def sent_bytes(setting: Setting, points: Points, holdings: Holdings) -> Array:
    """Between stages: outputs, which wait for their gradient, and a gradient each way, or room for
    those of all micro-batches: (s, n)."""
    layers = np.maximum(holdings.layers.sum(0), 1)
    flights = holdings.in_flight.sum(0) / layers * points.stages_per_rank
    all_of_them = points.num_micro_batches * points.stages_per_rank
    arriving = all_of_them if setting.stack.receives_ahead else np.full(1, 2)
    tensors = np.maximum(flights - holdings.heads_in_flight, 0) + arriving
    return np.where(points.pp > 1, tensors * kept_input(setting, points), 0)


def _gathered_numbers(points: Points, value: Array) -> Array:
    """Bytes per query number of a rank where keys and values come all together.

    As torch.distributed.tensor.experimental._context_parallel has it: keys and values of all ranks,
    those that come free late, and those that are sent; their gradients in fp32 at home, sent and
    received, and this step's; the gradient of the queries in fp32 and this step's.
    """
    ranks = points.cp / points.ulysses
    keys_and_values = 2 * (((1 + _LATE) * ranks + 1) * value + 3 * _FP32 + value)
    return keys_and_values + _FP32 + value


def sequence_bytes(setting: Setting, points: Points) -> Array:
    """Inside attention's backward pass: what the ranks of a sequence exchange: (n,).

    A ring has a block of keys and values and the one that comes, and gradients in fp32 that
    travel: those at home, those under way, those that come, and those of this step; and the
    gradient of its queries in fp32. Ulysses exchanges one tensor at a time.
    """
    model, shape = setting.model, shape_of(setting, points)
    kv = np.maximum(model.num_kv_heads / points.tp, 1) * (model.head_dim + model.value_dim)
    q = model.num_heads * model.head_dim / points.tp
    ring = shape.tokens * (kv * (2 * shape.value + 4 * _FP32) + q * _FP32)
    if setting.stack.cp_keys == "gathered":
        ring = shape.tokens * q * _gathered_numbers(points, shape.value)
    heads = shape.tokens * q * shape.value
    return np.where(points.cp > points.ulysses, ring, 0) + np.where(points.ulysses > 1, heads, 0)


def exchange_bytes(setting: Setting, points: Points) -> Array:
    """Inside a block's backward pass: what attention exchanges, and rows for experts: (n,)."""
    between, experts = sequence_bytes(setting, points), setting.model.experts
    if experts is None:
        return between
    shape = shape_of(setting, points)
    rows = experts.experts_per_token * setting.busiest_load
    sent = 2 * shape.routed_tokens * rows * setting.model.hidden_size * shape.value
    return between + np.where(points.ep > 1, sent, 0) + hot_sums_bytes(setting, points)


def hot_sums_bytes(setting: Setting, points: Points) -> Array:
    """Gradients of copied experts on their way home: (n,)."""
    sums = copied_of_block(setting, points, trained=True).max(0)
    return sums * np.maximum(points.value_bytes, _FP32)
