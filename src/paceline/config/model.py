"""The Model noun: the shapes of a dense decoder network, its parameter counts and its FLOPs.

A decoder is a stack of identical blocks (RMS norm, grouped-query attention with rotary positions,
RMS norm, SwiGLU feed-forward) between an embedding and a head: the Llama, Mistral, Qwen2 and Qwen3
families, which differ only in the switches below.

FLOP convention (also of MFU): a matrix product of an (m, k) by a (k, n) matrix costs 2mkn; the
backward pass costs twice the forward; recompute, norms, softmax and element-wise work count as
nothing. Causal attention counts as half of the full square, a sliding window as the keys it leaves.

This file holds no tensors (`paceline.models.decoder` does) and reads no `config.json`
(`paceline.config.huggingface` does).

Papers: Llama https://arxiv.org/abs/2302.13971, grouped-query attention
https://arxiv.org/abs/2305.13245, rotary positions https://arxiv.org/abs/2104.09864,
FLOP counting (PaLM, appendix B) https://arxiv.org/abs/2204.02311.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.noun import Noun


class RopeScaling(Noun):
    """How rotary frequencies are stretched beyond the context the model was first trained on."""

    rope_type: Literal["llama3", "linear"]
    """llama3 slows only the low frequencies (Llama 3.1 and later); linear slows all of them."""
    factor: float = Field(ge=1)
    """By how much the context is stretched."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3 only: wavelengths above original_max_seq_len / low_freq_factor are slowed fully."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3 only: wavelengths below original_max_seq_len / high_freq_factor are left alone."""
    original_max_seq_len: int | None = Field(None, gt=0)
    """llama3 only: the context length before stretching, in tokens."""

    @model_validator(mode="after")
    def _has_its_own_settings(self) -> Self:
        settings = ("low_freq_factor", "high_freq_factor", "original_max_seq_len")
        given = [name for name in settings if getattr(self, name) is not None]
        if self.rope_type == "linear" and given:
            raise ValueError(f"rope_type linear takes no {given[0]}; remove it.")
        if self.rope_type == "llama3" and len(given) < len(settings):
            lacking = next(name for name in settings if name not in given)
            raise ValueError(f"rope_type llama3 requires {lacking}; give it a value.")
        if self.low_freq_factor and self.high_freq_factor:
            _require(
                self.high_freq_factor > self.low_freq_factor,
                f"high_freq_factor = {self.high_freq_factor} must be above "
                f"low_freq_factor = {self.low_freq_factor}; raise it.",
            )
        return self


class Model(Noun):
    """The shapes of a dense decoder network."""

    family: Literal["decoder"] = "decoder"
    """The kind of network."""
    vocab_size: int = Field(gt=0)
    """Number of token ids the embedding and the head know."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    ffn_size: int = Field(gt=0)
    """Inner width of the SwiGLU feed-forward layer."""
    num_layers: int = Field(gt=0)
    """Number of blocks."""
    num_heads: int = Field(gt=0)
    """Number of query heads."""
    # A field that failed its own check is absent from `given`, and is the one reported.
    num_kv_heads: int = Field(default_factory=lambda given: given.get("num_heads", 1), gt=0)
    """Number of key and value heads (grouped-query attention); as many as num_heads by default."""
    head_dim: int = Field(
        default_factory=lambda given: given.get("hidden_size", 2) // given.get("num_heads", 1), gt=0
    )
    """Width of one head; hidden_size / num_heads by default."""
    max_seq_len: int = Field(gt=0)
    """The longest sequence, in tokens."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in every RMS norm."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are stretched; not at all by default."""
    sliding_window: int | None = Field(None, gt=0)
    """A query sees itself and the sliding_window - 1 tokens before it; all of them by default."""
    full_layers: tuple[int, ...] = Field((), strict=False)
    """Indices of the blocks that see all earlier tokens although sliding_window is set."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMS norm over head_dim before the rotation (Qwen3)."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    init_std: float = Field(0.02, ge=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads = {self.num_heads} can't be shared out over num_kv_heads = "
            f"{self.num_kv_heads}; give a num_kv_heads that divides num_heads.",
        )
        _require(
            "head_dim" in self.model_fields_set or self.hidden_size % self.num_heads == 0,
            f"hidden_size = {self.hidden_size} can't be split evenly over num_heads = "
            f"{self.num_heads}; change one of them or give head_dim.",
        )
        _require(
            self.head_dim % 2 == 0,
            f"head_dim = {self.head_dim} is odd, and rotary positions turn pairs of numbers; "
            "give an even head_dim.",
        )
        _require(
            self.sliding_window is not None or not self.full_layers,
            "full_layers can't take effect without a sliding_window; give one or remove it.",
        )
        known = range(self.num_layers)
        _require(
            list(self.full_layers) == [i for i in known if i in self.full_layers],
            f"full_layers = {list(self.full_layers)} must be increasing block indices from 0 to "
            f"{self.num_layers - 1}, each once; correct the list.",
        )
        _require(
            len(self.full_layers) < self.num_layers,
            "full_layers lists every block, so that sliding_window can't take effect; remove both.",
        )
        return self

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a block in tokens, or None where it sees everything."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def num_embedding_params(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_block_matmul_params(self) -> int:
        """Parameters of one block that take part in a matrix product."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def num_block_params(self) -> int:
        """All parameters of one block: matrices, norms and biases."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        return self.num_block_matmul_params + norms + biases

    @property
    def num_params(self) -> int:
        """All parameters of the network; a tied embedding counts once."""
        head = 0 if self.tie_embeddings else self.num_embedding_params
        blocks = self.num_layers * self.num_block_params
        return self.num_embedding_params + blocks + self.hidden_size + head

    @property
    def num_matmul_params(self) -> int:
        """Parameters that cost 2 FLOPs per token forward: all matrices, the head also where tied.

        The input embedding is a look-up and counts as zero.
        """
        return self.num_layers * self.num_block_matmul_params + self.num_embedding_params

    def attention_flops_per_token(self, seq_len: int, causal: bool = True) -> float:
        """Forward FLOPs of all attention cores (scores and weighted values), mean per token.

        Args:
            seq_len: tokens in the sequence (the length of one document where they are packed).
            causal: count the keys a causal mask leaves (PaLM's formula counts the full square:
                pass False to compare with it).
        """
        keys = sum(
            _mean_keys(seq_len, self.window(layer), causal) for layer in range(self.num_layers)
        )
        return 4 * self.num_heads * self.head_dim * keys

    def forward_flops_per_token(self, seq_len: int, causal: bool = True) -> float:
        """FLOPs of the forward pass, mean per token: 2 per matmul parameter, plus attention.

        Arguments as in `attention_flops_per_token`; the convention stands at the top of this file.
        """
        return 2 * self.num_matmul_params + self.attention_flops_per_token(seq_len, causal)

    def train_flops_per_token(self, seq_len: int, causal: bool = True) -> float:
        """Model FLOPs of forward and backward, mean per token: three times the forward pass."""
        return 3 * self.forward_flops_per_token(seq_len, causal)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _mean_keys(seq_len: int, window: int | None, causal: bool) -> float:
    """Keys one query sees, mean over a sequence, with the diagonal counted as half.

    Counting s²/2 visible pairs (not s(s+1)/2) is the usual "causal is half"; a window w < s leaves
    out a triangle of (s-w)²/2 pairs, so that w = s gives the causal half again.
    """
    span = min(window or seq_len, seq_len)
    if not causal:
        return span
    return span - span * span / (2 * seq_len)
