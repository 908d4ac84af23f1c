"""The vocabulary of the lists: what operators there are, and the sizes that all parts share."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.plan.points import Array, Points, Setting

# Arithmetic of a product: the layout's for linear layers of blocks (fp8 only there), that of the
# values for the others, fp32 for what must not be rounded.
LINEAR, PLAIN, WIDE = range(3)
FP32 = 4  # bytes
# A grouped product works in tiles of 128 rows (CUTLASS): half a tile of each expert is empty.
_GROUP_PADDING_ROWS = 64


class MatmulOp(NamedTuple):
    """A linear layer (m, k) x (k, n), forward; backward is two more of the same FLOPs."""

    m: Array
    n: Array
    k: Array
    arithmetic: int
    """LINEAR, PLAIN or WIDE."""
    groups: Array | int = 1
    """Matrices that share the rows m: the experts of a rank."""
    ends_block: bool = False
    """Whether nothing that backward needs follows it in its block."""
    readers: int = 1
    """Products of the block that read the same input, this one included."""
    trained: bool = True
    """Whether its matrix has a gradient."""
    passed: float = 1.0
    """Share of the part's backward passes that ask for the gradient of its input."""


class AttentionOp(NamedTuple):
    """Attention: scores, softmax and weighted values."""

    batch: Array
    heads: Array
    q_len: Array
    kv_len: Array
    head_dim: float
    visible: Array
    """Share of the q x kv square that the mask leaves."""
    calls: Array
    """One, or one per hop of a ring."""


class MemoryOp(NamedTuple):
    """Kernels that only move data."""

    num_bytes: Array
    """Read and written, all kernels together."""
    kernels: Array
    """0: the bytes are moved by kernels that are counted elsewhere."""
    backward: bool


class CollectiveOp(NamedTuple):
    """A collective in the way of the computation."""

    axis: str
    op: str
    num_bytes: Array
    """The whole buffer, as `collective_s` counts."""
    num_ranks: Array
    stride: Array
    times: Array | float
    backward: bool
    again: str = ""
    """Which kinds of recompute do it again: "", "full", or "selective" (and full)."""
    spared: float = 0.0
    """How many of `times` they leave out, since nothing that backward needs follows."""


@dataclass(frozen=True)
class PartWork:
    """One part on one rank, for one micro-batch."""

    products: tuple[MatmulOp, ...] = ()
    cores: tuple[AttentionOp, ...] = ()
    sweeps: tuple[MemoryOp, ...] = ()
    exchanges: tuple[CollectiveOp, ...] = ()
    params: Array | float = 0.0
    """Parameters of the part that this rank holds before sharding over the data axes."""
    expert_params: Array | float = 0.0
    """Those of its experts, which are sharded over fewer ranks."""
    tensors: Array | float = 0.0
    """How many tensors its parameters are, each with a gradient that is added up."""
    host_syncs: Array | float = 0.0
    """Times that the host waits for the device, forward."""
    in_block: bool = False
    """Whether it is in a block, which may recompute; embedding and head never do."""
    frozen: Array | float = 0.0
    """Of `params`, those that are not trained."""
    frozen_experts: Array | float = 0.0
    """Of `expert_params`, those that are not trained."""
    reached: float = 1.0
    """Share of such parts that have a backward pass: nothing below the first adapter has one."""

    def __add__(self, other: "PartWork") -> "PartWork":
        return PartWork(
            self.products + other.products,
            self.cores + other.cores,
            self.sweeps + other.sweeps,
            self.exchanges + other.exchanges,
            self.params + other.params,
            self.expert_params + other.expert_params,
            self.tensors + other.tensors,
            self.host_syncs + other.host_syncs,
            self.in_block or other.in_block,
            self.frozen + other.frozen,
            self.frozen_experts + other.frozen_experts,
            min(self.reached, other.reached),
        )


class Sizes(NamedTuple):
    """What the shapes of a rank's tensors follow from."""

    tokens: Array
    """Of a micro-batch, that this rank computes attention and feed-forward for."""
    stream_tokens: Array
    """Those of the residual stream: a share of them under sequence parallel."""
    value_bytes: Array
    stream_bytes: Array
    """Of a number of the residual stream: autocast keeps it in fp32."""
    fused: Array
    """Whether element-wise kernels are fused."""
    merged: bool
    """Whether products of the same input are one: queries, keys and values; gate and up."""
    casts: Array
    """Whether autocast casts the inputs and weights of each product."""


def sizes_of(setting: Setting, points: Points) -> Sizes:
    """The sizes that all parts share."""
    tokens = points.micro_batch * setting.seq_len / points.cp
    stream_tokens = np.where(points.sequence_parallel, tokens / points.tp, tokens)
    fused = points.compile | (setting.stack.elementwise == "fused")
    casts = autocasts(setting, points)
    stream_bytes = np.where(casts, points.param_bytes, points.value_bytes)
    merged = setting.stack.elementwise == "fused"
    return Sizes(tokens, stream_tokens, points.value_bytes, stream_bytes, fused, merged, casts)


def autocasts(setting: Setting, points: Points) -> Array:
    """Whether autocast does the casts: ours, where FSDP2 doesn't cast the parameters."""
    is_ours = setting.stack.elementwise == "eager"
    return is_ours & ~points.is_fsdp & (points.param_bytes != points.value_bytes)


def rows_of_each(setting: Setting, product: MatmulOp) -> tuple[Array, Array]:
    """Rows of a product as it is computed, and how many such there are.

    One kernel for all groups leaves half a tile of each empty; a loop has a product for each.
    """
    groups = np.asarray(product.groups, float)
    if setting.stack.grouped_products == "loop":
        return product.m / groups, np.atleast_1d(groups)
    padding = _GROUP_PADDING_ROWS if setting.device.kind != "cpu" else 0
    return product.m + np.where(groups > 1, groups * padding, 0), np.ones(1)


def enter_or_leave(
    points: Points,
    whole: Array,
    count: float,
    *,
    leave: bool,
    gathered: Array | float = 1.0,
    again: str = "",
    spared: float = 0.0,
) -> tuple[CollectiveOp, ...]:
    """Under sequence parallel a gather on entry and a scatter of sums on leaving; backward the
    other way round. Without it an all-reduce on leaving, and backward on entry. A gather sends
    `gathered` times the bytes of the others. What is forward may be recomputed: `again` and
    `spared` are the Exchange's.
    """
    shared, stride = points.sequence_parallel, like(1)
    ranks = np.where(shared, points.tp, 1)
    plain_ranks = np.where(shared, 1, points.tp)
    here, back = ("reduce_scatter", "all_gather") if leave else ("all_gather", "reduce_scatter")
    ahead, behind = (whole, whole * gathered) if leave else (whole * gathered, whole)
    return (
        CollectiveOp("tp", here, ahead, ranks, stride, count, False, again, spared),
        CollectiveOp("tp", back, behind, ranks, stride, count, True),
        CollectiveOp(
            "tp", "all_reduce", whole, plain_ranks, stride, count, not leave, again, spared
        ),
    )


def like(value: float) -> Array:
    """A number as a column."""
    return np.full(1, float(value))
