"""AdamW's step, the specification: plain torch, tensor by tensor, in any floating type.

Paper: https://arxiv.org/abs/1711.05101 (decoupled weight decay); the arithmetic is that of
torch.optim.AdamW.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.adamw.eight_bit import Coded, decode, encode

Moment = Tensor | Coded
"""As numbers, or as 8-bit codes of them (of the second moment's root)."""


class AdamWTensors(NamedTuple):
    """What a step reads and writes, by parameter; see `adamw_`."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    firsts: Sequence[Moment]
    seconds: Sequence[Moment]
    steps: Sequence[Tensor]
    masters: Sequence[Tensor] | None


class AdamWSettings(NamedTuple):
    """Of a step, the same for all tensors."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    found_inf: Tensor | None
    """() fp32: the step does nothing where it isn't 0."""


def step_(tensors: AdamWTensors, settings: AdamWSettings) -> None:
    """Step each parameter in place, see `adamw_`."""
    *lists, masters = tensors
    for index, (param, grad, first, second, step) in enumerate(zip(*lists, strict=True)):
        stepped = param if masters is None else masters[index]
        m, v = _numbers(first, stepped, signed=True), _numbers(second, stepped, signed=False)
        count = step + 1
        x, m, v = _stepped(stepped.to(m.dtype), grad.to(m.dtype), m, v, count.double(), settings)
        if masters is not None:
            _put(stepped, x, settings)
        _put(param, x.to(param.dtype), settings)
        _put_moment(first, m, settings, signed=True)
        _put_moment(second, v, settings, signed=False)
        _put(step, count, settings)


def _stepped(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, count: Tensor, settings: AdamWSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after a step; count is its number, from 1."""
    beta1, beta2 = settings.betas
    m = m.lerp(g, 1 - beta1)
    v = v * beta2 + (1 - beta2) * g * g
    correction, root = 1 - beta1**count, (1 - beta2**count).sqrt()
    denominator = v.sqrt() / root + settings.eps
    x = x * (1 - settings.lr * settings.weight_decay)
    return x - (settings.lr / correction) * (m / denominator), m, v


def _numbers(moment: Moment, stepped: Tensor, *, signed: bool) -> Tensor:
    """In fp32, or fp64 for fp64 parameters."""
    dtype = torch.promote_types(stepped.dtype, torch.float32)
    if isinstance(moment, Tensor):
        return moment.to(dtype)
    numbers = decode(moment, dtype, signed=signed)
    return numbers if signed else numbers.square()


def _put_moment(moment: Moment, numbers: Tensor, settings: AdamWSettings, *, signed: bool) -> None:
    if isinstance(moment, Tensor):
        _put(moment, numbers.to(moment.dtype), settings)
        return
    numbers = numbers if signed else numbers.sqrt()
    coded = encode(numbers, moment.scales.ndim - 1, signed=signed)
    _put(moment.codes, coded.codes, settings)
    _put(moment.scales, coded.scales, settings)


def _put(old: Tensor, new: Tensor, settings: AdamWSettings) -> None:
    """Write new values, unless the step is skipped."""
    if settings.found_inf is not None:
        new = torch.where(settings.found_inf == 0, new, old)
    old.copy_(new)
