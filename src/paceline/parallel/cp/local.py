"""Attention of some queries to one block of keys, on one device, with its log-sum-exp.

How it works: PyTorch's own fused kernels, called below `scaled_dot_product_attention` because that
one keeps the log-sum-exp to itself. With it the results of several blocks can be merged exactly
(`merge`), and the backward pass of each block needs only the merged result: the kernels recompute
the weights as exp(score - lse), which are then those of the whole row.

| device | kernel |
| --- | --- |
| CPU | flash for CPU: fp64, fp32, bf16, fp16; grouped heads; masks |
| CUDA, 16 bits, no mask | flash; grouped heads |
| CUDA, 16 bits with mask, or fp32 | memory-efficient; grouped heads by repeating keys |
| any other (fp64 on CUDA) | plain products, which hold the scores of the tile |

Heads of unequal sizes (q and k against v) and sizes that a kernel can't take are padded with zeros,
which change no product.

A hidden pair gets a huge negative score, not minus infinity: a query that sees nothing of a tile
then has a finite log-sum-exp so low that the merge gives the tile no weight.

Log-sum-exp merging: https://arxiv.org/abs/2205.14135 (section 3), https://arxiv.org/abs/2310.01889
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_ATEN = torch.ops.aten
_LSE_ALIGNMENT = 32  # the memory-efficient kernel's log-sum-exp has rows of a multiple of it
_BIAS_ALIGNMENT = 16  # and its bias

Kernel = Literal["cpu", "flash", "efficient", "plain"]
Gradients = tuple[Tensor, Tensor, Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which the blocks of a row are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def hidden_score(dtype: torch.dtype) -> float:
    """What is added to the score of a pair that must not be seen."""
    return torch.finfo(dtype).min / 2


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add the attention to one more block to what a row has so far, in place.

    Args:
        out: (batch, heads, seq, head_dim), in the accumulator's type.
        lse: (batch, heads, seq), log of the sum of exp(score); minus infinity at first.
        block_out: as out, of any floating type.
        block_lse: as lse.
    """
    weight = torch.sigmoid(block_lse - lse).unsqueeze(-1)  # exp(block) / (exp(block) + exp(lse))
    out.lerp_(block_out.to(out.dtype), weight)
    torch.logaddexp(lse, block_lse, out=lse)


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend to one block.

    Args:
        q: (batch, heads, seq, head_dim).
        k: (batch, kv_heads, keys, head_dim); each key head serves heads / kv_heads query heads.
        v: (batch, kv_heads, keys, v_head_dim).
        bias: (1 or batch, 1, seq, keys) added to the scores, in q's type.
        is_causal: query i sees the keys up to i.

    Returns:
        (batch, heads, seq, v_head_dim) in q's type, (batch, heads, seq) log-sum-exp in fp32 (fp64).
    """
    kernel, scale, v_dim = _kernel(q, bias), 1 / math.sqrt(q.shape[-1]), v.shape[-1]
    q, k, v = _pad(kernel, q, k, v)
    if kernel == "cpu":
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif kernel == "flash":
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
    elif kernel == "efficient":
        k, v = _repeat(k, q), _repeat(v, q)
        out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
            q, k, v, _aligned(bias, q), True, 0.0, is_causal, scale=scale
        )
        lse = lse[:, :, : q.shape[2]]
    else:
        out, lse = _plain(q, _repeat(k, q), _repeat(v, q), bias, is_causal, scale)
    return out[..., :v_dim], lse


def attend_block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    is_causal: bool,
) -> Gradients:
    """Return what one block contributes to the gradients of q, k and v, in their type.

    Args:
        grad: of `out`.
        q: as k, v, bias and is_causal, what `attend_block` was given.
        k: see q.
        v: see q.
        out: the merged result of all blocks.
        lse: the merged log-sum-exp of all blocks.
        bias: see q.
        is_causal: see q.
    """
    kernel, scale = _kernel(q, bias), 1 / math.sqrt(q.shape[-1])
    dims = q.shape[-1], k.shape[-1], v.shape[-1]
    q, k, v, grad, out = _pad(kernel, q, k, v, grad, out)
    if kernel == "cpu":
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif kernel == "flash":
        grads = _flash_backward(grad, q, k, v, out, lse, is_causal, scale)
    elif kernel == "efficient":
        grads = _efficient_backward(grad, q, k, v, out, lse, bias, is_causal, scale)
    else:
        grads = _plain_backward(grad, q, k, v, out, lse, bias, is_causal, scale)
    dq, dk, dv = (g[..., :dim] for g, dim in zip(grads, dims, strict=True))
    return dq, dk, dv


def _kernel(q: Tensor, bias: Tensor | None) -> Kernel:
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return "plain"
    has_flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    return "flash" if has_flash and bias is None else "efficient"


def _pad(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Give all the same head size, on CUDA a multiple of 8."""
    if kernel == "plain":
        return tensors
    dim = max(x.shape[-1] for x in tensors)
    dim = dim if kernel == "cpu" else -(-dim // 8) * 8
    return tuple(x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1])) for x in tensors)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Give each query head its own key (or value) head."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _fold(grad: Tensor, kv_heads: int) -> Tensor:
    """Add up the gradients of the copies that `_repeat` made."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)


def _aligned(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a bias to all heads, its rows beginning at addresses that the kernel can load from."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    bias = F.pad(bias, (0, -keys % _BIAS_ALIGNMENT))[..., :keys]
    return bias.expand(q.shape[0], q.shape[1], -1, -1)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
    return _ATEN._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
        0.0, is_causal, unused, unused, scale=scale,
    )  # fmt: skip


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Gradients:
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    # Infinite where there is no query, as the kernel itself does: no weight.
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGNMENT), value=torch.inf).contiguous()
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        grad, q, _repeat(k, q), _repeat(v, q), _aligned(bias, q), out, lse, unused, unused,
        0.0, [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    return dq, _fold(dk, k.shape[1]), _fold(dv, v.shape[1])


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    wide = accumulator(q.dtype)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, hidden_score(wide))
    return scores


def _plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Gradients:
    """Equation 4 onwards of appendix B.2 of the flash attention paper."""
    wide, dtype, kv_heads = accumulator(q.dtype), q.dtype, k.shape[1]
    k, v = _repeat(k, q), _repeat(v, q)
    weights = torch.exp(_scores(q, k, bias, is_causal, scale) - lse.unsqueeze(-1))
    q, k, v, grad, out = (x.to(wide) for x in (q, k, v, grad, out))
    delta = (grad * out).sum(-1, keepdim=True)
    d_scores = weights * (grad @ v.mT - delta) * scale
    dq, dk, dv = d_scores @ k, d_scores.mT @ q, weights.mT @ grad
    return dq.to(dtype), _fold(dk, kv_heads).to(dtype), _fold(dv, kv_heads).to(dtype)
