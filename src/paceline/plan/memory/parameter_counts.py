"""Which part of the parameters a rank holds: counts, before anything is said about bytes.

Tensor parallelism cuts the matrices (`paceline.models.placements`) and leaves norms, routers and
the narrow vectors of latent attention whole; experts are cut over ep, and over tp too unless the
stack gives whole experts to the ranks. What a rank then holds is sharded over its data ranks: over
fsdp and cp together where there is fsdp, the experts over those of them that hold the same ones
(as `paceline.comm.mesh` lays out the ranks).
"""

from typing import NamedTuple

import numpy as np

from paceline.config.model import Model
from paceline.plan.adapters import (
    adapters_of_block,
    expert_adapters_of_block,
    spared_by_narrow,
)
from paceline.plan.block_kinds import BlockKind, block_kinds_of
from paceline.plan.data_groups import dense_groups, expert_groups
from paceline.plan.points import Array, Points, Setting
from paceline.plan.stages import Holdings


class BlockParams(NamedTuple):
    """Parameters of one block, by how they are shared out."""

    cut: int
    """Split over tp."""
    whole: int
    """The same on every tp rank."""
    experts: int
    """Split over ep."""


class ParameterCounts(NamedTuple):
    """Parameters on a rank; those of units are (n,), the others (s, n)."""

    whole: Array
    """Before sharding over data ranks."""
    sharded: Array
    """What the rank keeps of them between steps."""
    ends: Array
    """Of `whole`, what is in no block: embedding, final norm, head."""
    head: Array
    """Of these, the tables of heads."""
    block: Array
    """Of the largest block, before sharding, but for experts that are a unit of their own."""
    experts: Array
    """Of the largest such unit, before sharding; 0 where there is none."""
    beside_experts: Array
    """Of the blocks that have such units, the largest one's other parameters."""


def block_params(model: Model, kind: BlockKind) -> BlockParams:
    """Parameters of a block of a kind."""
    experts = model.experts if kind.has_experts else None
    matrices = 3 if model.gated else 2
    routed = 0
    whole = model.num_block_norms * model.norm_params + model.num_row_biases(kind.layer)
    whole += 2 * model.head_dim if model.qk_norm else 0
    if experts is not None:
        routed = experts.num_experts * matrices * model.hidden_size * experts.ffn_size
        routed += experts.num_biases(model.hidden_size) - experts.num_experts * experts.bias
        whole += model.hidden_size * (experts.num_experts + int(experts.shared_gate))
        whole += experts.num_experts * experts.bias
    if model.latent is not None:
        q_rank, kv_rank = model.latent.q_rank or 0, model.latent.kv_rank
        whole += (q_rank + kv_rank + model.latent.rope_dim) * model.hidden_size + q_rank + kv_rank
    return BlockParams(model.num_block_params(kind.layer) - whole - routed, whole, routed)


def counts_of(
    setting: Setting, points: Points, holdings: Holdings, *, copies: bool = False
) -> ParameterCounts:
    """How many parameters a rank holds. Matrices in 4 bits are as many as take their bytes.

    Args:
        setting: model and what is trained.
        points: n layouts.
        holdings: what each rank holds.
        copies: count those that are gathered or cast, numbers of the arithmetic; else the stored
            ones. Shards in 4 bits are gathered, and nothing is cast to 4 bits.
    """
    of_copy = np.where(points.is_fsdp, points.value_bytes, 0)
    dense, experts = _of_block(setting, points, of_copy if copies else points.param_bytes)
    ends = _ends(setting, points, holdings)
    all_dense = (holdings.layers * dense[:, None]).sum(0) + ends
    all_experts = (holdings.layers * experts[:, None]).sum(0)
    return ParameterCounts(
        whole=all_dense + all_experts,
        sharded=all_dense / dense_groups(points).shards
        + all_experts / expert_groups(setting, points).shards,
        ends=ends,
        head=holdings.heads * setting.model.num_embedding_params / points.tp,
        **_units(setting, points, dense, experts),
    )


def trained_counts(
    setting: Setting, points: Points, holdings: Holdings, counts: ParameterCounts
) -> ParameterCounts:
    """How many of them are trained, and so have gradients and state: all, or the adapters.

    Args:
        setting: says which.
        points: n layouts.
        holdings: what each rank holds.
        counts: of all parameters.
    """
    if not setting.finetune.is_adapted:
        return counts
    nothing = np.zeros_like(counts.whole)
    dense = adapters_of_block(setting, points, trained=True)
    experts = expert_adapters_of_block(setting, points, trained=True)
    all_dense = (holdings.layers * dense[:, None]).sum(0) + nothing
    all_experts = (holdings.layers * experts[:, None]).sum(0) + nothing
    return ParameterCounts(
        whole=all_dense + all_experts,
        sharded=all_dense / dense_groups(points).shards
        + all_experts / expert_groups(setting, points).shards,
        ends=nothing,
        head=nothing,
        **_units(setting, points, dense, experts),
    )


