"""Attention layers and their core.

Attention itself is an argument of every layer (`Attend`): `Sdpa` here, ring attention elsewhere.
A layer makes queries, keys and values from the residual stream, rotates them, and brings the result
back: `Attention` as in most networks, `LatentAttention` as in DeepSeek-V2 and -V3.

What a few networks do with scores beside it, `Scores` says.

Papers: grouped queries https://arxiv.org/abs/2305.13245, latent attention
https://arxiv.org/abs/2405.04434, soft caps (Gemma 2) https://arxiv.org/abs/2408.00118, sinks
(gpt-oss) https://arxiv.org/abs/2508.10925.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.model import Model
from paceline.kernels.attention.backends import attend
from paceline.kernels.attention.rule import Backend
from paceline.kernels.rope import rotate
from paceline.models.norm import RMSNorm, rms_norm_of
from paceline.models.rope import Rope

# That of the published code, whatever the other norms have.
_LATENT_NORM_EPS = 1e-6


class Scores(NamedTuple):
    """What becomes of the scores of attention before their softmax."""

    cap: float | None = None
    """See `soft_capped`."""
    sinks: Tensor | None = None
    """(heads,) of a key that every query sees, and whose value is zero."""

    def masked(self, products: Tensor, scale: float, mask: Tensor) -> Tensor:
        """What the softmax is of.

        Args:
            products: of queries and keys.
            scale: that they are multiplied by.
            mask: is added at the end.
        """
        if self.cap is None:
            return torch.add(mask, products, alpha=scale)
        return mask + soft_capped(products * scale, self.cap)


_PADDED_FOR_SINKS = 8
"""Numbers that queries and keys have more then: one is used, and kernels take multiples of 8."""
PLAIN = Scores()
"""Nothing."""


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores between a cap and its negative; as they are without one."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


class Attend(Protocol):
    """The core of attention: who sees whom (`mask`), and the weighted values (the call)."""

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare, once per forward and distinct window, what every call with it needs.

        Args:
            seq_len: tokens of the sequence that this rank holds (all, where ranks don't share it).
            window: a query sees itself and the window - 1 tokens before it; None means all before.
                Of cores that see later tokens, half of it on either side, or all.
            documents: (batch, whole_seq) numbers of the packed documents, increasing along the
                sequence; a query sees only its own document. None means one document each.
            device: where q, k and v will lie.
        """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scores: Scores = PLAIN
    ) -> Tensor:
        """Attend to what the mask leaves.

        Args:
            q: (batch, heads, seq, head_dim).
            k: (batch, kv_heads, seq, head_dim); each key head serves heads / kv_heads query heads.
            v: (batch, kv_heads, seq, value_dim); as wide as k but for latent attention.
            mask: what `mask` returned.
            scores: only of networks that change them; not every core can.

        Returns:
            (batch, heads, seq, value_dim)
        """


