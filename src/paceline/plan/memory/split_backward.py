"""Split backward: what waits between the two halves of a split backward pass.

The first half (I) finds the gradients of a stage's inputs, the second (W) those of its weights. A
product's weight needs, beside the input that the forward pass kept, the gradient of the product's
result, and the weight of a norm that of the norm's result: the first half leaves them to the second
(`torch.distributed.pipelining._backward`), and nothing that the forward pass kept goes before.

It does not say which micro-batches wait, see `paceline.plan.memory.holdings`.

Source: zero bubbles, https://arxiv.org/abs/2401.10241, section 2.
"""

from collections.abc import Sequence

import numpy as np

from paceline.plan.block_kinds import block_kinds_of
from paceline.plan.points import Array, Points, Setting
from paceline.plan.work import MatmulOp, block_work, sizes_of

# Norms of a block, each with a weight.
_NORMS = 2


def has_whole_backward(points: Points) -> Array:
    """Whether a block's backward pass is one piece (`paceline.parallel.pp.stage`): (n,), bool."""
    whole = points.compile | (points.recompute != 0) | points.offload_activations
    return whole.astype(bool) | points.frees_weights


def has_split_backward(points: Points) -> Array:
    """Whether backward passes have two halves: (n,), bool."""
    return points.splits_backward & ~has_whole_backward(points)


def bytes_left_to_weights(setting: Setting, points: Points) -> Array:
    """Bytes that a micro-batch's I leaves to its W in a block of each kind: (k, n)."""
    kinds = block_kinds_of(setting.model)
    if not np.any(has_split_backward(points)):
        return np.zeros((len(kinds), 1))
    sizes = sizes_of(setting, points)
    trained = 0 if setting.finetune.is_adapted else _NORMS
    norms = trained * setting.model.hidden_size * sizes.stream_tokens * sizes.stream_bytes
    rows = [
        norms + sizes.value_bytes * _results(block_work(setting, points, kind).products)
        for kind in kinds
    ]
    return np.stack([np.where(has_split_backward(points), row, 0) for row in rows])


def _results(products: Sequence[MatmulOp]) -> Array:
    """Numbers that those of some products give whose matrices are trained: (n,)."""
    return sum((product.m * product.n for product in products if product.trained), np.zeros(1))