def experts_apart(setting: Setting, points: Points) -> Array:
    """Whether FSDP2 has the experts of a block as a unit of their own, since other ranks hold the
    same ones (`paceline.parallel.apply`): (n,), bool."""
    in_blocks = setting.stack.states == "shards" and setting.stack.gather_unit == "block"
    return in_blocks & points.is_fsdp & (points.ep > 1)


def _units(setting: Setting, points: Points, dense: Array, experts: Array) -> dict[str, Array]:
    """Sizes of the units that are gathered and reduced, of (k, n) parameters of blocks."""
    apart = experts_apart(setting, points)
    with_experts = np.array([[kind.has_experts] for kind in block_kinds_of(setting.model)])
    return {
        "block": (dense + np.where(apart, 0, experts)).max(0),
        "experts": np.where(apart, experts.max(0), 0),
        "beside_experts": np.where(apart, (with_experts * dense).max(0), 0),
    }


def _of_block(setting: Setting, points: Points, number_bytes: Array) -> tuple[Array, Array]:
    """Dense parameters and experts of one block of each kind on a rank: (k, n) each."""
    counts = [block_params(setting.model, kind) for kind in block_kinds_of(setting.model)]
    cut, whole, experts = (np.array(column, float)[:, None] for column in zip(*counts, strict=True))
    of_tp = points.tp if setting.stack.expert_tp == "tp" else 1
    dense = cut / points.tp + whole + adapters_of_block(setting, points)
    dense = dense - spared_by_narrow(setting, points, number_bytes)
    return dense, experts / (points.ep * of_tp) + expert_adapters_of_block(setting, points)


def copied_of_block(setting: Setting, points: Points, *, trained: bool = False) -> Array:
    """Numbers of the copies of hot experts that a rank has in a block of each kind: (k, n).

    Args:
        trained: count those that have gradients.
    """
    hot, mixture = setting.comm.ep.hot_experts, setting.model.experts
    kinds = block_kinds_of(setting.model)
    if not hot or mixture is None:
        return np.zeros((len(kinds), 1))
    stacks = expert_adapters_of_block(setting, points, trained=trained)
    if not (trained and setting.finetune.is_adapted):
        of_tp = points.tp if setting.stack.expert_tp == "tp" else 1
        routed = np.array([block_params(setting.model, kind).experts for kind in kinds], float)
        stacks = stacks + routed[:, None] / (points.ep * of_tp)
    return np.where(points.ep > 1, hot / mixture.num_experts * points.ep, 0) * stacks


def _ends(setting: Setting, points: Points, holdings: Holdings) -> Array:
    """Embedding, final norm and head: (s, n). A tied head shares the embedding's table only where
    no pipeline parts them."""
    model, tables = setting.model, holdings.embeddings + holdings.heads
    if model.tie_embeddings:
        tables = np.where(points.pp == 1, np.minimum(tables, 1), tables)
    table = model.num_embedding_params / points.tp
    positions = holdings.embeddings * model.num_position_params / points.tp
    bias = model.vocab_size / points.tp if model.head_bias else 0
    whole = model.num_end_norm_params + model.num_head_layer_params
    return tables * table + positions + holdings.heads * (whole + bias)


def largest_of_block(setting: Setting, points: Points) -> Array:
    """Parameters of a block's largest matrix on a rank, whole over data ranks: (n,). Experts of a
    rank are one matrix."""
    model = setting.model
    dense = model.hidden_size * model.ffn_size / points.tp
    if model.experts is None:
        return dense
    of_tp = points.tp if setting.stack.expert_tp == "tp" else 1
    stacked = model.experts.num_experts / points.ep * model.experts.ffn_size / of_tp
    return np.maximum(dense, model.hidden_size * stacked)


def largest_matrix(setting: Setting, points: Points) -> Array:
    """Parameters in a rank's shard of the largest matrix: (n,)."""
    model = setting.model
    widths = model.hidden_size * max(model.vocab_size, model.ffn_size)
    largest = max(widths, model.num_position_params)
    return largest / (points.tp * dense_groups(points).shards)


def lasting_buffers(setting: Setting, points: Points) -> Array:
    """Whether parameters are whole all the time, as `Stack.states` says: (n,), bool."""
    return (setting.stack.states == "buffers") & (points.zero < 3)
