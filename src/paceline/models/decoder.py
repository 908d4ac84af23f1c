"""The decoder network of a Model: embedding, blocks, norm, head.

How it works: `Decoder.forward` turns tokens into logits. What all blocks share is computed once per
forward: the rotation of every position, and one attention mask for each distinct window. Each block
is then a function of (x, rope, mask), so that it can be recomputed, sharded or put on another
device alone. The Model says which layers a block has: `attention`, `feedforward`, `moe`.

The network can be built without memory: `with torch.device("meta")`, then `to_empty(device=...)`,
then `init_weights` or `weights.load_weights`, which also fill the buffers. A tied head has no
parameter of its own: `head` is None and the embedding's weight is used, so that no copy of it can
come apart when the module is moved or sharded.

It is single-device code: it knows nothing of ranks, and holds no keys and values of earlier tokens:
an attention core may do that (`paceline.generate.paged`).

Papers: RMS norm https://arxiv.org/abs/1910.07467, scaled initialisation of residual outputs (GPT-2)
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf,
layers side by side (GPT-J, GPT-NeoX) https://arxiv.org/abs/2204.06745
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.config.mup import init_factor, writes_residual
from paceline.kernels.loss import cross_entropy, linear_cross_entropy
from paceline.models.adapters import adapter_placements
from paceline.models.attention import Attend, Attention, LatentAttention, Sdpa, soft_capped
from paceline.models.feedforward import ACTIVATIONS, FeedForward
from paceline.models.moe import ExpertLayer, expert_layers
from paceline.models.norm import add_norm_of, norm_of
from paceline.models.placements import Style, placements
from paceline.models.rope import Rope, rope_tables
from paceline.models.shares import Streams, assign, assign_row, held_rows


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm and added to the residual stream, one
    after the other or side by side (`Model.residual`)."""

    def __init__(self, model: Model, layer: int, attend: Attend) -> None:
        super().__init__()
        self.window = model.window(layer)
        self.residual = model.residual
        has_norm = layer > 0 or not model.embedding_norm or model.residual == "post_norm"
        self.attention_norm = norm_of(model) if has_norm else nn.Identity()
        self.attention = _attention(model, attend)
        self.attention_out_norm = norm_of(model) if model.post_norms else nn.Identity()
        self.ffn_norm: nn.Module | None = None
        if model.residual != "parallel_shared":
            adds = model.residual == "sequential"
            self.ffn_norm = add_norm_of(model) if adds else norm_of(model)
        self.ffn = _feed_forward(model, layer)
        self.ffn_out_norm = norm_of(model) if model.post_norms else nn.Identity()

    def forward(self, x: Tensor, rope: Rope, mask: Any, wanted: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden), or to what is wanted of it.

        Args:
            wanted: (num_wanted,) places; all by default.
        """
        normed = x if self.residual == "post_norm" else self.attention_norm(x)
        attended = self.attention_out_norm(self.attention(normed, rope, mask))
        if wanted is not None:
            normed, attended, x = (each[:, wanted] for each in (normed, attended, x))
        if self.ffn_norm is None:
            return x + attended + self.ffn_out_norm(self.ffn(normed))
        if self.residual == "parallel":
            return x + attended + self.ffn_out_norm(self.ffn(self.ffn_norm(x)))
        if self.residual == "post_norm":
            x = self.attention_norm(x + attended)
            return self.ffn_norm(x + self.ffn_out_norm(self.ffn(x)))
        normed, x = self.ffn_norm(attended, x)
        return x + self.ffn_out_norm(self.ffn(normed))


def _attention(model: Model, attend: Attend) -> Attention | LatentAttention:
    return Attention(model, attend) if model.latent is None else LatentAttention(model, attend)


def _feed_forward(model: Model, layer: int) -> nn.Module:
    if model.experts is not None and model.has_experts(layer):
        return ExpertLayer(model.hidden_size, model.experts)
    return FeedForward(
        model.hidden_size,
        model.ffn_size,
        model.activation,
        has_gate=model.gated,
        bias=model.bias,
    )


class HeadLayer(nn.Module):
    """What stands before the head of BERT and ModernBERT."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.proj = nn.Linear(model.hidden_size, model.hidden_size, bias=model.bias)
        self.activation = ACTIVATIONS[model.activation]
        self.norm = norm_of(model)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        return self.norm(self.activation(self.proj(x)))


