"""Keys and values in 8 bits: each head's row of a token is whole numbers times a scale of its own.

A kept row has its numbers, zeros up to a multiple of 4, and in its last 4 bytes the scale. So
blocks are copied, shared and moved as bytes like any others. A row is within half a scale of what
was computed, and a scale is a 127th of the row's largest number.

What a text gets must not depend on how its prompt was cut, so tokens attend to rounded rows also in
the pass that computes them. Scales are multiplied with scores and with the weights of values: whole
numbers are exact in bf16, and one factor a row is less work than one a number.
"""

import torch
from torch import Tensor

from paceline.config.serving import KeyForm

_SCALE_BYTES = 4
_LARGEST = 127
_LEAST = torch.finfo(torch.float32).tiny


def kept_type(form: KeyForm, dtype: torch.dtype) -> torch.dtype:
    """What memory for keys and values consists of, where they are computed in `dtype`."""
    return torch.int8 if form == "int8" else dtype


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether memory of this type holds narrow rows."""
    return dtype == torch.int8


def kept_width(width: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a row of `width` takes in memory."""
    return -(-width // 4) * 4 + _SCALE_BYTES if is_narrow(dtype) else width


def narrowed(rows: Tensor) -> Tensor:
    """Round rows (..., width) to kept ones: (..., kept_width) int8."""
    width = rows.shape[-1]
    # bf16 has fewer digits than whole numbers up to 127 need.
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scales = wide.abs().amax(-1, keepdim=True).float().div_(_LARGEST).clamp_min_(_LEAST)
    kept = rows.new_zeros(*rows.shape[:-1], kept_width(width, torch.int8), dtype=torch.int8)
    kept[..., :width] = (wide / scales).round_()
    scales_of(kept).copy_(scales)
    return kept


def scales_of(kept: Tensor) -> Tensor:
    """Those of kept rows: (..., 1) fp32, a view."""
    return kept[..., -_SCALE_BYTES:].view(torch.float32)


def widened(kept: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Kept rows as numbers: (..., width)."""
    return (kept[..., :width] * scales_of(kept)).to(dtype)
