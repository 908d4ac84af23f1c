"""AdamW's step, the specification: plain torch, tensor by tensor, in any floating type.

Paper: https://arxiv.org/abs/1711.05101 (decoupled weight decay); the arithmetic is that of
torch.optim.AdamW. Stochastic rounding of weights: https://arxiv.org/abs/2010.06192.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.adamw.eight_bit import Coded, decode, encode

Moment = Tensor | Coded
"""As numbers, or as 8-bit codes of them (of the second moment's root)."""

GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: its multiples are spread over all 32-bit words."""
_WORD = 0xFFFFFFFF
_QUIET_NAN = 0x7FC0


class Settings(NamedTuple):
    """Of a step, the same for all tensors."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factor: Tensor | None
    """() fp32: what gradients are multiplied with."""
    found_inf: Tensor | None
    """() fp32: the step does nothing where it isn't 0."""
    seed: int | None
    """Of the stochastic rounding of parameters of 16 bits without a master."""


def step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Moment],
    seconds: Sequence[Moment],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    settings: Settings,
) -> None:
    """Step each parameter in place, see `adamw_`."""
    for index, (param, grad, first, second, step) in enumerate(
        zip(params, grads, firsts, seconds, steps, strict=True)
    ):
        stepped = param if masters is None else masters[index]
        m, v = _numbers(first, stepped, signed=True), _numbers(second, stepped, signed=False)
        count = step + 1
        x, m, v = _stepped(stepped.to(m.dtype), grad.to(m.dtype), m, v, count.double(), settings)
        if masters is not None:
            _put(stepped, x, settings)
        if settings.seed is not None and param.dtype == torch.bfloat16 and masters is None:
            x = stochastically_rounded(x, noise(settings.seed, int(count), index, x))
        _put(param, x.to(param.dtype), settings)
        _put_moment(first, m, settings, signed=True)
        _put_moment(second, v, settings, signed=False)
        _put(step, count, settings)


def _stepped(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, count: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after a step; count is its number, from 1."""
    beta1, beta2 = settings.betas
    if settings.factor is not None:
        g = g * settings.factor.to(g.dtype)
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


def _put_moment(moment: Moment, numbers: Tensor, settings: Settings, *, signed: bool) -> None:
    if isinstance(moment, Tensor):
        _put(moment, numbers.to(moment.dtype), settings)
        return
    numbers = numbers if signed else numbers.sqrt()
    coded = encode(numbers, moment.scales.ndim - 1, signed=signed)
    _put(moment.codes, coded.codes, settings)
    _put(moment.scales, coded.scales, settings)


def _put(old: Tensor, new: Tensor, settings: Settings) -> None:
    """Write new values, unless the step is skipped."""
    if settings.found_inf is not None:
        new = torch.where(settings.found_inf == 0, new, old)
    old.copy_(new)


def stochastically_rounded(x: Tensor, drawn: Tensor) -> Tensor:
    """fp32 rounded to bf16, up as often as what is cut off asks for.

    Args:
        x: of any shape, fp32.
        drawn: of that shape, int64, uniform in [0, 2^16).
    """
    bits = x.view(torch.int32).long() & _WORD
    rounded = torch.where(x.isnan(), _QUIET_NAN, (bits + drawn) >> 16 & 0xFFFF)
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def noise(seed: int, count: int, index: int, like: Tensor) -> Tensor:
    """16 random bits for each value, a function of these numbers and of where the value stands.

    Args:
        seed: of the run.
        count: the number of the step.
        index: which tensor of the list.
        like: gives shape and device; values are numbered as if it were contiguous.
    """
    key = _mixed(torch.tensor((seed + count * GOLDEN) & _WORD))
    key = _mixed((key + index * GOLDEN) & _WORD).to(like.device)
    where = torch.arange(like.numel(), device=like.device).view(like.shape)
    return _mixed((where & _WORD) ^ key) >> 16


def _mixed(x: Tensor) -> Tensor:
    """Another word for each 32-bit word, with no pattern left of it.

    The multipliers are those of the hash with the least bias that a search found,
    https://nullprogram.com/blog/2018/07/31/ (public domain).
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
