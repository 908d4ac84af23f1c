"""Matrices in 4 bits (NF4), as QLoRA keeps the weights that are not trained.

How it works: 64 neighbouring weights of a row are a block. The largest magnitude of a block is its
scale, and each weight becomes the nearest of 16 levels times that scale; the levels are denser
around zero, as weights are. A matrix is one tensor of bytes, a row of it for each output: so shards
and tensor parallel cut it as they cut any matrix, and its parts say all that they need.

    nf4          for each block 32 bytes of codes, the first weight's in the high half, and 4 of the
                 scale, fp32: 4.5 bits a weight
    nf4_double   for each block 32 bytes of codes and 1 of the scale, then for the row: mean of the
                 scales, place of the row's first block among the 256 that share an outer scale, and
                 the outer scales that it needs, 4 bytes each: 4.1 to 4.2 bits a weight

Weights are those of bitsandbytes 0.50, bit for bit, but the order of the bytes is not. Of quantised
scales one in a thousand is another: on a CPU bitsandbytes takes a neighbour of the nearest level.

Paper: https://arxiv.org/abs/2305.14314 (NF4: appendix E; double quantisation: section 3).
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.finetune import BLOCK, GROUP, narrow_bytes, num_outer

_CODE_BYTES = BLOCK // 2
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TINY = 1e-38


def packed(weight: Tensor, *, double: bool) -> Tensor:
    """A matrix (out_features, in_features) as bytes, (out_features, narrow_bytes) uint8."""
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    shares = (blocks * (1 / scales.clamp(min=_TINY)).unsqueeze(-1)).clamp_(-1, 1)
    codes = _nearest(shares, _levels(weight.device)).unflatten(-1, (_CODE_BYTES, 2))
    pairs = codes[..., 0] << 4 | codes[..., 1]
    if not double:
        return torch.cat((pairs, scales.unsqueeze(-1).view(torch.uint8)), -1).flatten(1)
    mean = scales.mean()
    flat = F.pad((scales - mean).flatten(), (0, -scales.numel() % GROUP)).view(-1, GROUP)
    outer = flat.abs().amax(-1)
    shares = (flat * (1 / outer.clamp(min=_TINY)).unsqueeze(-1)).clamp_(-1, 1)
    of_scales = _nearest(shares, _scale_levels(weight.device)).flatten()[: scales.numel()]
    inner = torch.cat((pairs, of_scales.view(scales.shape).unsqueeze(-1)), -1).flatten(1)
    rows, per_row = scales.shape
    first = torch.arange(rows, device=weight.device, dtype=torch.int32) * per_row
    needed = first.unsqueeze(1) // GROUP + torch.arange(num_outer(per_row), device=weight.device)
    ends = (
        mean.expand(rows, 1).contiguous().view(torch.uint8),
        (first % GROUP).unsqueeze(1).view(torch.uint8),
        outer[needed.clamp(max=len(outer) - 1)].view(torch.uint8),
    )
    return torch.cat((inner, *ends), 1)


def unpacked(matrix: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weights that bytes stand for.

    Args:
        matrix: (out_features, narrow_bytes) uint8, or some of its rows; of `nf4` also some of each
            row's blocks.
        in_features: of these.
        dtype: of the result, which is computed in fp32.

    Returns:
        (out_features, in_features).
    """
    num = in_features // BLOCK
    double = matrix.shape[1] != narrow_bytes(in_features, double=False)
    width = num * (_CODE_BYTES + (1 if double else 4))
    blocks = matrix[:, :width].unflatten(1, (num, -1))
    if double:
        ends = matrix[:, width:].clone(memory_format=torch.contiguous_format)
        place = ends[:, 4:8].clone(memory_format=torch.contiguous_format).view(torch.int32)
        numbers = ends.view(torch.float32)
        group = (place + torch.arange(num, device=matrix.device)) // GROUP
        group = group.clamp_(0, numbers.shape[1] - 3)  # the bytes of a file may say anything
        inner = _scale_levels(matrix.device)[blocks[..., _CODE_BYTES].int()]
        scales = inner * numbers[:, 2:].gather(1, group) + numbers[:, :1]
    else:
        scales = blocks[..., _CODE_BYTES:].contiguous().view(torch.float32).squeeze(-1)
    # A byte is two weights: one look-up for both.
    weights = F.embedding(blocks[..., :_CODE_BYTES].int(), _pairs(matrix.device))
    return weights.flatten(2).mul_(scales.unsqueeze(-1)).flatten(1).to(dtype)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Map (..., in) to (..., out), in the type of `x`, or of autocast.

    No weights are kept for the backward pass, which makes them from the bytes again.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    result: Tensor = _Product.apply(x.to(dtype), matrix)
    return result


class _Product(torch.autograd.Function):
    """The gradient is that of the input: the matrix is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        ctx.in_features = x.shape[-1]
        return F.linear(x, unpacked(matrix, x.shape[-1], x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (matrix,) = gradients, ctx.saved_tensors
        return gradient @ unpacked(matrix, ctx.in_features, gradient.dtype), None


def _nearest(shares: Tensor, levels: Tensor) -> Tensor:
    """The numbers of the levels that are nearest, uint8."""
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)


@lru_cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(_LEVELS, device=device)


@lru_cache
def _pairs(device: torch.device) -> Tensor:
    """The two weights of each byte: (256, 2)."""
    return torch.cartesian_prod(_levels(device), _levels(device))


@lru_cache
def _scale_levels(device: torch.device) -> Tensor:
    """Levels of scales, "dynamic" ones (https://arxiv.org/abs/2110.02861): (256,) fp32.

    In each decade down from 1 half as many as in the one before, in the middle of equal parts.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10.0 ** (decade - 6) * ((bounds[1:] + bounds[:-1]) / 2)).tolist()
        found += [*middles, *(-each for each in middles)]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)
