"""Adapters, as `paceline.models.adapters` makes them: their parameters and what they keep.

Each adapter is two matrices. The one along the side by which tensor parallelism cuts the matrix
they belong to is cut with it; the other one is whole on every rank. Those of routed experts are
shared out with these. The matrices beside them may have 4 bits, and come as numbers for their own
products alone.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paceline.config.finetune import narrow_bytes
from paceline.config.model import Model
from paceline.plan.block_kinds import BlockKind, block_kinds_of
from paceline.plan.points import Array, Points, Setting


class Matrix(NamedTuple):
    """A linear layer of a block, in which tp cuts the inputs, the outputs, or nothing."""

    name: str
    inputs: int
    outputs: int
    cuts: str


def adapted_matrices(
    setting: Setting, kind: BlockKind, *, of_experts: bool = False
) -> list[tuple[Matrix, list[int]]]:
    """The matrices with adapters in blocks of a kind, each with the layers where it has one; of
    routed experts: sizes of one expert's."""
    matrices = (_stacks if of_experts else _matrices)(setting.model, kind)
    found = [
        (matrix, [layer for layer in kind.layers if _is_adapted(setting, layer, matrix)])
        for matrix in matrices
    ]
    return [(matrix, layers) for matrix, layers in found if layers]


def first_adapted(setting: Setting) -> int:
    """The first block with an adapter: no gradient goes below it."""
    return min(
        layer
        for kind in block_kinds_of(setting.model)
        for layer in kind.layers
        for matrices in (_matrices, _stacks)
        if any(_is_adapted(setting, layer, each) for each in matrices(setting.model, kind))
    )


def adapters_of_block(setting: Setting, points: Points, *, trained: bool = False) -> Array:
    """Parameters of a block's adapters on a rank, mean over the blocks of each kind: (k, n).

    Args:
        setting: says what has adapters.
        points: n layouts.
        trained: count those alone that are trained.
    """
    kinds = block_kinds_of(setting.model)
    if not setting.finetune.is_adapted:
        return np.zeros((len(kinds), 1))
    counts = [_of_kind(setting, kind, trained) for kind in kinds]
    cut, whole = (np.array(column, float)[:, None] for column in zip(*counts, strict=True))
    return cut / points.tp + whole


def expert_adapters_of_block(setting: Setting, points: Points, *, trained: bool = False) -> Array:
    """The same of the adapters of routed experts: (k, n)."""
    kinds, mixture = block_kinds_of(setting.model), setting.model.experts
    if not setting.finetune.is_adapted or mixture is None:
        return np.zeros((len(kinds), 1))
    of_tp = points.tp if setting.stack.expert_tp == "tp" else 1
    counts = [_of_kind(setting, kind, trained, of_experts=True) for kind in kinds]
    cut, whole = (np.array(column, float)[:, None] for column in zip(*counts, strict=True))
    return mixture.num_experts * (cut / of_tp + whole) / points.ep


def kept_by_adapters(setting: Setting, kind: BlockKind) -> Array:
    """Numbers that a block's adapters keep for the backward pass, of each token: (1,).

    What is between the two products; with magnitudes also what matrix and adapter each give. Those
    of experts have it of each row that an expert gets.
    """
    kept, mixture = np.zeros(1), setting.model.experts
    if setting.finetune.is_adapted:
        for matrix, layers in adapted_matrices(setting, kind):
            share = len(layers) / len(kind.layers)
            wide = 2 * matrix.outputs * setting.finetune.decomposed
            kept = kept + share * (setting.finetune.rank + wide)
        if mixture is not None:
            rows = mixture.experts_per_token * setting.busiest_load
            for _, layers in adapted_matrices(setting, kind, of_experts=True):
                share = len(layers) / len(kind.layers)
                kept = kept + rows * share * setting.finetune.rank
    return kept


def spared_by_narrow(setting: Setting, points: Points, number_bytes: Array) -> Array:
    """Numbers of a block that matrices in 4 bits leave out on a rank, mean over the blocks of each
    kind: (k, n).

    Args:
        number_bytes: (n,) of a number as it is counted; 0: there are no such numbers of them.
    """
    kinds = block_kinds_of(setting.model)
    if not setting.finetune.is_narrow:
        return np.zeros((len(kinds), 1))
    shares = 1 / np.where(number_bytes == 0, np.inf, number_bytes)
    spared = []
    for kind in kinds:
        dense, narrow = (sum(each) for each in zip(*_narrow(setting, kind), strict=True))
        spared.append((dense - narrow * shares) / len(kind.layers) / points.tp)
    return np.array(spared)


