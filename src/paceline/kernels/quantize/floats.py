"""Quantize to shorter floats, fp16 and bf16, which need no scale.

Rounding is torch's, to nearest, or stochastic (https://arxiv.org/abs/2010.06192): the bits that are
cut off decide how often the last one kept goes up. What fp16 can't hold is infinite, as in torch.
"""

import math
from typing import Final

import torch
from torch import Tensor

from paceline.kernels.quantize.schemes import cut_mantissa

# What makes exponent field and subnormals those of fp32, and the bits of mantissa to cut.
_CUTS: Final = {torch.float16: (2.0**-112, 13), torch.bfloat16: (1.0, 16)}


def write_rounded(x: Tensor, shorter: Tensor, noise: Tensor | None) -> None:
    """Round x into `shorter`, fp16 or bf16, of its shape.

    Args:
        noise: int16 of that shape, random bits; None rounds to nearest.
    """
    shorter.copy_(x)
    if noise is None:
        return
    factor, shift = _CUTS[shorter.dtype]
    drawn = cut_mantissa(x.float() * factor, shift, noise).view(shorter.dtype)
    if x.device.type == "cpu" and math.isfinite(shorter.sum(dtype=torch.float32)):
        shorter.copy_(drawn)
    else:
        torch.where(shorter.isfinite(), drawn, shorter, out=shorter)
