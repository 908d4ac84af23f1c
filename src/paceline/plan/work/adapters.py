"""What a block does where adapters alone are trained (`paceline.models.adapters`).

Matrices, norms and biases have no gradients of their own: of a product's two backward products the
one for its input is left. Beside each adapted matrix stand two narrow products, the factor of what
they give, and the sum with what the matrix gives; backward the sum of two gradients of their input.
Blocks below the first adapter have no backward pass, and in its own block nobody asks for the
gradient of the block's input. Matrices in 4 bits become numbers for each product.

Systems whose kernels are fused have one adapter for queries, keys and values, and one for gate and
up (https://github.com/NVIDIA-NeMo/Megatron-Bridge, peft/lora.py: linear_qkv, linear_fc1).

Paper: https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.plan.adapters import (
    adapted_matrices,
    adapters_of_block,
    expert_adapters_of_block,
    first_adapted,
    spared_by_narrow,
)
from paceline.plan.block_kinds import BlockKind, block_kinds_of
from paceline.plan.points import Array, Points, Setting
from paceline.plan.work.lists import PLAIN, MatmulOp, MemoryOp, PartWork, Sizes, like

# A weight in 4 bits with its part of a scale, and what its way to a number reads and writes kernel
# by kernel (models/nf4.py): codes as int32, the look-up, the product with the scale, a cast.
_NARROW_BYTES = 4.5 / 8
_UNPACKING_BYTES = 2 + 2 + 4 + 8 + 4
_MERGED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}

# What these read comes from another product or from attention.
_INSIDE = ("o_proj", "down_proj", "q_b_proj", "kv_b_proj")


class _Fused(NamedTuple):
    """What is left of the factor, the sum and their gradients where a compiler fuses them."""

    forward: int
    """Passes over what the matrix gives."""
    kernels: int
    given: int
    """Backward: passes over what it gives."""
    read: int
    """Backward: passes over what it reads."""
    back_kernels: int


# Forward the kernel that reads the sum makes it as it goes: positions (q, k), the activation (gate
# and up; it writes them too, for the backward pass), the sum of the stream (down; behind attention
# two kernels read it). Attention is no kernel of a compiler's, so values are summed apart. Backward
# the activation's kernel writes a gradient with the factor and without; others have a kernel for
# it. The kernel that the gradient of the input goes to reads an addend more, but attention's does
# not. So counts Inductor's scheduler as well: tests/plan/test_adapters.py.
_OF_SCORES, _OF_ACTIVATION = _Fused(1, 0, 2, 1, 1), _Fused(2, 0, 1, 1, 0)
_UNFUSED = _Fused(3, 1, 2, 3, 2)
_COMPILED = {
    "q_proj": _OF_SCORES,
    "k_proj": _OF_SCORES,
    "v_proj": _OF_SCORES._replace(forward=3, kernels=1),
    "o_proj": _Fused(2, 1, 1, 3, 2),
    "gate_proj": _OF_ACTIVATION,
    "up_proj": _OF_ACTIVATION,
    "down_proj": _OF_SCORES,
}


class _Adapter(NamedTuple):
    """An adapter on a rank, and the matrix beside it."""

    rows: Array
    """That pass it, mean over the blocks of a kind."""
    inputs: Array
    outputs: Array
    groups: Array | int
    share: float
    """Of the blocks, those that have it."""
    passed: float
    """Of these, those where the gradient of its input is asked for."""
    ends_block: bool
    reads_stream: bool
    """Its input is in the type of the residual stream, not yet in that of products."""
    is_narrow: bool
    fused: _Fused


def frozen(work: PartWork) -> PartWork:
    """A part of which nothing is trained."""
    # What is one product stays one: each is priced once.
    kept = {id(each): each._replace(trained=False) for each in work.products}
    return replace(
        work,
        products=tuple(kept[id(each)] for each in work.products),
        tensors=0,
        frozen=work.params,
        frozen_experts=work.expert_params,
    )


def with_adapters(
    setting: Setting,
    points: Points,
    sizes: Sizes,
    kind: BlockKind,
    work: PartWork,
    num_first: int,
) -> PartWork:
    """A block of this kind with its adapters.

    Args:
        setting: says what has adapters.
        points: n layouts.
        sizes: of theirs.
        kind: of block.
        work: the block's without adapters.
        num_first: products at the head of the list that read the block's input.
    """
    first = first_adapted(setting)
    reached = float(np.mean([layer >= first for layer in kind.layers]))
    asked = float(np.mean([layer > first for layer in kind.layers]))
    # Of a block's backward passes, how many want the gradient of what the block reads.
    passed = asked / reached if reached else 0.0
    base = frozen(work)
    heads = {id(each): each._replace(passed=passed) for each in base.products[:num_first]}
    products = [heads[id(each)] for each in base.products[:num_first]]
    products += base.products[num_first:]
    tuned = setting.finetune
    factors = sum(tuned.trains(factor) for factor in ("a", "b")) + tuned.decomposed
    sweeps, tensors = list(base.sweeps), 0.0
    for adapter in _adapters(setting, points, sizes, kind, first):
        products += _narrow_products(setting, adapter, reached)
        sweeps += _passes(setting, points, sizes, adapter)
        tensors += adapter.share * factors
    number = block_kinds_of(setting.model).index(kind)

    def of_kind(rows: Array) -> Array:
        return np.asarray(rows[number], float)

    spared = of_kind(spared_by_narrow(setting, points, points.value_bytes))
    params = base.params + of_kind(adapters_of_block(setting, points)) - spared
    experts = base.expert_params + of_kind(expert_adapters_of_block(setting, points))
    trained = of_kind(adapters_of_block(setting, points, trained=True))
    trained_experts = of_kind(expert_adapters_of_block(setting, points, trained=True))
    return replace(
        base,
        products=tuple(products),
        sweeps=tuple(sweeps),
        tensors=tensors,
        params=params,
        expert_params=experts,
        frozen=params - trained,
        frozen_experts=experts - trained_experts,
        reached=reached,
    )


def _adapters(
    setting: Setting, points: Points, sizes: Sizes, kind: BlockKind, first: int
) -> Iterator[_Adapter]:
    mixture, narrow = setting.model.experts, setting.finetune.is_narrow
    merged: dict[str, _Adapter] = {}
    for matrix, layers in adapted_matrices(setting, kind):
        layer, _, name = matrix.name.rpartition(".")
        share = len(layers) / len(kind.layers)
        reads_input = layer == "attention" and name in ("q_proj", "k_proj", "v_proj")
        passed = sum(at > first for at in layers) / len(layers) if reads_input else 1.0
        outputs = matrix.outputs / (points.tp if matrix.cuts == "outputs" else like(1))
        adapter = _Adapter(
            share * sizes.tokens,
            matrix.inputs / (points.tp if matrix.cuts == "inputs" else like(1)),
            outputs,
            1,
            share,
            passed,
            name == "down_proj",
            name not in _INSIDE,
            narrow,
            _fused(setting, name),
        )
        key = f"{layer}.{_MERGED.get(name, name) if sizes.merged else name}"
        if key in merged:
            adapter = merged[key]._replace(outputs=merged[key].outputs + outputs)
        merged[key] = adapter
    yield from merged.values()
    if mixture is not None and kind.has_experts:
        cut = setting.stack.expert_tp == "tp"
        of_tp = points.tp if cut else like(1)
        rows = sizes.tokens / (1 if cut else points.tp) * mixture.experts_per_token
        rows = rows * np.where(points.ep > 1, setting.busiest_load, 1.0)
        own = np.maximum(mixture.num_experts / points.ep, 1)
        own = own + np.where(points.ep > 1, setting.comm.ep.hot_experts, 0)
        for matrix, layers in adapted_matrices(setting, kind, of_experts=True):
            share = len(layers) / len(kind.layers)
            inputs = matrix.inputs / (of_tp if matrix.cuts == "inputs" else like(1))
            outputs = matrix.outputs / (of_tp if matrix.cuts == "outputs" else like(1))
            ends = matrix.cuts == "inputs" and not mixture.shared_ffn_size
            stream = matrix.cuts == "outputs"
            yield _Adapter(
                share * rows, inputs, outputs, own, share, 1.0, ends, stream, False, _UNFUSED
            )


def _fused(setting: Setting, name: str) -> _Fused:
    if setting.finetune.decomposed:
        return _UNFUSED
    # Without positions to turn, attention reads queries and keys as it does values.
    is_turned = setting.model.rope_dim > 0 or name not in ("q_proj", "k_proj")
    return _COMPILED.get(name if is_turned else "v_proj", _UNFUSED)


def _narrow_products(setting: Setting, adapter: _Adapter, reached: float) -> list[MatmulOp]:
    """Both products; with magnitudes also the one that gives the sum, whose rows are measured.

    Blocks with adapters all have a backward pass: of the share `reached` of blocks it is one more.
    """
    tuned = setting.finetune
    rank, groups = like(tuned.rank), adapter.groups
    down = MatmulOp(adapter.rows, rank, adapter.inputs, PLAIN, groups)
    up = MatmulOp(adapter.rows, adapter.outputs, rank, PLAIN, groups, adapter.ends_block)
    below = adapter.passed / reached
    between = 1 / reached if tuned.trains("a") else below
    found = [
        down._replace(trained=tuned.trains("a"), passed=below),
        up._replace(trained=tuned.trains("b"), passed=between),
    ]
    if tuned.decomposed:
        whole = MatmulOp(adapter.share * adapter.outputs, adapter.inputs, rank, PLAIN)
        found.append(whole._replace(trained=False, passed=0.0))
    return found


def _passes(
    setting: Setting, points: Points, sizes: Sizes, adapter: _Adapter
) -> Iterator[MemoryOp]:
    """Kernels that only move data: the factor and the sum, backward their gradients; casts of the
    input, dropout, magnitudes, and matrices that are unpacked."""
    tuned, value, share = setting.finetune, sizes.value_bytes, adapter.share
    read, given = adapter.rows * adapter.inputs, adapter.rows * adapter.outputs
    dropped = (2 * value + 1) * read * (tuned.dropout > 0)
    is_cast = sizes.casts & adapter.reads_stream
    casts = np.where(is_cast, 6 * read, 0)
    fused, extra = adapter.fused, (tuned.dropout > 0) + is_cast
    forward = np.where(points.compile, fused.forward, 5) * value * given + dropped + casts
    summed = adapter.passed * read
    backward = np.where(
        points.compile, fused.given * given + fused.read * summed, 2 * given + 3 * summed
    )
    backward = backward * value + dropped + casts
    kernels = np.where(points.compile, fused.kernels, 2.0) + extra
    back_kernels = np.where(points.compile, fused.back_kernels, 1 + adapter.passed) + extra
    weights = share * adapter.inputs * adapter.outputs
    if tuned.decomposed:  # the sum's rows are measured; what both give is weighed, row by row
        forward = forward + 4 * value * given + 6 * value * weights
        backward = backward + 8 * value * given
        kernels, back_kernels = kernels + 8, back_kernels + 6
    yield MemoryOp(forward, share * kernels, False)
    yield MemoryOp(backward, share * back_kernels, True)
    if adapter.is_narrow:
        steps = np.where(points.compile, 0, _UNPACKING_BYTES)
        unpacked = weights * (_NARROW_BYTES + steps + value)
        for is_backward in (False, True):
            yield MemoryOp(unpacked, share * np.where(points.compile, 1.0, 5.0), is_backward)
