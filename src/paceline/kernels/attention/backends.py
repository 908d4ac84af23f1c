"""Runs causal attention by one of torch's implementations, and says which can."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.kernels.attention.rule import AttentionShape, Backend

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_OF_TORCH = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NARROWEST_FLEX_HEAD = 16
_LONGEST_ASKED = 1024
_LONGEST_WRITTEN_OUT = 4096


def attend(q: Tensor, k: Tensor, v: Tensor, backend: Backend, scale: float | None = None) -> Tensor:
    """A query sees itself and those before.

    Args:
        q: (batch, heads, seq, head_dim).
        k: (batch, kv_heads, seq, head_dim).
        v: (batch, kv_heads, seq, value_dim).
        backend: which implementation.
        scale: that scores are multiplied by; one over the root of head_dim by default.

    Returns:
        (batch, heads, seq, value_dim)

    Raises:
        RuntimeError: of torch, where the backend doesn't take such a call.
    """
    grouped = q.shape[1] != k.shape[1]
    settings: dict[str, Any] = {"enable_gqa": grouped, "scale": scale}
    if backend == "default":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **settings)
    if backend == "flex":
        mask = _causal_blocks(q.shape[2], q.device)
        return _compiled_flex(q.device.type)(q, k, v, block_mask=mask, **settings)
    if grouped and backend == "efficient":  # it knows no groups
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        settings["enable_gqa"] = False
    with sdpa_kernel(_OF_TORCH[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **settings)


@lru_cache
def _causal_blocks(seq_len: int, device: torch.device) -> "BlockMask":
    # Here and below: it takes as long to import as half of torch.
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(sees, None, None, seq_len, seq_len, device=str(device))


def candidates(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[Backend, ...]:
    """The implementations that may be compared for a call; "math" while its scores are few."""
    named: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "flex")
    few: tuple[Backend, ...] = ("math",) if shape.seq_len <= _LONGEST_WRITTEN_OUT else ()
    return *(each for each in named if can_run(each, shape, dtype, device)), *few


def can_run(
    backend: Backend, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether an implementation takes a call; nothing runs."""
    if backend in ("default", "math"):
        return True
    if device.type != "cuda":
        return backend == "flash" and shape.head_dim == shape.value_dim
    if backend == "flex":
        return min(shape.head_dim, shape.value_dim) >= _NARROWEST_FLEX_HEAD
    return _torch_says(backend, shape, dtype, device)


@lru_cache
def _torch_says(
    backend: Backend, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> bool:
    # What torch asks for depends on widths, types and layout: a short sequence will do.
    length = min(shape.seq_len, _LONGEST_ASKED)
    grouped = shape.heads != shape.kv_heads
    repeats = grouped and backend == "efficient"
    kv_heads = shape.heads if repeats else shape.kv_heads

    def empty(heads: int, width: int) -> Tensor:
        return torch.empty(1, heads, length, width, dtype=dtype, device=device)

    q = empty(shape.heads, shape.head_dim)
    k, v = empty(kv_heads, shape.head_dim), empty(kv_heads, shape.value_dim)
    call = cuda.SDPAParams(q, k, v, None, 0.0, True, grouped and not repeats)
    ask = {
        "cudnn": cuda.can_use_cudnn_attention,
        "flash": cuda.can_use_flash_attention,
        "efficient": cuda.can_use_efficient_attention,
    }
    return bool(ask[backend](call))


@lru_cache
def _compiled_flex(device_type: str) -> Any:
    """FlexAttention is fused only where it is compiled; a CPU takes it as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention
