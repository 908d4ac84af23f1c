"""The dense decoder network of a Model: embedding, blocks, norm, head.

How it works: `Decoder.forward` turns tokens into logits. What all blocks share is computed once per
forward: the rotation of every position, and one attention mask for each distinct window. Each block
is then a function of (x, rope, mask), so that it can be recomputed, sharded or put on another
device alone. Attention itself is an argument (`Attend`): `Sdpa` here, ring attention elsewhere.

The network can be built without memory: `with torch.device("meta")`, then `to_empty(device=...)`,
then `init_weights` or `weights.load_weights`, which also fill the rotary tables. A tied head has no
parameter of its own: `head` is None and the embedding's weight is used, so that no copy of it can
come apart when the module is moved or sharded.

It is single-device code: it knows nothing of ranks, and holds no key-value cache.

Papers: RMS norm https://arxiv.org/abs/1910.07467, SwiGLU https://arxiv.org/abs/2002.05202, rotary
positions https://arxiv.org/abs/2104.09864, scaled initialisation of residual outputs (GPT-2)
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

import hashlib
import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.config.errors import InputError
from paceline.config.model import Model, RopeScaling

Rope = tuple[Tensor, Tensor]


class Attend(Protocol):
    """The core of attention: who sees whom (`mask`), and the weighted values (the call)."""

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare, once per forward and distinct window, what every call with it needs.

        Args:
            seq_len: tokens in the sequence.
            window: a query sees itself and the window - 1 tokens before it; None means all before.
            documents: (batch, seq) numbers of the packed documents, increasing along the sequence;
                a query sees only its own document. None means one document each.
            device: where q, k and v will lie.
        """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attend causally.

        Args:
            q: (batch, heads, seq, head_dim).
            k: (batch, kv_heads, seq, head_dim); each key head serves heads / kv_heads query heads.
            v: as k.
            mask: what `mask` returned.

        Returns:
            (batch, heads, seq, head_dim)
        """


class Sdpa:
    """Attention by `torch.nn.functional.scaled_dot_product_attention`.

    A mask is None (plain causal, the fast path) or a boolean tensor that broadcasts to
    (batch, heads, seq, seq). That takes seq² bytes: windows over very long sequences ask for
    another core.
    """

    def mask(
        self, seq_len: int, window: int | None, documents: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return None where the plain causal mask is enough, else the visible pairs."""
        window = None if window is None or window >= seq_len else window
        if window is None and documents is None:
            return None
        positions = torch.arange(seq_len, device=device)
        distance = positions[:, None] - positions  # (seq, seq): query minus key
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        if documents is None:
            return visible
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return visible & same  # (batch, 1, seq, seq)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; see `Attend`."""
        grouped = q.shape[1] != k.shape[1]
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if grouped:
            # The kernels that take a mask on CUDA know no groups and would give way to the one
            # that writes out all scores. On a CPU both forms take the same time (measured, 2 %).
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, model: Model, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_dim = model.head_dim
        width, kv_width = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
        self.q_proj = nn.Linear(model.hidden_size, width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, kv_width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, kv_width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(width, model.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = nn.RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, mask: Any) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        # (batch, seq, heads, head_dim); -1 heads, because tensor parallelism leaves a share of them
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (batch, heads, seq, head_dim)
        return self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down_proj = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to the residual."""

    def __init__(self, model: Model, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(model, attend)
        self.ffn_norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.ffn = FeedForward(model)

    def forward(self, x: Tensor, rope: Rope, mask: Any) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """The network of a Model.

    Args:
        model: the shapes.
        attend: the attention core that every block uses; `Sdpa` by default.
    """

    rope_cos: Tensor  # (max_seq_len, head_dim / 2), fp32 unless the module is converted
    rope_sin: Tensor

    def __init__(self, model: Model, attend: Attend | None = None) -> None:
        super().__init__()
        self.model = model
        self.attend: Attend = attend or Sdpa()
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(Block(model, self.attend) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.head = (
            None if model.tie_embeddings else nn.Linear(model.hidden_size, model.vocab_size, False)
        )
        cos, sin = rope_tables(model)
        # Not persistent: a checkpoint holds what was learnt, and these follow from the Model.
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Predict each next token.

        Args:
            tokens: (batch, seq) token ids.
            document_ids: (batch, seq) integers, where several documents are packed into a sequence:
                a new document starts wherever the number changes. Positions start again there,
                and no token sees another document.

        Returns:
            (batch, seq, vocab) logits.

        Raises:
            InputError: the sequence is longer than `max_seq_len`.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.model.max_seq_len:
            raise InputError(
                f"A sequence of {seq_len} tokens was given, but the model's max_seq_len is "
                f"{self.model.max_seq_len}; shorten the sequence or raise max_seq_len."
            )
        starts = None if document_ids is None else document_starts(document_ids)
        rope, masks = self._rope(seq_len, starts), self._masks(tokens, starts)
        x = self.embed(tokens)  # (batch, seq, hidden)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, masks[self.model.window(layer)])
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def _rope(self, seq_len: int, starts: Tensor | None) -> Rope:
        """Return cos and signed sin of each position: (1 or batch, seq, 1, head_dim)."""
        cos, sin = self.rope_cos[None, :seq_len], self.rope_sin[None, :seq_len]
        if starts is not None:
            positions = torch.arange(seq_len, device=starts.device) - starts
            cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        wide = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return wide[0].unsqueeze(2), wide[1].unsqueeze(2)

    def _masks(self, tokens: Tensor, starts: Tensor | None) -> dict[int | None, Any]:
        windows = {self.model.window(layer) for layer in range(self.model.num_layers)}
        seq_len, device = tokens.shape[1], tokens.device
        return {window: self.attend.mask(seq_len, window, starts, device) for window in windows}

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fill all parameters and rotary tables in place, also on a sharded module.

        Matrices are normal with `init_std`, those that write to the residual stream divided by
        √(2 · num_layers) (GPT-2); norms are one, biases zero. Every parameter has its own stream,
        seeded by one draw from the generator and its name: the result depends neither on the number
        of ranks nor on which parameters this rank holds.

        Args:
            generator: give every rank one with the same seed. Numbers are drawn on its device;
                a CPU generator gives the same weights wherever the module lies.
        """
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        # state_dict, not named_parameters: its names are the same under checkpoint wrappers.
        for name, parameter in self.state_dict(keep_vars=True).items():
            stream = torch.Generator(generator.device).manual_seed(_stream_seed(seed, name))
            assign(parameter, self._initial(name, parameter.shape, stream))
        self.reset_rope()

    def _initial(self, name: str, shape: torch.Size, stream: torch.Generator) -> Tensor:
        full = torch.empty(shape, device=stream.device)
        if len(shape) == 1:
            return full.fill_(0.0 if name.endswith("bias") else 1.0)
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        depth = math.sqrt(2 * self.model.num_layers) if writes_residual else 1.0
        return full.normal_(std=self.model.init_std / depth, generator=stream)

    @torch.no_grad()
    def reset_rope(self) -> None:
        """Compute the rotary tables again; needed after `to_empty`."""
        cos, sin = rope_tables(self.model)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per token, computed in fp32 (in fp64 for fp64 logits).

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) token ids; -100 leaves a token out of the mean.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def document_starts(document_ids: Tensor) -> Tensor:
    """Return for each token the position where its document starts.

    Args:
        document_ids: (batch, seq) integers; a document is a run of equal ones.

    Returns:
        (batch, seq) positions, increasing along the sequence: equal within a document only.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    changed = document_ids[:, 1:] != document_ids[:, :-1]
    starts = F.pad(changed * positions[1:], (1, 0))
    return starts.cummax(dim=1).values


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn the pairs (i, i + head_dim/2) of each head by the angle of its position.

    Args:
        x: (batch, seq, heads, head_dim).
        rope: cos and sin, each (1 or batch, seq, 1, head_dim); the first half of sin is negated.
            They may be of higher precision than x: the product is rounded once, to x's dtype.
    """
    cos, sin = rope
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


def rope_tables(model: Model) -> Rope:
    """Return cos and sin of every position and frequency: (max_seq_len, head_dim / 2) each, fp32.

    In fp32 as in all published weights: at long positions the rounding of the angle is part of
    what the model has learnt.
    """
    positions = torch.arange(model.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(model))
    return angles.cos(), angles.sin()


def rope_frequencies(model: Model) -> Tensor:
    """Return the radians per token of each pair of a head: (head_dim / 2,), fp32."""
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow low frequencies by `factor`, keep high ones, blend linearly in between.

    Source: `apply_scaling` in https://github.com/meta-llama/llama-models (Llama 3.1).
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_seq_len
    assert original is not None  # RopeScaling sees to it, here and for the factors
    assert low is not None
    assert high is not None
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter, or this rank's share of it into a sharded one.

    Args:
        parameter: a tensor or DTensor of the same full shape.
        full: the values; every rank passes the same, so that nothing is sent.
    """
    if isinstance(parameter, DTensor):
        full = full.to(parameter.device, parameter.dtype)
        mesh, placements = parameter.device_mesh, parameter.placements
        full = distribute_tensor(full, mesh, placements, src_data_rank=None)
    parameter.copy_(full)


def _stream_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
