"""Quantize: values as small numbers times one scale per block.

In plain torch (`schemes`, `words`, `floats`: the operators that coding is made of, for chunks that
fit a cache), and for whole payloads in one pass on a GPU (`kernel`).
"""

import torch
from torch import Tensor

from paceline.kernels import switch

_CODECS = ("int8", "fp8", "int4", "onebit")
"""Those that the kernels know."""


def takes(codec: str, values: Tensor, error: Tensor | None = None) -> bool:
    """Whether `encode` and `decode` work on such tensors, as things are chosen.

    Args:
        codec: its name in a Job.
        values: (n,).
        error: (n,), or none.
    """
    if codec not in _CODECS or not switch.takes("quantize", values) or not values.is_contiguous():
        return False
    return error is None or (error.dtype == torch.float32 and error.is_contiguous())


def encode(codec: str, values: Tensor, payload: Tensor, error: Tensor | None = None) -> None:
    """Write the payload of values + error, rounded to nearest, and leave what it lacks in error.

    Args:
        codec: "int8", "fp8", "int4" or "onebit".
        values: (n,) fp32, bf16 or fp16.
        payload: uint8, as long as the codec says (`comm/compress/blockwise`): fp32 scales of the
            blocks, then their codes; at a multiple of 4 bytes.
        error: (n,) fp32, in place.
    """
    from paceline.kernels.quantize import kernel

    kernel.encode(codec, values, payload, error)


def decode(codec: str, payloads: Tensor, values: Tensor, *, add: bool = False) -> None:
    """Write the sum of payloads into values, or add it to them, in the payloads' order, in fp32.

    Args:
        codec: see `encode`.
        payloads: (ranks, bytes) uint8.
        values: (n,) fp32, bf16 or fp16, in place.
        add: whether what values were counts too.
    """
    from paceline.kernels.quantize import kernel

    kernel.decode(codec, payloads, values, add)
