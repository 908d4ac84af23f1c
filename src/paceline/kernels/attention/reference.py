"""Attention, the specification: plain torch, in any floating type, all scores written out.

Paper: grouped queries https://arxiv.org/abs/2305.13245.
"""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q @ k.T / sqrt(head_dim)) @ v over what each query sees.

    Args:
        q: (batch, heads, seq, head_dim).
        k: (batch, kv_heads, seq, head_dim); each key head serves heads / kv_heads query heads.
        v: (batch, kv_heads, seq, value_dim).
        visible: bool that broadcasts to (batch, heads, seq, seq), query before key.

    Returns:
        (batch, heads, seq, value_dim)
    """
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def visible_pairs(
    seq_len: int,
    window: int | None = None,
    documents: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query sees: itself and those before, less by window and documents.

    Args:
        seq_len: tokens of the sequence.
        window: a query sees itself and the window - 1 tokens before it; None means all before.
        documents: (batch, seq) numbers of packed documents; a query sees only its own.
        device: where the result lies.

    Returns:
        bool (seq, seq), or (batch, 1, seq, seq) where there are documents
    """
    positions = torch.arange(seq_len, device=device)
    distance = positions[:, None] - positions  # (seq, seq): query minus key
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if documents is None:
        return visible
    return visible & (documents[:, None, :, None] == documents[:, None, None, :])
