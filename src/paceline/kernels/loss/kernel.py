"""Cross-entropy in Triton: one program has one row of logits, and reads it twice.

The first reading makes the largest logit and the sum of exponentials: every lane keeps its own of
both, so that lanes meet once at the end of the row and not once a block. The second makes the
gradient and writes it, over the logits if so wanted. A program's row is short enough to lie still
in the L2 when it is read again (a quarter of a megabyte at 131072 of bf16; an H200 works on 132
rows at a time and has 60 MB).

Shifting by the largest logit, not by the log of the sum, keeps digits where logits are huge. Masked
logits (-inf) add nothing; a row of nothing else is NaN, as in torch.

The gradient is that of the mean, so it only waits for the factor that comes from above: 1, as a
rule, and then the backward pass reads this one number and ends.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import Kernel, Launch, as_rows, next_power_of_2
from paceline.kernels.loss.reference import IGNORED
from paceline.kernels.operator import Differentiable, Operator

_IGNORED = tl.constexpr(IGNORED)


@triton.jit
def _count(targets, inverse, tokens, BLOCK: tl.constexpr):
    """1 / the number of targets that count, or infinity."""
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, BLOCK):
        place = start + tl.arange(0, BLOCK)
        target = tl.load(targets + place, mask=place < tokens, other=_IGNORED)
        counted += (target != _IGNORED).to(tl.int32)
    tl.store(inverse, 1.0 / tl.sum(counted, axis=0).to(tl.float32))


@triton.jit
def _largest_and_total(row, width, REPEATS: tl.constexpr, LANES: tl.constexpr):
    """The largest of a row, and the sum of exponentials of what is left when it is taken off."""
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    place = tl.arange(0, REPEATS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, width, REPEATS * LANES):
        x = tl.load(
            row + start + place,
            mask=start + place < width,
            other=float("-inf"),
            eviction_policy="evict_last",
        ).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        # A lane that has seen nothing but -inf must not take -inf from -inf.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[None, :]), axis=0)
        largest = larger
    most = tl.max(largest, axis=0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    return most, tl.sum(total * tl.exp(largest - shift), axis=0)


@triton.jit
def _write_gradient(
    row, gradient, width, target, most, factor, share, REPEATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """exp(x - most) * factor, less share at the target."""
    place = tl.arange(0, REPEATS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, width, REPEATS * LANES):
        column = start + place
        x = tl.load(row + column, mask=column < width, eviction_policy="evict_first")
        change = tl.exp(x.to(tl.float32) - most) * factor
        change = tl.where(column == target, change - share, change)
        tl.store(
            gradient + column,
            change.to(gradient.dtype.element_ty),
            mask=column < width,
            eviction_policy="evict_first",
        )


@triton.jit
def _write_zeros(gradient, width, REPEATS: tl.constexpr, LANES: tl.constexpr):
    place = tl.arange(0, REPEATS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    zeros = tl.zeros((REPEATS, LANES), gradient.dtype.element_ty)
    for start in range(0, width, REPEATS * LANES):
        tl.store(gradient + start + place, zeros, mask=start + place < width)


@triton.jit
def _whole_row(
    logits, targets, gradient, losses, inverse,
    stride, gradient_stride, width,
    WANTS_GRADIENT: tl.constexpr, REPEATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row, gradient = logits + number * stride, gradient + number * gradient_stride
    target = tl.load(targets + number)
    share = tl.load(inverse)
    if target == _IGNORED:
        tl.store(losses + number, 0.0 * share)  # NaN where nothing counts
        if WANTS_GRADIENT:
            _write_zeros(gradient, width, REPEATS, LANES)
    else:
        # Before the row is written over. A target that there isn't makes the loss NaN.
        there = (target >= 0) & (target < width)
        chosen = tl.load(row + target, mask=there, other=float("nan")).to(tl.float32)
        most, total = _largest_and_total(row, width, REPEATS, LANES)
        tl.store(losses + number, (tl.log(total) - (chosen - most)) * share)
        if WANTS_GRADIENT:
            factor = share / total
            _write_gradient(row, gradient, width, target, most, factor, share, REPEATS, LANES)


@triton.jit
def _own_columns(
    logits, targets, found,
    rows, stride, width, first_row,
    REPEATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of this rank's columns: the largest, the sum of exponentials, the target's logit or 0."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    target = tl.load(targets + number)
    found += number
    if target != _IGNORED:
        own = target - first_row
        chosen = tl.load(row + own, mask=(own >= 0) & (own < width), other=0.0).to(tl.float32)
        most, total = _largest_and_total(row, width, REPEATS, LANES)
        tl.store(found, most)
        tl.store(found + rows, total)
        tl.store(found + 2 * rows, chosen)
    else:
        tl.store(found, 0.0)
        tl.store(found + rows, 1.0)
        tl.store(found + 2 * rows, 0.0)


@triton.jit
def _all_columns(
    logits, targets, found, gradient, losses, inverse,
    ranks, rows, stride, gradient_stride, width, first_row,
    WANTS_GRADIENT: tl.constexpr, REPEATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """From what all ranks have found: the loss, and the gradient of this rank's columns."""
    number = tl.program_id(0).to(tl.int64)
    row, gradient = logits + number * stride, gradient + number * gradient_stride
    target = tl.load(targets + number)
    share = tl.load(inverse)
    if target == _IGNORED:
        tl.store(losses + number, 0.0 * share)
        if WANTS_GRADIENT:
            _write_zeros(gradient, width, REPEATS, LANES)
    else:
        most = tl.load(found + number)
        for rank in range(1, ranks):
            most = tl.maximum(most, tl.load(found + 3 * rank * rows + number))
        total, chosen = 0.0, 0.0
        for rank in range(ranks):
            place = found + 3 * rank * rows + number
            total += tl.load(place + rows) * tl.exp(tl.load(place) - most)
            chosen += tl.load(place + 2 * rows)
        tl.store(losses + number, (tl.log(total) - (chosen - most)) * share)
        if WANTS_GRADIENT:
            factor = share / total
            own = target - first_row
            _write_gradient(row, gradient, width, own, most, factor, share, REPEATS, LANES)


