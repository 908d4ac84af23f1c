"""Parts of the Model config that only some networks have: scaled rotary positions, latent
attention, experts.

Papers: YaRN https://arxiv.org/abs/2309.00071, latent attention (DeepSeek-V2)
https://arxiv.org/abs/2405.04434, experts https://arxiv.org/abs/2101.03961, their balance without a
loss https://arxiv.org/abs/2408.15664, all of it together (DeepSeek-V3)
https://arxiv.org/abs/2412.19437.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.frozen import FrozenConfig, Ways, Width

# What a kind of scaling requires, and what it may have besides.
_ROPE_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "llama3": (("low_freq_factor", "high_freq_factor", "original_max_seq_len"), ()),
    "yarn": (
        ("original_max_seq_len",),
        ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    ),
}


class RopeScaling(FrozenConfig):
    """How rotary frequencies are stretched beyond the context the model was first trained on."""

    rope_type: Literal["llama3", "linear", "yarn"]
    """llama3 and yarn slow only the low frequencies (Llama 3.1, DeepSeek); linear all of them."""
    factor: float = Field(ge=1, le=1e6)
    """By how much the context is stretched."""
    low_freq_factor: float | None = Field(None, gt=0, le=1e6)
    """llama3 only: wavelengths above original_max_seq_len / low_freq_factor are slowed fully."""
    high_freq_factor: float | None = Field(None, gt=0, le=1e6)
    """llama3 only: wavelengths below original_max_seq_len / high_freq_factor are left alone."""
    original_max_seq_len: Width | None = None
    """llama3 and yarn: the context length before stretching, in tokens."""
    beta_fast: float | None = Field(None, gt=0, le=1e6)
    """yarn only: what turns more often in the original context is left alone; 32 by default."""
    beta_slow: float | None = Field(None, gt=0, le=1e6)
    """yarn only: what turns less often in the original context is slowed fully; 1 by default."""
    truncate: Literal[False] | None = None
    """yarn only: false lets slowing begin and end between pairs, not at whole ones (gpt-oss)."""
    mscale: float | None = Field(None, ge=0, le=1e3)
    """yarn only: how much the rotated parts of queries and keys grow with log(factor)."""
    mscale_all_dim: float | None = Field(None, ge=0, le=1e3)
    """yarn only: how much of that is left to the scores of latent attention instead."""
    attention_factor: float | None = Field(None, gt=0, le=1e6)
    """yarn only: factor of the rotated parts, instead of the one that follows from mscale."""

    @model_validator(mode="after")
    def _has_its_own_settings(self) -> Self:
        required, optional = _ROPE_SETTINGS[self.rope_type]
        given = self.model_dump(exclude={"rope_type", "factor"}, exclude_none=True)
        foreign = [name for name in given if name not in required + optional]
        if foreign:
            raise ValueError(f"rope_type {self.rope_type} takes no {foreign[0]}; remove it.")
        lacking = [name for name in required if name not in given]
        if lacking:
            raise ValueError(f"rope_type {self.rope_type} requires {lacking[0]}; give it a value.")
        if self.low_freq_factor and self.high_freq_factor:
            require(
                self.high_freq_factor > self.low_freq_factor,
                f"high_freq_factor = {self.high_freq_factor} must be above "
                f"low_freq_factor = {self.low_freq_factor}; raise it.",
            )
        require(
            self.mscale is None or (bool(self.mscale_all_dim) and self.attention_factor is None),
            f"mscale = {self.mscale} has no effect without mscale_all_dim, or beside "
            "attention_factor; leave it out.",
        )
        return self

    @property
    def magnitude(self) -> float:
        """Factor of the rotated parts of queries and keys (of cos and sin)."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def latent_score_factor(self) -> float:
        """Factor of the scores of latent attention, which DeepSeek applies there alone."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


class LatentAttention(FrozenConfig):
    """Multi-head latent attention: keys and values come from one narrow vector per token."""

    q_rank: Width | None = None
    """Width of the vector that queries come from; none: they come from the residual stream."""
    kv_rank: Width
    """Width of the vector that keys and values come from."""
    nope_dim: Width
    """Width of the part of a head's query and key that is not rotated."""
    rope_dim: Annotated[Width, Field(multiple_of=2)]
    """Width of the rotated part, whose key is the same for all heads."""
    v_dim: Width
    """Width of a head's value."""
    interleaved: bool = True
    """Whether rotary positions turn neighbours (2i, 2i + 1), or pairs (i, i + rope_dim / 2)."""

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim


