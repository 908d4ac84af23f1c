"""Runs attention by one of torch's implementations, and says which can."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from paceline.kernels.attention.reference import visible_pairs
from paceline.kernels.attention.rule import AttentionShape, Backend, Mask

_OF_TORCH = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_FLEX_MASKS = ("causal", "none", "window", "documents")
_NARROWEST_FLEX_HEAD = 16
_LONGEST_ASKED = 1024
_LONGEST_WRITTEN_OUT = 4096


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | BlockMask | None,
    backend: Backend,
    is_causal: bool = True,
) -> Tensor:
    """Attend.

    Args:
        q: (batch, heads, seq, head_dim).
        k: (batch, kv_heads, seq, head_dim).
        v: (batch, kv_heads, seq, value_dim).
        mask: bool that broadcasts to (batch, heads, seq, seq), for "flex" what `block_mask` made;
            None where is_causal says all.
        backend: which implementation.
        is_causal: without a mask, whether a query sees only itself and those before.

    Returns:
        (batch, heads, seq, value_dim)

    Raises:
        RuntimeError: of torch, where the backend doesn't take such a call.
    """
    grouped = q.shape[1] != k.shape[1]
    if backend == "flex":
        if mask is None and is_causal:
            mask = _causal_blocks(q.shape[2], q.device)
        return _compiled_flex(q.device.type)(q, k, v, block_mask=mask, enable_gqa=grouped)
    if grouped and (backend == "efficient" or mask is not None):
        # The kernels that take a mask on CUDA know no groups.
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        grouped = False
    assert not isinstance(mask, BlockMask)
    given: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal and mask is None}
    if backend == "default":
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **given)
    with sdpa_kernel(_OF_TORCH[backend]):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **given)


def block_mask(
    seq_len: int,
    window: int | None,
    documents: Tensor | None,
    device: torch.device,
    is_causal: bool = True,
) -> BlockMask:
    """Who sees whom, for FlexAttention; see `reference.visible_pairs`."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key if is_causal else query >= 0
        if window is not None:
            visible = visible & (query - key < window)
        if documents is not None:
            visible = visible & (documents[batch, query] == documents[batch, key])
        return visible

    batch = None if documents is None else len(documents)
    return create_block_mask(sees, batch, None, seq_len, seq_len, device=str(device))


@lru_cache
def _causal_blocks(seq_len: int, device: torch.device) -> BlockMask:
    return block_mask(seq_len, None, None, device)


def candidates(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, mask: Mask
) -> tuple[Backend, ...]:
    """The implementations that may be compared for a call; "math" while its scores are few."""
    named: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "flex", "math")
    few = shape.seq_len <= _LONGEST_WRITTEN_OUT
    can = asking(shape, dtype, device, mask)
    return tuple(each for each in named if (each != "math" or few) and can(each))


def asking(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, mask: Mask
) -> Callable[[Backend], bool]:
    """A function that says whether an implementation takes a call; nothing runs."""

    def can(backend: Backend) -> bool:
        if backend in ("default", "math"):
            return True
        if device.type != "cuda":
            return backend == "flash" and shape.head_dim == shape.value_dim
        if backend == "flex":
            narrow = min(shape.head_dim, shape.value_dim) < _NARROWEST_FLEX_HEAD
            return mask in _FLEX_MASKS and not narrow
        return _torch_says(backend, shape, dtype, device, mask)

    return can


@lru_cache
def _torch_says(
    backend: Backend, shape: AttentionShape, dtype: torch.dtype, device: torch.device, mask: Mask
) -> bool:
    # What torch asks for depends on widths, types and layout: a short sequence will do.
    length = min(shape.seq_len, _LONGEST_ASKED)
    grouped = shape.heads != shape.kv_heads
    repeats = grouped and (backend == "efficient" or mask not in ("causal", "none"))
    kv_heads = shape.heads if repeats else shape.kv_heads

    def empty(heads: int, width: int) -> Tensor:
        return torch.empty(1, heads, length, width, dtype=dtype, device=device)

    pairs = mask not in ("causal", "none")
    visible = visible_pairs(length, device=device) if pairs else None
    q = empty(shape.heads, shape.head_dim)
    k, v = empty(kv_heads, shape.head_dim), empty(kv_heads, shape.value_dim)
    call = cuda.SDPAParams(q, k, v, visible, 0.0, mask == "causal", grouped and not repeats)
    ask = {
        "cudnn": cuda.can_use_cudnn_attention,
        "flash": cuda.can_use_flash_attention,
        "efficient": cuda.can_use_efficient_attention,
    }
    return bool(ask[backend](call))


@lru_cache
def _compiled_flex(device_type: str) -> Any:
    """FlexAttention is fused only where it is compiled; a CPU takes it as it is."""
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention
