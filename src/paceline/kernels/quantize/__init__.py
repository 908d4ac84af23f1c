"""Quantize: values as small numbers times one scale per block.

In plain torch (`schemes`, `words`, `floats`: the operators that coding is made of, for chunks that
fit a cache), and for whole payloads in one pass on a GPU (`kernel`).
"""

import torch
from torch import Tensor

from paceline.config.comm import BLOCK
from paceline.kernels import switch
from paceline.kernels.cost import KernelCost

SHAPES = (2**20, 2**24, 2**28)
"""Values in buckets of gradients."""
_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "onebit": 0.125}
"""Of a code, for the codecs that the kernels know."""


def takes(codec: str, values: Tensor, error: Tensor | None = None) -> bool:
    """Whether `encode` and `decode` work on such tensors, as things are chosen.

    Args:
        codec: its name in a Job.
        values: (n,).
        error: (n,), or none.
    """
    if codec not in _BYTES or not switch.takes("quantize", values) or not values.is_contiguous():
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


def encode_cost(codec: str, num_values: int, item_size: int, *, has_error: bool) -> KernelCost:
    """Values and errors are read, codes, scales and errors written."""
    coded = _BYTES[codec] + torch.float32.itemsize / BLOCK
    return KernelCost(round(num_values * (item_size + coded + 8 * has_error)))


def decode_cost(
    codec: str, num_values: int, item_size: int, *, num_ranks: int, add: bool
) -> KernelCost:
    """Codes and scales of all ranks are read, values written, and read where they are added to."""
    coded = _BYTES[codec] + torch.float32.itemsize / BLOCK
    return KernelCost(round(num_values * (item_size * (2 if add else 1) + coded * num_ranks)))
