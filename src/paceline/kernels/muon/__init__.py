"""Muon: steps whose singular values are all about one, for the matrices of hidden layers.

How it works: see `reference`. Two of the three products of an iteration are symmetric, so their
kernel computes the tiles on and above the diagonal and writes each twice: half the arithmetic. The
third is torch's. Matrices of one shape are stacked and worked on together, for a single one doesn't
fill a device.

Not here: embeddings, heads and vectors, which AdamW steps; matrices cut over ranks, which have to
be brought together first.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels import switch
from paceline.kernels.cost import Cost
from paceline.kernels.muon import reference
from paceline.kernels.muon.reference import FAST, Coefficients

__all__ = ["FAST", "SHAPES", "muon_", "orthogonalize", "orthogonalize_cost", "step_scale"]

SHAPES = ((16, 2048, 2048), (8, 4096, 4096), (4, 4096, 14336))
"""Matrices, rows and columns of stacks that people train."""
_STACK_VALUES = 2**28
"""Values in a stack at most: 512 MiB in bf16, and as much for each of three products."""


def orthogonalize(
    matrices: Tensor, coefficients: Coefficients = FAST, dtype: torch.dtype | None = None
) -> Tensor:
    """Make singular values about one and leave the singular vectors.

    Args:
        matrices: (..., rows, columns), floating point.
        coefficients: of each application of the polynomial.
        dtype: in which products are computed; None: the matrices' own. bf16 is usual, for what it
            rounds off is less than what the polynomial leaves.

    Returns:
        of the matrices' shape and of dtype. Of zeros zeros; of what isn't finite NaN.
    """
    if matrices.ndim < 2:
        raise InputError(
            f"orthogonalize was given a tensor of shape {tuple(matrices.shape)}: "
            f"it takes matrices; step vectors with adamw_."
        )
    dtype = matrices.dtype if dtype is None else dtype
    if not matrices.numel():
        return matrices.to(dtype, copy=True)
    if not _has_tensor_cores(matrices, dtype):
        return reference.orthogonalize(matrices.to(dtype), coefficients)
    from paceline.kernels.muon import kernel

    rows, columns = matrices.shape[-2:]
    wide = matrices.mT if rows > columns else matrices
    stack = wide.reshape(-1, *wide.shape[-2:])
    # The norm of 16 bits' values, but not in 16 bits.
    x = reference.normalized(stack.float()).to(dtype).contiguous()
    for a, b, c in coefficients:
        gram = kernel.symmetric_product(x, None, 1.0, 0.0)
        x = torch.baddbmm(x, kernel.symmetric_product(gram, gram, c, b), x, beta=a)
    x = x.view(wide.shape)
    return x.mT if rows > columns else x


def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    rms: float | None = 0.2,
    coefficients: Coefficients = FAST,
    dtype: torch.dtype | None = None,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step of Muon with each parameter, in place.

    Args:
        params: (..., rows, columns) each: matrices or stacks of them (experts).
        grads: one per parameter, of its shape.
        momenta: likewise, of the parameter's type.
        lr: learning rate; or () on the parameters' device.
        momentum: how much of the momentum stays.
        weight_decay: decoupled, in units of the learning rate.
        nesterov: whether the gradient counts once more.
        rms: root mean square of a step of rate one; AdamW's is about 0.2, so that both can share a
            rate. None: the scale of the method's author, sqrt(max(1, rows / columns)).
        coefficients: see `orthogonalize`.
        dtype: likewise; None: bf16 on a CUDA device, else the parameters' own.
        factor: () fp32, what gradients are multiplied with first; they aren't changed.
        found_inf: () fp32; the step changes nothing where it isn't 0.

    Raises:
        InputError: lists or tensors that don't belong together.
    """
    _check(params, grads, momenta)
    rate: float | Tensor = lr
    gradients = list(grads)
    if factor is not None:
        gradients = list(torch._foreach_mul(gradients, factor))
    if found_inf is not None:
        # Where nothing is to change: the momentum moves towards itself, at a rate of nothing.
        pairs = zip(gradients, momenta, strict=True)
        gradients = [torch.where(found_inf == 0, grad, m.to(grad.dtype)) for grad, m in pairs]
        rate = lr * (found_inf == 0)
    for indices in _stacks(params):
        own = [params[index] for index in indices]
        kept = [momenta[index] for index in indices]
        given = [gradients[index].to(kept[0].dtype) for index in indices]
        torch._foreach_lerp_(kept, given, 1 - momentum)
        directions = torch._foreach_lerp(given, kept, momentum) if nesterov else kept
        stack = torch.stack(list(directions))
        steps = orthogonalize(stack, coefficients, dtype or _usual_type(stack)).to(own[0].dtype)
        scale = step_scale(own[0].shape, rms)
        torch._foreach_mul_(own, 1 - rate * weight_decay)
        torch._foreach_sub_(own, list((steps * (rate * scale)).unbind()))


def step_scale(shape: torch.Size, rms: float | None) -> float:
    """What an orthogonal step of (..., rows, columns) is multiplied with, see `muon_`."""
    rows, columns = shape[-2:]
    if rms is None:
        return math.sqrt(max(1, rows / columns))
    return rms * math.sqrt(max(rows, columns))


def orthogonalize_cost(
    matrices: int, rows: int, columns: int, item_size: int, iterations: int = len(FAST)
) -> Cost:
    """Of three products an iteration, two of them symmetric and thus halves."""
    short, long = min(rows, columns), max(rows, columns)
    flops = short * short * long + short**3 + 2 * short * short * long
    return Cost(2 * matrices * rows * columns * item_size, matrices * iterations * flops)


def _has_tensor_cores(matrices: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel is worth it: of fp32 torch's products are faster."""
    if not switch.takes("muon", matrices.detach()) or dtype == torch.float64:
        return False
    return switch.is_interpreted() or dtype.itemsize == 2


def _usual_type(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda and x.dtype != torch.float64 else x.dtype


def _stacks(params: Sequence[Tensor]) -> Iterator[list[int]]:
    """Which parameters are of one shape and type, no more of them than a stack may have."""
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, param in enumerate(params):
        if param.numel():
            alike.setdefault((param.shape, param.dtype), []).append(index)
    for (shape, _), indices in alike.items():
        most = max(1, _STACK_VALUES // shape.numel())
        for first in range(0, len(indices), most):
            yield indices[first : first + most]


def _check(params: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
    """Refuse what doesn't belong together."""
    for name, each in (("grads", grads), ("momenta", momenta)):
        if len(each) != len(params):
            raise InputError(
                f"muon_ was given {len(params)} params and {len(each)} {name}: "
                f"give one for each parameter."
            )
        for index, (param, other) in enumerate(zip(params, each, strict=True)):
            if param.shape != other.shape:
                raise InputError(
                    f"{name}[{index}] has the shape {tuple(other.shape)} and its parameter "
                    f"{tuple(param.shape)}: they must be equal."
                )
    for index, param in enumerate(params):
        if param.ndim < 2:
            raise InputError(
                f"params[{index}] has the shape {tuple(param.shape)}: Muon steps matrices; "
                f"step vectors with adamw_."
            )