class Experts(FrozenConfig):
    """A feed-forward layer of many experts, of which each token chooses a few by its scores."""

    num_experts: Ways
    """Number of experts of a layer that tokens choose from."""
    experts_per_token: Ways
    """How many of them each token chooses."""
    ffn_size: Width
    """Inner width of one expert."""
    shared_ffn_size: int = Field(0, ge=0, le=2**30)
    """Inner width of the experts that every token passes, all together; 0: none."""
    shared_gate: bool = False
    """Whether a sigmoid gate weighs what the shared experts give (Qwen2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's outputs become scores: over all experts, or each for itself."""
    normalise: bool = True
    """Whether the scores of the chosen experts are divided by their sum to become weights."""
    scaling: float = Field(1.0, gt=0, le=1e6)
    """Factor of the weights."""
    bias: bool = False
    """Whether the router and the products of experts that tokens choose add biases (gpt-oss)."""
    gate_limit: float | None = Field(None, gt=0, le=1e6)
    """With gate and up as the two halves of SwiGLU, cut at gate_limit, and up at its negative too,
    an expert's inner values are (up + 1) x gate x sigmoid(1.702 gate) (gpt-oss); SwiGLU's by
    default."""
    num_groups: Ways = 1
    """Groups of experts that follow each other: a token chooses groups first, then experts."""
    groups_per_token: Ways = 1
    """Groups a token chooses by their best expert (softmax) or best two (sigmoid)."""
    choice_bias: bool = False
    """Whether a bias per expert is added to the scores for the choice, not for the weights."""
    bias_update_speed: float = Field(0.0, ge=0, le=1e3)
    """What a training step adds to the bias of an expert with less than the mean load, or takes."""
    balance_loss: float = Field(0.0, ge=0, le=1e3)
    """Factor of the loss that evens out the load: per sequence and layer, 1 when it is even."""
    dense_layers: tuple[int, ...] = Field((), strict=False)
    """Indices of the blocks that have a dense feed-forward layer instead."""

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        require(
            self.num_experts % self.num_groups == 0,
            f"num_experts = {self.num_experts} can't be cut into num_groups = {self.num_groups}; "
            "give a num_groups that divides it.",
        )
        require(
            self.groups_per_token <= self.num_groups,
            f"groups_per_token = {self.groups_per_token} is more than num_groups = "
            f"{self.num_groups}; lower it.",
        )
        choice = self.num_experts // self.num_groups * self.groups_per_token
        require(
            self.experts_per_token <= choice,
            f"experts_per_token = {self.experts_per_token} is more than the {choice} experts a "
            "token can choose from; lower it.",
        )
        require(
            self.num_groups == 1 or self.scores == "softmax" or self.num_experts > self.num_groups,
            f"num_groups = {self.num_groups} leaves one expert to a group, and sigmoid scores "
            "compare groups by their best two; lower it.",
        )
        require(
            self.choice_bias or not self.bias_update_speed,
            "bias_update_speed can't take effect without choice_bias; set it or remove the speed.",
        )
        require(
            self.shared_ffn_size > 0 or not self.shared_gate,
            "shared_gate can't take effect without shared experts; give shared_ffn_size.",
        )
        return self

    def num_biases(self, hidden_size: int) -> int:
        """Biases of the router and of all experts of a layer."""
        return self.num_experts * (1 + 2 * self.ffn_size + hidden_size) if self.bias else 0


def require(holds: bool, otherwise: str) -> None:
    """Refuse a setting of a config with a sentence, from within a validator."""
    if not holds:
        raise ValueError(otherwise)