@triton.jit
def _scale(x, factor, rows, width, stride, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """x times factor, in place; nothing if that is 1."""
    times = tl.load(factor).to(tl.float32)
    if times != 1.0:
        across = tl.cdiv(width, BLOCK)
        tiles = tl.cast(rows, tl.int64) * across
        for tile in range(tl.program_id(0).to(tl.int64), tiles, PROGRAMS):
            column = (tile % across) * BLOCK + tl.arange(0, BLOCK)
            place = x + (tile // across) * stride + column
            value = tl.load(place, mask=column < width).to(tl.float32) * times
            tl.store(place, value.to(x.dtype.element_ty), mask=column < width)


def _row_rule(width: int) -> Launch:
    """A vector of 8 values a lane and 4 of them at once; the wider, the fewer rows at a time."""
    warps = 4 if width <= 4096 else 8 if width <= 16384 else 16 if width <= 65536 else 32
    return _row_launch(width, warps, 4)


def _row_launch(width: int, warps: int, repeats: int) -> Launch:
    lanes = min(next_power_of_2(width), 256 * warps)
    repeats = max(min(next_power_of_2(width) // lanes, repeats), 1)
    return Launch({"REPEATS": repeats, "LANES": lanes}, num_warps=warps)


def _row_others(width: int) -> list[Launch]:
    return [_row_launch(width, warps, repeats) for warps in (4, 8, 16, 32) for repeats in (1, 2, 4)]


def _count_rule(tokens: int) -> Launch:
    return Launch({"BLOCK": min(next_power_of_2(tokens), 4096)}, num_warps=8)


def _scale_rule(width: int) -> Launch:
    """Enough programs for every processor, few enough that they end at once if there is no work."""
    return Launch({"BLOCK": min(next_power_of_2(width), 4096), "PROGRAMS": 1056}, num_warps=8)


_SIZES = (4096, 32000, 131072)
_WANTED = ({"WANTS_GRADIENT": True}, {"WANTS_GRADIENT": False})
COUNT = Kernel(
    "loss.count", _count,
    "targets: *i64; inverse: *fp32; tokens: i32",
    _count_rule, (8192,),
)  # fmt: skip
WHOLE_ROW = Kernel(
    "loss.whole_row", _whole_row,
    "logits gradient: *T; targets: *i64; losses inverse: *fp32; stride gradient_stride width: i32",
    _row_rule, _SIZES, _WANTED, _row_others,
)  # fmt: skip
OWN_COLUMNS = Kernel(
    "loss.own_columns", _own_columns,
    "logits: *T; targets: *i64; found: *fp32; rows stride width first_row: i32",
    _row_rule, _SIZES, others=_row_others,
)  # fmt: skip
ALL_COLUMNS = Kernel(
    "loss.all_columns", _all_columns,
    "logits gradient: *T; targets: *i64; found losses inverse: *fp32; "
    "ranks rows stride gradient_stride width first_row: i32",
    _row_rule, _SIZES, _WANTED, _row_others,
)  # fmt: skip
SCALE = Kernel(
    "loss.scale", _scale,
    "x: *T; factor: *fp32; rows width stride: i32",
    _scale_rule, (4096, 131072), dtypes=("bf16", "fp32"),
)  # fmt: skip
KERNELS = (COUNT, WHOLE_ROW, OWN_COLUMNS, ALL_COLUMNS, SCALE)


def inverse_count(targets: Tensor) -> Tensor:
    """1 / the number of targets (tokens,) that count: () fp32, known to the device alone."""
    inverse = targets.new_empty((), dtype=torch.float32)
    tokens = targets.numel()
    COUNT((1,), tokens, inverse, targets, inverse, tokens)
    return inverse


def run_rows(
    logits: Tensor, targets: Tensor, gradient: Tensor | None, losses: Tensor, inverse: Tensor
) -> None:
    """Write each row's share of the mean loss, and its gradient.

    Args:
        logits: (rows, vocab), neighbours in a row side by side.
        targets: (rows,).
        gradient: (rows, vocab), may be the logits themselves; None: not wanted.
        losses: (rows,) fp32.
        inverse: () fp32, 1 / the number of targets that count.
    """
    to = logits if gradient is None else gradient
    count, width = logits.shape
    arguments = logits, targets, to, losses, inverse, logits.stride(0), to.stride(0), width
    WHOLE_ROW((count,), width, logits, *arguments, WANTS_GRADIENT=gradient is not None)


def _scale_in_place(x: Tensor, factor: Tensor) -> None:
    if x.numel():
        rows = as_rows(x)
        count, width = rows.shape
        blocks = SCALE.at(width, x).blocks
        programs = min(count * triton.cdiv(width, blocks["BLOCK"]), blocks["PROGRAMS"])
        SCALE((programs,), width, rows, rows, factor, count, width, rows.stride(0))


def _run(logits: Tensor, targets: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient, which is empty where it isn't wanted."""
    loss, gradient = _fake(logits, targets, wants_gradient)
    if not targets.numel():
        return loss.fill_(math.nan), gradient
    to = as_rows(gradient) if wants_gradient else None
    return _loss(as_rows(logits), targets, to), gradient


def _fake(logits: Tensor, targets: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(logits, memory_format=torch.contiguous_format)
    gradient = like if wants_gradient else logits.new_empty(0)
    return logits.new_empty((), dtype=torch.float32), gradient


def _loss(rows: Tensor, targets: Tensor, gradient: Tensor | None) -> Tensor:
    targets = targets.reshape(-1).contiguous()
    losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    run_rows(rows, targets, gradient, losses, inverse_count(targets))
    return losses.sum()


def _run_found(logits: Tensor, targets: Tensor, first_row: int) -> Tensor:
    """What all ranks have to know of this one's columns: (3, rows) fp32."""
    rows, targets = as_rows(logits), targets.reshape(-1).contiguous()
    count, width = rows.shape
    found = torch.empty((3, count), dtype=torch.float32, device=rows.device)
    arguments = rows, targets, found, count, rows.stride(0), width, first_row
    OWN_COLUMNS((count,), width, rows, *arguments)
    return found


def _run_parallel(
    logits: Tensor, targets: Tensor, found: Tensor, first_row: int, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """As `_run`, of some columns.

    Args:
        logits: (..., own_vocab).
        targets: (...).
        found: (ranks, 3, rows) fp32, see `_run_found`.
        first_row: the target that these columns begin with.
        wants_gradient: as above.
    """
    _, gradient = _fake(logits, targets, wants_gradient)
    to = as_rows(gradient) if wants_gradient else None
    return _loss_parallel(as_rows(logits), targets, found, to, first_row), gradient


def _loss_parallel(
    rows: Tensor, targets: Tensor, found: Tensor, gradient: Tensor | None, first_row: int
) -> Tensor:
    targets, (count, width) = targets.reshape(-1).contiguous(), rows.shape
    losses = torch.empty(count, dtype=torch.float32, device=rows.device)
    to = rows if gradient is None else gradient
    tensors = rows, targets, found, to, losses, inverse_count(targets)
    sizes = len(found), count, rows.stride(0), to.stride(0), width, first_row
    wants = {"WANTS_GRADIENT": gradient is not None}
    ALL_COLUMNS((count,), width, rows, *tensors, *sizes, **wants)
    return losses.sum()


_loss_operator = Operator("cross_entropy", _run, _fake)
_found_operator = Operator(
    "cross_entropy_found",
    _run_found,
    lambda logits, targets, first_row: torch.empty(
        (3, targets.numel()), dtype=torch.float32, device=logits.device
    ),
)
_parallel_operator = Operator(
    "cross_entropy_parallel",
    _run_parallel,
    lambda logits, targets, found, first_row, *rest: _fake(logits, targets, *rest),
)


def scaled(ctx: Any, gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Multiply the gradients that forward has made: in place, which can be done only once."""
    if not _is_memory(factor):
        return [(each.float() * factor).to(each.dtype) for each in gradients]
    if getattr(ctx, "is_spent", False):
        raise RuntimeError(
            "The gradient of this loss was asked for twice, but it is made in forward and scaled "
            "in place; compute the loss again, or do without retain_graph."
        )
    ctx.is_spent = True
    for each in gradients:
        _scale_in_place(each, factor)
    # Other tensors of the same memory: so they belong to nobody else, and a parameter's gradient
    # is taken as it is, not copied.
    return [each.detach() for each in gradients]


def _is_memory(x: Tensor) -> bool:
    """Whether this is a tensor that can be written to: a compiler decides on memory itself."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *scaled(ctx, ctx.saved_tensors, grad), *[None] * (len(ctx.needs_input_grad) - 1)


_to_new_memory = Differentiable(_loss_operator, _save, _gradient)
_parallel_to_new_memory = Differentiable(_parallel_operator, _save, _gradient)


class _InPlace(torch.autograd.Function):
    """A loss whose gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
        """Call `write` with the rows: it writes over them and returns the loss."""
        loss = write(rows)
        # Whoever keeps the logits for a gradient of its own is told by torch that they are gone.
        torch.autograd.graph.increment_version(rows)
        ctx.save_for_backward(rows)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = scaled(ctx, ctx.saved_tensors, grad)
        return gradient, None


def cross_entropy(logits: Tensor, targets: Tensor, inplace: bool) -> Tensor:
    """See the package."""
    wants = torch.is_grad_enabled() and logits.requires_grad
    if wants and inplace and _is_memory(logits) and targets.numel():
        rows = as_rows(logits)
        return _InPlace.apply(rows, lambda rows: _loss(rows, targets, rows))
    loss, _ = _to_new_memory(logits, targets, wants)
    return loss


def cross_entropy_parallel(
    logits: Tensor, targets: Tensor, first_row: int, group: dist.ProcessGroup, inplace: bool
) -> Tensor:
    """See the package. One collective: what each rank found is gathered, not reduced twice."""
    wants = torch.is_grad_enabled() and logits.requires_grad
    own = _found_operator(logits.detach(), targets, first_row)
    found = own.new_empty((dist.get_world_size(group) * 3, own.shape[1]))
    dist.all_gather_into_tensor(found, own, group=group)
    found = found.view(-1, *own.shape)  # (ranks, 3, rows)
    if wants and inplace and _is_memory(logits):

        def write(rows: Tensor) -> Tensor:
            return _loss_parallel(rows, targets, found, rows, first_row)

        return _InPlace.apply(as_rows(logits), write)
    loss, _ = _parallel_to_new_memory(logits, targets, found, first_row, wants)
    return loss
