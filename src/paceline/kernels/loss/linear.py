"""Cross-entropy of a linear layer, without ever holding all logits.

How it works: a chunk of tokens at a time, cuBLAS makes the logits, a kernel puts their gradient in
their place, and cuBLAS makes of it the gradients of the hidden states and of the weight. So nothing
is computed twice (kernels that keep no logits at all compute them anew backward, a quarter of the
work), and the backward pass has only to scale. The weight's gradient is the sum over the chunks, in
fp32.

A chunk is large: of 4096 tokens or more, else the products are too thin for the device and the
weight's gradient goes to and fro too often (at 131072 x 4096 about 1 ms for each chunk).
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.loss.kernel import inverse_count, run_rows, scaled
from paceline.kernels.operator import Differentiable, Operator

LEAST_ROWS = 4096
CHUNK_BYTES = 2 << 30
"""Of a chunk's logits (8192 tokens x 131072 of bf16), or more where LEAST_ROWS take more."""
_TILE = 128
_ALIGNED = 64
_SUM = torch.float32


def rows_of_chunk(tokens: int, vocab: int, item_size: int) -> int:
    """Tokens of a chunk: chunks are few, and as even as whole tiles of the product allow."""
    within_memory = -(-tokens * vocab * item_size // CHUNK_BYTES)
    chunks = max(min(within_memory, tokens // LEAST_ROWS), 1)
    return max(-(-tokens // (chunks * _TILE)), 1) * _TILE


def _run(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_rows: int,
    dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients of hidden (tokens, width) and weight, empty where not wanted."""
    loss, grad_hidden, _ = _results(hidden, weight, wants_hidden, False)
    if not len(hidden):
        return loss.fill_(math.nan), grad_hidden, _zeros(weight, wants_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        states, matrix, grad_hidden = (x.to(dtype) for x in (hidden, weight, grad_hidden))
        inverse, losses = inverse_count(targets), torch.empty_like(targets, dtype=_SUM)
        memory = _rows(min(chunk_rows, len(hidden)), len(weight), states)
        summed = None
        for first in range(0, len(hidden), chunk_rows):
            chunk = slice(first, first + chunk_rows)
            some = states[chunk]
            logits = torch.mm(some, matrix.t(), out=memory[: len(some)])
            gradient = logits if wants_hidden or wants_weight else None
            run_rows(logits, targets[chunk], gradient, losses[chunk], inverse)
            if wants_hidden:
                torch.mm(logits, matrix, out=grad_hidden[chunk])
            if wants_weight:
                to = weight.dtype if len(some) == len(hidden) else _SUM
                summed = _add_product(summed, logits, some, to)
    grad_weight = _zeros(weight, False) if summed is None else summed.to(weight.dtype)
    return losses.sum(), grad_hidden.to(hidden.dtype), grad_weight


def _rows(count: int, width: int, like: Tensor) -> Tensor:
    """Uninitialised rows that begin at multiples of 128 bytes, whatever the vocabulary's size."""
    return like.new_empty((count, -(-width // _ALIGNED) * _ALIGNED))[:, :width]


def _zeros(weight: Tensor, wanted: bool) -> Tensor:
    return weight.new_zeros(weight.shape if wanted else 0)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left.T @ right, rounded to dtype and not before; in place where there is a total."""
    across = left.t()
    if not left.is_cuda:  # there are no products of one type into another
        across, right = across.to(dtype), right.to(dtype)
    if left.dtype == dtype or not left.is_cuda:
        return torch.mm(across, right) if total is None else total.addmm_(across, right)
    if total is None:
        return torch.mm(across, right, out_dtype=dtype)
    if _adds_to_wider(left.device, left.dtype):
        return torch.addmm(total, across, right, out_dtype=dtype, out=total)
    return total.add_(torch.mm(across, right, out_dtype=dtype))


@lru_cache
def _adds_to_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of narrow numbers to an fp32 sum; not all since 2.8 do."""
    narrow = torch.zeros((16, 16), dtype=dtype, device=device)
    total = torch.zeros((16, 16), dtype=_SUM, device=device)
    try:
        torch.addmm(total, narrow, narrow, out_dtype=_SUM, out=total)
    except RuntimeError:
        return False
    return True


def _results(
    hidden: Tensor, weight: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=_SUM),
        torch.empty(hidden.shape if wants_hidden else 0, dtype=hidden.dtype, device=hidden.device),
        torch.empty(weight.shape if wants_weight else 0, dtype=weight.dtype, device=weight.device),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.wanted = inputs[-2:]
    ctx.save_for_backward(*output[1:])


def _gradient(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    made = scaled(ctx, ctx.saved_tensors, grad)
    wanted = (each if is_wanted else None for each, is_wanted in zip(made, ctx.wanted, strict=True))
    return *wanted, None, None, None, None, None


_operator = Operator(
    "linear_cross_entropy",
    _run,
    lambda hidden, weight, targets, chunk_rows, dtype, *wants: _results(hidden, weight, *wants),
)
_differentiable = Differentiable(_operator, _save, _gradient)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int | None, dtype: torch.dtype
) -> Tensor:
    """See the package.

    Args:
        hidden: as there, and the next ones.
        weight: as there.
        targets: as there.
        chunk_rows: tokens of a chunk; None: see `rows_of_chunk`.
        dtype: of the products' operands.
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if chunk_rows is None:
        chunk_rows = rows_of_chunk(len(rows), len(weight), dtype.itemsize)
    wants = (torch.is_grad_enabled() and each.requires_grad for each in (rows, weight))
    loss, *_ = _differentiable(rows, weight, targets, chunk_rows, dtype, *wants)
    return loss
