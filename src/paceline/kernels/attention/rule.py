"""Which of torch's implementations of causal attention is fast, where nobody has measured it.

A pure function of what is known of the device and the problem; `can` is asked of torch.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

Backend = Literal["default", "cudnn", "flash", "efficient", "flex", "math"]
"""Torch's: "default" is its own choice at each call, "flex" its compiled FlexAttention."""

_HOPPER = (9, 0)
_WIDEST_CUDNN_HEAD = 128
_16_BITS = (torch.bfloat16, torch.float16)


class AttentionShape(NamedTuple):
    """Of one call."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    value_dim: int


class BackendChoice(NamedTuple):
    """What to run, and why."""

    backend: Backend
    why: str


def rule(
    shape: AttentionShape,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    can: Callable[[Backend], bool],
) -> BackendChoice:
    """Choose without measuring.

    Args:
        shape: of the call.
        dtype: of queries, keys and values.
        capability: of the CUDA device; None for any other.
        can: whether torch says that a backend takes the call; asked for few of them.
    """
    if capability is None:
        return BackendChoice("default", "torch's own choice, for this is no CUDA device")
    if dtype not in _16_BITS:
        return BackendChoice("default", f"torch's own choice, for {dtype} is not of 16 bits")
    if capability == _HOPPER and shape.head_dim <= _WIDEST_CUDNN_HEAD and can("cudnn"):
        # Published for an H100 at 4608 tokens: 631 against 329 TFLOP/s (pytorch#142132); less than
        # flash on an A100 and on consumer cards (transformers#48163).
        why = "published as nearly twice flash on Hopper; not measured here"
        return BackendChoice("cudnn", why)
    if can("flash"):
        why = "fused, and torch takes this call; cuDNN is for heads to 128 on Hopper"
        return BackendChoice("flash", why)
    if can("efficient"):
        return BackendChoice("efficient", "fused, and takes this call where flash doesn't")
    return BackendChoice(
        "default", "torch's own choice, for no fused implementation takes this call"
    )