def room_for_narrow(setting: Setting, points: Points) -> Array:
    """Bytes while the largest matrix in 4 bits becomes fp32 numbers, which an int32 for each two of
    them look up: (n,)."""
    if not setting.finetune.is_narrow:
        return np.zeros(1)
    kinds = block_kinds_of(setting.model)
    largest = max(dense for kind in kinds for dense, _ in _narrow(setting, kind))
    return (4 + 2) * largest / points.tp


def _narrow(setting: Setting, kind: BlockKind) -> Iterator[tuple[float, float]]:
    """Weights and bytes of each matrix in 4 bits, of all blocks of a kind."""
    yield 0, 0
    for layer in kind.layers:
        for matrix in _matrices(setting.model, kind):
            if _is_adapted(setting, layer, matrix):
                double = setting.finetune.base == "nf4_double"
                row = narrow_bytes(matrix.inputs, double=double)
                yield matrix.outputs * matrix.inputs, matrix.outputs * row


def _is_adapted(setting: Setting, layer: int, matrix: Matrix) -> bool:
    return setting.finetune.names(f"blocks.{layer}.{matrix.name}")


def _of_kind(
    setting: Setting, kind: BlockKind, trained: bool, *, of_experts: bool = False
) -> tuple[float, float]:
    """What tp cuts of them, and what is whole; of experts: of one of them."""
    finetune = setting.finetune
    has_down, has_up = (not trained or finetune.trains(factor) for factor in ("a", "b"))
    matrices = _stacks if of_experts else _matrices
    cut = whole = 0
    for layer in kind.layers:
        for matrix in matrices(setting.model, kind):
            if _is_adapted(setting, layer, matrix):
                down = finetune.rank * matrix.inputs * has_down
                up = finetune.rank * matrix.outputs * has_up
                cut += down * (matrix.cuts == "inputs") + up * (matrix.cuts == "outputs")
                whole += down * (matrix.cuts != "inputs") + up * (matrix.cuts != "outputs")
                whole += matrix.outputs * finetune.decomposed
    return cut / len(kind.layers), whole / len(kind.layers)


def _matrices(model: Model, kind: BlockKind) -> Iterator[Matrix]:
    """The linear layers of a block of a kind, by their names in it."""
    hidden, heads = model.hidden_size, model.num_heads
    latent, experts = model.latent, model.experts if kind.has_experts else None
    if latent is None:
        yield Matrix("attention.q_proj", hidden, heads * model.head_dim, "outputs")
        for name in ("k_proj", "v_proj"):
            width = model.num_kv_heads * model.head_dim
            yield Matrix(f"attention.{name}", hidden, width, "outputs")
    else:
        queries = heads * latent.head_dim
        if latent.q_rank is None:
            yield Matrix("attention.q_proj", hidden, queries, "outputs")
        else:
            yield Matrix("attention.q_a_proj", hidden, latent.q_rank, "nothing")
            yield Matrix("attention.q_b_proj", latent.q_rank, queries, "outputs")
        yield Matrix("attention.kv_a_proj", hidden, latent.kv_rank + latent.rope_dim, "nothing")
        keys_values = heads * (latent.nope_dim + latent.v_dim)
        yield Matrix("attention.kv_b_proj", latent.kv_rank, keys_values, "outputs")
    yield Matrix("attention.o_proj", heads * model.value_dim, hidden, "inputs")
    layer, width = "ffn", model.ffn_size
    if experts is not None:
        layer, width = "ffn.shared", experts.shared_ffn_size
        if experts.shared_gate:
            yield Matrix("ffn.shared_gate", hidden, 1, "nothing")
    if width:
        for name in ("gate_proj", "up_proj") if model.gated else ("up_proj",):
            yield Matrix(f"{layer}.{name}", hidden, width, "outputs")
        yield Matrix(f"{layer}.down_proj", width, hidden, "inputs")


def _stacks(model: Model, kind: BlockKind) -> Iterator[Matrix]:
    """The stacked matrices of a block's routed experts: sizes of one expert's."""
    if kind.has_experts and model.experts is not None:
        hidden, width = model.hidden_size, model.experts.ffn_size
        yield Matrix("ffn.experts.gate_up_proj", hidden, 2 * width, "outputs")
        yield Matrix("ffn.experts.down_proj", width, hidden, "inputs")
