"""The Model config: the shapes of a decoder network, its parameter counts and its FLOPs.

A decoder is a stack of blocks (RMS norm, attention with rotary positions, RMS norm, SwiGLU
feed-forward) between an embedding and a head. So are the Llama, Mistral, Qwen2 and Qwen3 families,
which differ only in the switches below. Others of them make it GPT-2, GPT-NeoX or Phi (layer norms,
GELU, biases, learned positions, layers side by side), or Gemma 1 to 3 (more norms, soft caps). With
`experts` the feed-forward layers of most blocks are many experts and a router (Mixtral, Qwen2-MoE,
Qwen3-MoE); with `latent` too, attention is that of DeepSeek-V2 and -V3.

FLOP convention (also of MFU): a matrix product of an (m, k) by a (k, n) matrix costs 2mkn; the
backward pass costs twice the forward; recompute, norms, softmax and element-wise work count as
nothing. Causal attention counts as half of the full square, a sliding window as the keys it leaves.
Of the experts those count that a token passes. Latent attention counts as it is trained, with the
keys and values of all heads written out.

This file holds no tensors (`paceline.models.decoder` does) and reads no `config.json`
(`paceline.config.huggingface` does).

Papers: Llama https://arxiv.org/abs/2302.13971, grouped-query attention
https://arxiv.org/abs/2305.13245, rotary positions https://arxiv.org/abs/2104.09864,
FLOP counting (PaLM, appendix B) https://arxiv.org/abs/2204.02311; those of experts and latent
attention stand in `paceline.config.layers`.
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.config.comm import Comm
from paceline.config.family import ModelFamily
from paceline.config.frozen import Layers, Ways, Width
from paceline.config.layers import Experts, LatentAttention, RopeScaling, require


def _default_head_dim(given: dict[str, Any]) -> int:
    # A field that failed its own check is absent from `given`, and is the one reported.
    latent = given.get("latent")
    return latent.head_dim if latent else given.get("hidden_size", 2) // given.get("num_heads", 1)


class Model(ModelFamily):
    """The shapes of a decoder network."""

    unit: ClassVar[Literal["tokens", "samples"]] = "tokens"
    knows_layers: ClassVar[bool] = True
    takes_text: ClassVar[bool] = True

    family: Literal["decoder"] = "decoder"
    """The kind of network."""
    vocab_size: Width
    """Number of token ids the embedding and the head know."""
    hidden_size: Width
    """Width of the residual stream."""
    ffn_size: Width
    """Inner width of a dense SwiGLU feed-forward layer."""
    num_layers: Layers
    """Number of blocks."""
    num_heads: Ways
    """Number of query heads."""
    latent: LatentAttention | None = None
    """How queries, keys and values come from narrow vectors; not at all by default."""
    num_kv_heads: Ways = Field(default_factory=lambda given: given.get("num_heads", 1))
    """Number of key and value heads (grouped-query attention); as many as num_heads by default."""
    head_dim: Width = Field(default_factory=_default_head_dim)
    """Width of a head's query and key; by default that of latent, or hidden_size / num_heads."""
    max_seq_len: Width
    """The longest sequence, in tokens."""
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """RMS norms, the same with weights that count from 1 (Gemma), or layer norms, which take the
    mean off too (GPT)."""
    norm_eps: float = Field(1e-5, gt=0, le=1)
    """Added to the mean square, or the variance, in every norm."""
    norm_bias: bool = True
    """Whether layer norms add a bias (not those of ModernBERT)."""
    residual: Literal["sequential", "parallel", "parallel_shared", "post_norm"] = "sequential"
    """Whether a block's second layer reads what the first one added to, or both the block's input:
    each after a norm of its own (GPT-NeoX), or both after one (Phi). post_norm: norms are of sums
    of a layer and its input, and there is no last one (BERT)."""
    embedding_norm: bool = False
    """Whether embeddings pass a norm; then, unless residual = "post_norm", the first block has none
    before its attention (BERT, ModernBERT)."""
    post_norms: bool = False
    """Whether what a layer gives passes a norm, too, before it is added (Gemma 2 and 3)."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Whether queries and keys turn with their positions, or each position has a vector that is
    added to the embedding (GPT-2)."""
    token_types: int = Field(0, ge=0, le=2**30)
    """Kinds of tokens, with a vector each that is added to the embedding. Here all tokens are of
    the first kind (BERT)."""
    rope_theta: float = Field(10000.0, gt=0, le=1e15)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are stretched; not at all by default."""
    window_rope_theta: float | None = Field(None, gt=0, le=1e15)
    """Base of the rotary frequencies of blocks with a sliding window, which aren't stretched; that
    of the others by default (Gemma 3)."""
    rotary_share: float = Field(1.0, gt=0, le=1)
    """Part of each head that turns, from its start (GPT-NeoX, Phi)."""
    sliding_window: Width | None = None
    """A query sees itself and the sliding_window - 1 tokens before it; all of them by default. With
    causal = false it sees half of the window on either side."""
    full_layers: tuple[int, ...] = Field((), strict=False)
    """Indices of the blocks that see all earlier tokens although sliding_window is set."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias (Qwen2)."""
    bias: bool = False
    """Whether every linear layer of a block adds a bias; beside layer norms, which have one."""
    head_bias: bool = False
    """Whether the head adds a bias (Phi)."""
    head_layer: bool = False
    """Whether a product, the activation and a norm stand before the head (BERT, ModernBERT)."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMS norm over head_dim before the rotation (Qwen3)."""
    score_width: Width | None = None
    """Scores of attention are divided by the root of it; head_dim by default (Gemma 2 and 3)."""
    sinks: bool = False
    """Whether each head learns a score that its softmax has beside those of keys, and that weighs
    nothing (gpt-oss)."""
    score_cap: float | None = Field(None, gt=0, le=1e6)
    """Scores of attention stay softly between it and its negative, as score_cap x tanh(score /
    score_cap); they are free by default (Gemma 2)."""
    logit_cap: float | None = Field(None, gt=0, le=1e6)
    """Logits likewise (Gemma 2)."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by the root of hidden_size (Gemma)."""
    experts: Experts | None = None
    """Experts instead of a dense feed-forward layer; none by default."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    init_std: float = Field(0.02, ge=0, le=1e3)
    """Standard deviation of the initial weights."""
    parametrization: Literal["mup"] | None = None
    """"mup": initial weights and learning rates that were right for a narrow network are for this
    one too (docs/optimizers.md)."""
    base_width: Width | None = None
    """hidden_size of that narrow network."""
    base_head_dim: Width | None = None
    """head_dim of that narrow network, where it isn't the same."""
    base_layers: Width | None = None
    """num_layers of that network: the learning rate is right for other depths, too; None: for other
    widths alone."""
    gated: bool = True
    """Whether feed-forward layers have a gate (SwiGLU), and three matrices; False: two (GPT)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = Field(
        default_factory=lambda given: "silu" if given.get("gated", True) else "gelu"
    )
    """The function of feed-forward layers, of the gate where there is one; by default silu with a
    gate and gelu without. gelu_tanh is GELU's approximation by tanh (GPT-2, Phi)."""
    causal: bool = True
    """Whether a token sees earlier ones only, and the next one is learnt; False: all of them, and
    masked ones are learnt (BERT)."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads = {self.num_heads} can't be shared out over num_kv_heads = "
            f"{self.num_kv_heads}; give a num_kv_heads that divides num_heads.",
        )
        require(
            "head_dim" in self.model_fields_set
            or self.latent is not None
            or self.hidden_size % self.num_heads == 0,
            f"hidden_size = {self.hidden_size} can't be split evenly over num_heads = "
            f"{self.num_heads}; change one of them or give head_dim.",
        )
        if self.latent is not None:
            self._latent_fits(self.latent)
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> Self:
        if self.positions == "learned":
            turning = [
                name
                for name in ("rope_theta", "rope_scaling", "rotary_share", "latent")
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            require(
                not turning,
                f'{" and ".join(turning)} can\'t take effect with positions = "learned", where '
                "nothing turns; leave it out.",
            )
        require(
            self.positions == "learned" or (self.rope_dim > 0 and self.rope_dim % 2 == 0),
            f"head_dim = {self.head_dim} is odd, and rotary positions turn pairs of numbers; "
            "give an even head_dim."
            if self.rotary_share == 1
            else f"rotary_share = {self.rotary_share:g} lets {self.rope_dim} numbers of a head "
            "turn, and rotary positions turn pairs; give one that lets an even number turn.",
        )
        return self

    @model_validator(mode="after")
    def _biases_fit(self) -> Self:
        require(
            not self.bias or not self.qkv_bias,
            "bias = true gives queries, keys and values a bias too; leave out qkv_bias.",
        )
        require(
            self.norm_bias or self.norm == "layer",
            'norm_bias = false has no effect on RMS norms; leave it out, or set norm = "layer".',
        )
        require(
            not self.embedding_norm or self.residual in ("sequential", "post_norm"),
            f'embedding_norm = true takes the place of a norm that residual = "{self.residual}" '
            "needs; leave it out.",
        )
        return self

    def _latent_fits(self, latent: LatentAttention) -> None:
        require(
            self.head_dim == latent.head_dim,
            f"head_dim = {self.head_dim} differs from nope_dim + rope_dim = {latent.head_dim} of "
            "latent; leave head_dim out.",
        )
        require(
            self.num_kv_heads == self.num_heads,
            f"num_kv_heads = {self.num_kv_heads} differs from num_heads = {self.num_heads}, and "
            "latent attention has a key per query head; leave num_kv_heads out.",
        )
        require(
            not (self.qkv_bias or self.bias or self.qk_norm or self.score_width or self.score_cap)
            and not self.sinks
            and self.rotary_share == 1
            and self.norm != "rms_plus_one",
            "latent attention has its own norms, scores and part that turns, and no biases; leave "
            "out qkv_bias, bias, qk_norm, score_width, score_cap, sinks, rotary_share and norm = "
            '"rms_plus_one".',
        )

    @model_validator(mode="after")
    def _parametrization_fits(self) -> Self:
        if self.parametrization is None:
            for name in ("base_width", "base_head_dim", "base_layers"):
                require(
                    getattr(self, name) is None,
                    f'{name} has no effect without parametrization = "mup"; leave it out.',
                )
            return self
        require(
            self.base_width is not None,
            'parametrization = "mup" needs base_width, the hidden_size that the learning rate was '
            "found for; give it.",
        )
        require(
            not self.tie_embeddings and self.latent is None,
            'parametrization = "mup" needs a head of its own and plain attention; leave out '
            "tie_embeddings and latent.",
        )
        require(
            self.base_head_dim is None or not self.qk_norm,
            "base_head_dim scales the scores of attention, and qk_norm sets their size; leave one "
            "of them out.",
        )
        require(
            self.base_layers is None or not (self.post_norms or self.residual == "post_norm"),
            "base_layers makes what a block adds smaller, and a norm after it sets its size; leave "
            'out base_layers, post_norms and residual = "post_norm".',
        )
        return self

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        require(
            self.sliding_window is not None or not self.full_layers,
            "full_layers can't take effect without a sliding_window; give one or remove it.",
        )
        require(
            self.window_rope_theta is None
            or (self.sliding_window is not None and self.positions == "rotary"),
            "window_rope_theta can't take effect without a sliding_window and rotary positions; "
            "remove it.",
        )
        self._block_indices("full_layers", self.full_layers)
        require(
            len(self.full_layers) < self.num_layers,
            "full_layers lists every block, so that sliding_window can't take effect; remove both.",
        )
        if self.experts is not None:
            dense = self.experts.dense_layers
            self._block_indices("experts.dense_layers", dense)
            require(
                len(dense) < self.num_layers,
                "experts.dense_layers lists every block, so that no block has experts; shorten it "
                "or remove experts.",
            )
        return self

    def _block_indices(self, name: str, indices: tuple[int, ...]) -> None:
        require(
            list(indices) == [i for i in range(self.num_layers) if i in indices],
            f"{name} = {list(indices)} must be increasing block indices from 0 to "
            f"{self.num_layers - 1}, each once; correct the list.",
        )

    @property
    def mixture(self) -> Experts | None:
        """See `ModelFamily.mixture`."""
        return self.experts

    @property
    def longest_sequence(self) -> int:
        """See `ModelFamily.longest_sequence`."""
        return self.max_seq_len

    def units_per_sample(self, seq_len: int) -> int:
        """Tokens of a sample."""
        return seq_len

    def batch_text(self, samples: int, seq_len: int) -> str:
        """See `ModelFamily.batch_text`."""
        return f"{samples} x {seq_len} tokens"

    def why_only_planned(self, comm: Comm) -> str | None:
        """See `ModelFamily.why_only_planned`."""
        if self.experts is not None and (self.activation != "silu" or not self.gated):
            return (
                "model.experts are SwiGLU: beside gated = false or another activation they can be "
                "planned, not trained yet."
            )
        return None

    @property
    def has_fused_attention(self) -> bool:
        """Whether torch has a kernel for the core of attention, which keeps no scores."""
        return self.score_cap is None

    @property
    def sees_later_tokens(self) -> bool:
        """See `ModelFamily.sees_later_tokens`."""
        return not self.causal

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a block in tokens, or None where it sees everything."""
        return None if layer in self.full_layers else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward layer of a block is one of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def rope_dim(self) -> int:
        """How many numbers of a head rotary positions turn."""
        if self.positions == "learned":
            return 0
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rotary_share)

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.v_dim

    @property
    def num_embedding_params(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_position_params(self) -> int:
        """Parameters of learned positions, and of kinds of tokens."""
        rows = self.max_seq_len if self.positions == "learned" else 0
        return (rows + self.token_types) * self.hidden_size

    @property
    def norm_params(self) -> int:
        """Parameters of one norm of the residual stream."""
        return self.hidden_size * (2 if self.norm == "layer" and self.norm_bias else 1)

    @property
    def num_end_norm_params(self) -> int:
        """Parameters of norms that are in no block: a last one, unless norms are of sums. Where
        embeddings pass one, either the first block has one less than others, or there is no last
        one."""
        has_any = self.residual != "post_norm" or self.embedding_norm
        return self.norm_params if has_any else 0

    @property
    def num_head_layer_params(self) -> int:
        """Parameters of the layer before the head."""
        matrix = self.hidden_size * (self.hidden_size + self.bias)
        return matrix + self.norm_params if self.head_layer else 0

    @property
    def num_block_norms(self) -> int:
        """Norms of the residual stream in one block."""
        return (1 if self.residual == "parallel_shared" else 2) + (2 if self.post_norms else 0)

    def num_block_matmul_params(self, layer: int) -> int:
        """Parameters of one block that a token meets in a matrix product."""
        return self._num_attention_matmul_params + self._num_ffn_matmul_params(layer)

    def num_block_params(self, layer: int) -> int:
        """All parameters of one block: matrices (of all experts), norms and biases."""
        norms = self.num_block_norms * self.norm_params
        norms += 2 * self.head_dim if self.qk_norm else 0
        if self.latent is not None:
            norms += (self.latent.q_rank or 0) + self.latent.kv_rank
        matrices = self.num_block_matmul_params(layer) + self._num_resting_params(layer)
        if self.experts is not None and self.has_experts(layer):
            matrices += self.experts.num_biases(self.hidden_size)
        return matrices + norms + self.num_column_biases(layer) + self.num_row_biases(layer)

    def num_column_biases(self, layer: int) -> int:
        """Biases of a block that belong to heads and inner columns, which tp splits, and sinks."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        inner = 0 if self.has_experts(layer) else (self._ffn_matrices - 1) * self.ffn_size
        biases = (heads if self.bias or self.qkv_bias else 0) + (inner if self.bias else 0)
        return biases + (self.num_heads if self.sinks else 0)

    def num_row_biases(self, layer: int) -> int:
        """Biases of a block that belong to the residual stream."""
        layers = 1 if self.has_experts(layer) else 2
        return layers * self.hidden_size if self.bias else 0

    @property
    def _num_attention_matmul_params(self) -> int:
        hidden, heads, latent = self.hidden_size, self.num_heads, self.latent
        if latent is None:
            return 2 * hidden * (heads + self.num_kv_heads) * self.head_dim
        query = heads * latent.head_dim
        queries = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
        keys_values = latent.kv_rank * heads * (latent.nope_dim + latent.v_dim)
        down = hidden * (latent.kv_rank + latent.rope_dim)
        return queries + down + keys_values + heads * latent.v_dim * hidden

    def _num_ffn_matmul_params(self, layer: int) -> int:
        experts = self.experts
        if experts is None or not self.has_experts(layer):
            return self._ffn_matrices * self.hidden_size * self.ffn_size
        passed = experts.experts_per_token * experts.ffn_size + experts.shared_ffn_size
        router = experts.num_experts + int(experts.shared_gate)
        return self.hidden_size * (self._ffn_matrices * passed + router)

    def _num_resting_params(self, layer: int) -> int:
        """Parameters of the experts that a token doesn't choose."""
        experts = self.experts
        if experts is None or not self.has_experts(layer):
            return 0
        resting = experts.num_experts - experts.experts_per_token
        return resting * self._ffn_matrices * self.hidden_size * experts.ffn_size

    @property
    def _ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def num_params(self) -> int:
        """All parameters of the network; a tied embedding counts once."""
        head = 0 if self.tie_embeddings else self.num_embedding_params
        head += self.vocab_size if self.head_bias else 0
        blocks = sum(map(self.num_block_params, range(self.num_layers)))
        head += self.num_head_layer_params + self.num_end_norm_params
        return blocks + self.num_embedding_params + self.num_position_params + head

    @property
    def num_matmul_params(self) -> int:
        """Parameters that cost 2 FLOPs per token forward: all matrices, the head also where tied.

        The input embedding is a look-up and counts as zero; of the experts those count that a token
        passes.
        """
        blocks = sum(map(self.num_block_matmul_params, range(self.num_layers)))
        layer = self.hidden_size**2 if self.head_layer else 0
        return blocks + self.num_embedding_params + layer

    def attention_flops_per_token(self, seq_len: int, causal: bool | None = None) -> float:
        """Forward FLOPs of all attention cores (scores and weighted values), mean per token.

        Args:
            seq_len: tokens in the sequence (the length of one document where they are packed).
            causal: count the keys a causal mask leaves (PaLM's formula counts the full square:
                pass False to compare with it); by default what the model does.
        """
        causal = self.causal if causal is None else causal
        keys = sum(
            mean_keys(seq_len, self.window(layer), causal) for layer in range(self.num_layers)
        )
        return 2 * self.num_heads * (self.head_dim + self.value_dim) * keys

    def forward_flops_per_token(self, seq_len: int, causal: bool | None = None) -> float:
        """FLOPs of the forward pass, mean per token: 2 per matmul parameter, plus attention.

        Arguments as in `attention_flops_per_token`; the convention stands at the top of this file.
        """
        return 2 * self.num_matmul_params + self.attention_flops_per_token(seq_len, causal)

    def train_flops_per_token(self, seq_len: int, causal: bool | None = None) -> float:
        """Model FLOPs of forward and backward, mean per token: three times the forward pass."""
        return 3 * self.forward_flops_per_token(seq_len, causal)

    def train_flops_per_unit(self, seq_len: int) -> float:
        """See `train_flops_per_token`."""
        return self.train_flops_per_token(seq_len)


def mean_keys(seq_len: int, window: int | None, causal: bool) -> float:
    """Keys one query sees, mean over a sequence, with the diagonal counted as half.

    Counting s²/2 visible pairs (not s(s+1)/2) is the usual "causal is half"; a window w < s leaves
    out a triangle of (s-w)²/2 pairs, so that w = s gives the causal half again.
    """
    span = min(window or seq_len, seq_len)
    if not causal:
        return span
    return span - span * span / (2 * seq_len)