class HeadBias(nn.Module):
    """What a tied head adds to logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, logits: Tensor) -> Tensor:
        """Map (batch, seq, vocab) to (batch, seq, vocab)."""
        return logits + self.bias.to(logits.dtype)


def _unchanged(weight: Tensor) -> Tensor:
    return weight


class Decoder(nn.Module):
    """The network of a Model, or, after `cut`, one stage of it.

    Args:
        attend: the attention core that every block uses; `Sdpa` by default.
    """

    rope_cos: Tensor  # (max_seq_len, rope_dim / 2), fp32 unless the module is converted
    rope_sin: Tensor
    window_cos: Tensor  # of blocks with a window, where they have frequencies of their own
    window_sin: Tensor

    def __init__(self, model: Model, attend: Attend | None = None) -> None:
        super().__init__()
        self.model = model
        self.attend: Attend = attend or Sdpa(is_causal=model.causal)
        self.is_first = self.is_last = True
        self.set_apart: Callable[[Tensor], Tensor] = _unchanged
        """Applied to a tied head's weight: for whoever wants the gradients of its two uses
        apart."""
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear
        """The product with a tied head's weight."""
        self.embed: nn.Embedding | None = nn.Embedding(model.vocab_size, model.hidden_size)
        self.position_embed = (
            nn.Embedding(model.max_seq_len, model.hidden_size)
            if model.positions == "learned"
            else None
        )
        kinds = model.token_types
        self.type_embed = nn.Embedding(kinds, model.hidden_size) if kinds else None
        self.embed_norm = norm_of(model) if model.embedding_norm else None
        self.blocks = nn.ModuleList(
            Block(model, layer, self.attend) for layer in range(model.num_layers)
        )
        is_post_norm = model.residual == "post_norm"
        self.norm: nn.Module | None = nn.Identity() if is_post_norm else norm_of(model)
        self.head_layer = HeadLayer(model) if model.head_layer else None
        self.head = (
            None
            if model.tie_embeddings
            else nn.Linear(model.hidden_size, model.vocab_size, model.head_bias)
        )
        is_apart = model.tie_embeddings and model.head_bias
        self.head_bias = HeadBias(model.vocab_size) if is_apart else None
        # Not persistent: a checkpoint holds what was learnt, and these follow from the Model.
        self.has_window_rope = model.window_rope_theta is not None
        of_windows = ("window_cos", "window_sin") if self.has_window_rope else ()
        for name in ("rope_cos", "rope_sin", *of_windows):
            table = torch.empty(model.max_seq_len, model.rope_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        if not self.rope_cos.is_meta:
            self.reset_buffers()

    def set_attend(self, attend: Attend) -> None:
        """Let every block use another attention core."""
        self.attend = attend
        for block in self._held:
            block.attention.attend = attend

    @property
    def _held(self) -> Iterable[Block]:
        return cast(Iterable[Block], self.blocks)

    def cut(self, first: int, stop: int) -> None:
        """Keep only what a pipeline stage with blocks first..stop-1 computes, in place.

        Names stay those of the whole network ("blocks.7"). The first stage keeps the embedding, the
        last one norm and head; with tied embeddings both keep the embedding's weight.
        """
        self.is_first, self.is_last = first == 0, stop == self.model.num_layers
        kept = dict(self.blocks.named_children())
        self.blocks = nn.ModuleList()
        for layer in range(first, stop):
            self.blocks.add_module(str(layer), kept[str(layer)])
        if not self.is_last:
            self.norm = self.head_layer = self.head = self.head_bias = None
        if not self.is_first:
            self.position_embed = self.type_embed = self.embed_norm = None
        if not self.is_first and not (self.is_last and self.model.tie_embeddings):
            self.embed = None

    def forward(
        self,
        x: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        targets: Tensor | None = None,
        wanted: Tensor | None = None,
        *,
        returns_states: bool = False,
    ) -> Tensor:
        """Predict each next token (each masked one where tokens see later ones), or say how well it
        does.

        Args:
            x: (batch, seq) token ids; on a later stage (batch, seq, hidden), what the stage before
                returned.
            document_ids: (batch, whole_seq) integers, where several documents are packed into a
                sequence: a new document starts wherever the number changes. Positions start again
                there, and no token sees another document.
            positions: (seq,) which tokens of the whole sequence these are, where ranks share a
                sequence; all of them by default.
            targets: (batch, seq) the tokens to predict; -100 leaves one out.
            wanted: (num_wanted,) places of the tokens whose logits are returned; all by default.
            returns_states: return what the last norm gives, (batch, seq, hidden), and not logits.

        Returns:
            (batch, seq, vocab) logits, or with targets their mean loss in nats, for which the
            logits of a part of the tokens at a time are enough; (batch, seq, hidden) on a stage
            that is not the last.

        Raises:
            InputError: the sequence is longer than `max_seq_len`.
        """
        if positions is None:
            self._check_length(x.shape[1])
            positions = torch.arange(x.shape[1], device=x.device)
        starts = None if document_ids is None else document_starts(document_ids)
        own = positions[None]  # (1 or batch, seq): positions within the document
        if starts is not None:
            own = positions - starts[:, positions]
        masks = self._masks(positions, starts)
        rope = self._rope(own, self.rope_cos, self.rope_sin)
        ropes = dict.fromkeys(masks, rope)
        if self.has_window_rope:
            of_windows = self._rope(own, self.window_cos, self.window_sin)
            ropes = {window: of_windows if window else rope for window in masks}
        if self.is_first:
            assert self.embed is not None
            x = self.embed(x)  # (batch, seq, hidden)
            if self.model.scale_embeddings:
                x = x * torch.tensor(self.model.hidden_size**0.5, dtype=x.dtype)
            if self.position_embed is not None:
                x = x + self.position_embed(own)
            if self.type_embed is not None:
                x = x + self.type_embed(torch.zeros_like(own))
            if self.embed_norm is not None:
                x = self.embed_norm(x)
        held = [*self._held]
        for block in held:
            only = (wanted,) if wanted is not None and block is held[-1] else ()
            x = block(x, ropes[block.window], masks[block.window], *only)
        if not self.is_last:
            return x
        assert self.norm is not None
        x = self.norm(x)
        if returns_states:
            return x
        if self.head_layer is not None:
            x = self.head_layer(x)
        if targets is not None and not self.model.head_bias and self.model.logit_cap is None:
            return linear_cross_entropy(x, self._head_weight, targets)
        logits = self.project(x, self._head_weight) if self.head is None else self.head(x)
        logits = logits if self.head_bias is None else self.head_bias(logits)
        logits = soft_capped(logits, self.model.logit_cap)
        return logits if targets is None else cross_entropy(logits, targets)

    @property
    def _head_weight(self) -> Tensor:
        """(vocab, hidden)"""
        if self.head is not None:
            return self.head.weight
        assert self.embed is not None
        return self.set_apart(self.embed.weight)

    def _check_length(self, seq_len: int) -> None:
        if seq_len > self.model.max_seq_len:
            raise InputError(
                f"A sequence of {seq_len} tokens was given, but the model's max_seq_len is "
                f"{self.model.max_seq_len}; shorten the sequence or raise max_seq_len."
            )

    def _rope(self, own: Tensor, cos: Tensor, sin: Tensor) -> Rope:
        """Return cos and signed sin of each position: (1 or batch, seq, 1, rope_dim)."""
        cos, sin = cos[own], sin[own]
        wide = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return wide[0].unsqueeze(2), wide[1].unsqueeze(2)

    def placements(self) -> dict[str, Style]:
        """How tensor parallelism cuts each module."""
        styles = placements(self.model)
        return {**styles, **adapter_placements(self, styles)}

    def _masks(self, positions: Tensor, starts: Tensor | None) -> dict[int | None, Any]:
        windows = {block.window for block in self._held}
        seq_len, device = len(positions), positions.device
        return {window: self.attend.mask(seq_len, window, starts, device) for window in windows}

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fill all parameters and buffers in place, also on a sharded module.

        Matrices are normal with `init_std`, those that write to the residual stream divided by
        √(2 · num_layers) (GPT-2); norms multiply by one, biases are zero; or as `config.mup` says.
        Every parameter, and each expert's part of one, has its own stream, seeded by one draw from
        the generator and its name: the result depends neither on the number of ranks nor on which
        parameters this rank holds.

        Args:
            generator: give every rank one with the same seed. Numbers are drawn on its device;
                a CPU generator gives the same weights wherever the module lies.
        """
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        streams = Streams(seed, generator.device)
        # state_dict, not named_parameters: its names are the same under checkpoint wrappers.
        for name, tensor in self.state_dict(keep_vars=True).items():
            if tensor.ndim == 3:
                for place, expert in enumerate(held_rows(tensor)):
                    row = self._initial(name, tensor.shape[1:], streams.of(f"{name}/{expert}"))
                    assign_row(tensor, place, row)
            elif isinstance(tensor, nn.Parameter):
                assign(tensor, self._initial(name, tensor.shape, streams.of(name)))
        self.reset_buffers()

    def _initial(self, name: str, shape: torch.Size, stream: torch.Generator) -> Tensor:
        full, factor = torch.empty(shape, device=stream.device), init_factor(self.model, name)
        if len(shape) == 1 or name.endswith("bias"):
            is_zero = name.endswith(("bias", ".sinks.weight")) or self.model.norm == "rms_plus_one"
            return full.fill_(0.0 if is_zero else factor)
        depth = math.sqrt(2 * self.model.num_layers) if writes_residual(name) else 1.0
        return full.normal_(std=factor * self.model.init_std / depth, generator=stream)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Give all buffers their first values; needed after `to_empty`."""
        cos, sin = rope_tables(self.model)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)
        if self.has_window_rope:
            cos, sin = rope_tables(self.model, of_windows=True)
            self.window_cos.copy_(cos)
            self.window_sin.copy_(sin)
        for layer in expert_layers(self).values():
            layer.reset_buffers()


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