class Sdpa:
    """Attention by `torch.nn.functional.scaled_dot_product_attention`.

    Capped scores, for which it has no kernel, are written out. A sink is a further key to it.

    A mask is None (the plain one, causal or not, the fast path) or a boolean tensor that broadcasts
    to (batch, heads, seq, seq). That takes seq² bytes: windows over very long sequences ask for
    another core.

    Args:
        backend: torch's implementation under the plain causal mask, see `kernels.attention`.
        is_causal: whether a query sees no later tokens.
    """

    backend: Backend = "default"
    is_causal: bool = True

    def __init__(self, backend: Backend = "default", *, is_causal: bool = True) -> None:
        self.backend, self.is_causal = backend, is_causal

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return None where the plain mask is enough, else the visible pairs."""
        reach = seq_len if self.is_causal else 2 * seq_len
        window = None if window is None or window >= reach else window
        if window is None and documents is None:
            return None
        positions = torch.arange(seq_len, device=device)
        distance = positions[:, None] - positions  # (seq, seq): query minus key
        if not self.is_causal:
            visible = distance.abs() <= (seq_len if window is None else window // 2)
        else:
            visible = (distance >= 0) & (distance < (seq_len if window is None else window))
        if documents is None:
            return visible
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return visible & same  # (batch, 1, seq, seq)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores = PLAIN
    ) -> Tensor:
        """Attend; see `Attend`."""
        if scores.cap is not None:
            return self._written_out(q, k, v, mask, scores)
        width, scale = v.shape[-1], q.shape[-1] ** -0.5
        if scores.sinks is not None:
            q, k, v, mask = _with_sink(q, k, v, mask, scores.sinks / scale)
        if q.device.type == "cpu" and width < q.shape[-1]:
            # The flash kernel of the CPU takes heads of one width only, and the other one writes
            # out all scores: 5 times as slow at 1024 tokens (heads of 48 and 32, one core).
            v = F.pad(v, (0, q.shape[-1] - width))
        attended = self._attend(q, k, v, mask, scale)[..., :width]
        return attended if scores.sinks is None else attended[:, :, 1:]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if mask is None and self.is_causal:
            return attend(q, k, v, self.backend, scale)
        if q.shape[1] != k.shape[1]:
            # The kernels that take a mask on CUDA know no groups and would give way to the one
            # that writes out all scores. On a CPU both forms take the same time (measured, 2 %).
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def _written_out(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores
    ) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        found = soft_capped(q @ k.mT * q.shape[-1] ** -0.5, scores.cap)
        if mask is None and self.is_causal:
            mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            found = found.masked_fill(~mask, -torch.inf)
        if scores.sinks is not None:
            of_sink = scores.sinks.to(found.dtype)[:, None, None].expand(*found.shape[:-1], 1)
            found, v = torch.cat((of_sink, found), -1), F.pad(v, (0, 0, 1, 0))
        wide = torch.promote_types(found.dtype, torch.float32)
        return found.softmax(-1, dtype=wide).to(v.dtype) @ v


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sinks as any kernel takes them: a key that stands before the others, and a query, so that the
    causal mask stays as it is.

    The key has a one where no other has a number, and queries have their sink there.

    Args:
        sinks: (heads,), over what scores are multiplied by.
    """
    more, width = _PADDED_FOR_SINKS, q.shape[-1]
    of_sink = F.pad(sinks.to(q.dtype)[:, None, None], (0, more - 1))
    q = torch.cat((q, of_sink.expand(len(q), -1, q.shape[2], -1)), -1)
    k = F.pad(k, (0, more, 1, 0))
    k[:, :, 0, width] = 1
    mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    return F.pad(q, (0, 0, 1, 0)), k, F.pad(v, (0, 0, 1, 0)), mask


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions in all, some or none of a head's numbers."""

    def __init__(self, model: Model, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_dim = model.head_dim
        self.rope_dim = model.rope_dim
        width, kv_width = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
        has_bias = model.bias or model.qkv_bias
        self.q_proj = nn.Linear(model.hidden_size, width, bias=has_bias)
        self.k_proj = nn.Linear(model.hidden_size, kv_width, bias=has_bias)
        self.v_proj = nn.Linear(model.hidden_size, kv_width, bias=has_bias)
        self.o_proj = nn.Linear(width, model.hidden_size, bias=model.bias)
        self.key_heads = KeyHeads(model)
        self.q_norm = rms_norm_of(model, model.head_dim) if model.qk_norm else None
        self.k_norm = rms_norm_of(model, model.head_dim) if model.qk_norm else None
        # The core divides by the root of head_dim.
        self.query_factor = (model.head_dim / (model.score_width or model.head_dim)) ** 0.5
        self.score_cap = model.score_cap
        self.sinks = Sinks(model.num_heads) if model.sinks else None

    def forward(self, x: Tensor, rope: Rope, mask: Any) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        # (batch, seq, heads, head_dim); -1 heads, because tensor parallelism leaves a share of them
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k, v = self.key_heads(self.k_proj(x), self.v_proj(x))
        q, k = self._rotated(q, self.q_norm, rope), self._rotated(k, self.k_norm, rope)
        q = q if self.query_factor == 1 else q * self.query_factor
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (batch, heads, seq, head_dim)
        attended = self.attend(q, k, v, mask, *self._scores())
        return self.o_proj(attended.transpose(1, 2).flatten(-2))

    def _scores(self) -> tuple[Scores, ...]:
        """None where they are plain: then any core will do."""
        if self.score_cap is None and self.sinks is None:
            return ()
        return (Scores(self.score_cap, None if self.sinks is None else self.sinks()),)

    def _rotated(self, x: Tensor, norm: RMSNorm | None, rope: Rope) -> Tensor:
        """Queries or keys, (batch, seq, heads, head_dim), after their norm and rotation."""
        if self.rope_dim == self.head_dim:
            return rotate(x, *rope) if norm is None else rotate(x, *rope, norm.scale, norm.eps)
        x = x if norm is None else norm(x)
        if self.rope_dim == 0:
            return x
        turned, still = x.split((self.rope_dim, self.head_dim - self.rope_dim), dim=-1)
        return torch.cat((rotate(turned, *rope), still), dim=-1)


class KeyHeads(nn.Module):
    """Cuts keys and values into heads: as a module, so that ranks with less than a head each can
    put it together before."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.num_heads, self.head_dim = model.num_kv_heads, model.head_dim

    def forward(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Map each (batch, seq, heads x head_dim) to (batch, seq, heads, head_dim)."""
        return tuple(each.unflatten(-1, (-1, self.head_dim)) for each in columns)


class Sinks(nn.Module):
    """A score for each head: as a module, so that ranks can share them out."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def forward(self) -> Tensor:
        """(heads,), those that this rank has."""
        return self.weight


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one narrow vector per token.

    A part of each head is not rotated; the rotated part of the key is the same for all heads.

    `is_absorbed` says how the core is called. Usually with the keys and values of all heads,
    written out. Absorbed (DeepSeek-V2, section 2.1.2), with one key of (kv_rank + rope_dim) for all
    heads, whose first kv_rank numbers are the value: a core that keeps them keeps that much less,
    and the products with `kv_b_proj` are of queries and results. Results differ by rounding only.
    """

    def __init__(self, model: Model, attend: Attend) -> None:
        super().__init__()
        shape = model.latent
        assert shape is not None
        self.attend, self.shape = attend, shape
        self.is_absorbed = False
        hidden, heads, scaling = model.hidden_size, model.num_heads, model.rope_scaling
        self.score_factor = 1.0 if scaling is None else scaling.latent_score_factor
        if shape.q_rank is None:
            self.q_proj = nn.Linear(hidden, heads * shape.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, shape.q_rank, bias=False)
            self.q_a_norm = RMSNorm(shape.q_rank, _LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(shape.q_rank, heads * shape.head_dim, bias=False)
        self.kv_a_proj = nn.Linear(hidden, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_a_norm = RMSNorm(shape.kv_rank, _LATENT_NORM_EPS)
        per_head = shape.nope_dim + shape.v_dim
        self.kv_b_proj = nn.Linear(shape.kv_rank, heads * per_head, bias=False)
        self.o_proj = nn.Linear(heads * shape.v_dim, hidden, bias=False)

    def forward(self, x: Tensor, rope: Rope, mask: Any) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        if self.is_absorbed:
            return self.o_proj(self._absorbed(x, rope, mask).flatten(-2))
        q, (k, v) = self._queries(x, rope), self._keys_values(x, rope)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (batch, heads, seq, _)
        return self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))

    def _absorbed(self, x: Tensor, rope: Rope, mask: Any) -> Tensor:
        """Return (batch, seq, heads, v_dim)."""
        shape = self.shape
        expand = local_part(self.kv_b_proj.weight).unflatten(
            0, (-1, shape.nope_dim + shape.v_dim)
        )  # (heads, nope_dim + v_dim, kv_rank)
        to_keys, to_values = expand.split((shape.nope_dim, shape.v_dim), dim=1)
        still, turned = self._queries(x, rope).split(self._parts, dim=-1)
        q = torch.cat((torch.einsum("bshn,hnr->bshr", still, to_keys), turned), dim=-1)
        latent, key_turned = self.kv_a_proj(x).split((shape.kv_rank, shape.rope_dim), dim=-1)
        latent = self.kv_a_norm(latent)
        k = torch.cat((latent, self._rotate(key_turned.unsqueeze(2), rope).squeeze(2)), dim=-1)
        # The core divides by the root of the width that it sees.
        q = q * (q.shape[-1] / shape.head_dim) ** 0.5
        attended = self.attend(q.transpose(1, 2), k.unsqueeze(1), latent.unsqueeze(1), mask)
        return torch.einsum("bhsr,hvr->bshv", attended, to_values)

    def _queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Return (batch, seq, heads, head_dim)."""
        from_stream = self.shape.q_rank is None
        q = self.q_proj(x) if from_stream else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        still, turned = q.unflatten(-1, (-1, self.shape.head_dim)).split(self._parts, dim=-1)
        q = torch.cat((still, self._rotate(turned, rope)), dim=-1)
        return q if self.score_factor == 1 else q * self.score_factor

    def _keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return (batch, seq, heads, head_dim) and (batch, seq, heads, v_dim)."""
        shape = self.shape
        latent, turned = self.kv_a_proj(x).split((shape.kv_rank, shape.rope_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_norm(latent))
        heads = expanded.unflatten(-1, (-1, shape.nope_dim + shape.v_dim))
        still, v = heads.split((shape.nope_dim, shape.v_dim), dim=-1)
        turned = self._rotate(turned.unsqueeze(2), rope).expand(-1, -1, still.shape[2], -1)
        return torch.cat((still, turned), dim=-1), v

    @property
    def _parts(self) -> tuple[int, int]:
        return self.shape.nope_dim, self.shape.rope_dim

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        if self.shape.interleaved:
            # Pairs of neighbours; in q and k alike, so that their order afterwards is free.
            x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return rotate(x, *rope)
