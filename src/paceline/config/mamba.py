"""Mamba-2 as a config: the shapes of a network of state space layers, its counts and its FLOPs.

A network is a stack of blocks (RMS norm, state space layer) between an embedding and a head; there
is no attention, and nothing turns with positions. Here are shapes, and what `config.json` of
transformers says of them; tensors are in `paceline.models.mamba`.

FLOP convention as in `paceline.config.model`, of the chunked form: pairs of tokens in a chunk, of
which half count, and the state that chunks hand on.

Paper: https://arxiv.org/abs/2405.21060
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.config.errors import InputError
from paceline.config.family import ModelFamily
from paceline.config.frozen import Layers, Ways, Width
from paceline.config.layers import require
from paceline.config.layout import Layout


class Mamba2(ModelFamily):
    """The shapes of a Mamba-2 network."""

    unit: ClassVar[Literal["tokens", "samples"]] = "tokens"
    takes_text: ClassVar[bool] = True

    family: Literal["mamba2"]
    vocab_size: Width
    """Number of token ids the embedding and the head know."""
    hidden_size: Width
    """Width of the residual stream."""
    num_layers: Layers
    """Number of blocks."""
    num_heads: Ways
    """Heads of a layer, each with a state of its own."""
    head_dim: Width = 64
    """Width of a head."""
    state_size: Width = 128
    """Numbers of a head's state for each number of its width."""
    num_groups: Ways = 1
    """Groups of heads that write to their states and read them alike."""
    conv_width: int = Field(4, ge=1, le=64)
    """Tokens that a layer's convolution sees: a token and those before it."""
    conv_bias: bool = True
    """Whether the convolution adds a bias."""
    bias: bool = False
    """Whether a layer's two products add a bias."""
    chunk_size: Width = 256
    """Tokens whose pairs are computed at once; the result is the same whatever it is."""
    max_seq_len: Width = 1 << 20
    """The longest sequence, in tokens."""
    norm_eps: float = Field(1e-5, gt=0, le=1)
    """Added to the mean square in every norm."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    init_std: float = Field(0.02, ge=0, le=1e3)
    """Standard deviation of the initial matrices."""
    min_step: float = Field(1e-3, gt=0, le=1e3)
    """The shortest step of time that a head begins with."""
    max_step: float = Field(0.1, gt=0, le=1e3)
    """The longest one."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        require(
            self.num_heads % self.num_groups == 0,
            f"num_heads = {self.num_heads} can't be shared out over num_groups = "
            f"{self.num_groups}; give a num_groups that divides num_heads.",
        )
        require(
            self.min_step <= self.max_step,
            f"min_step = {self.min_step:g} is above max_step = {self.max_step:g}; exchange them.",
        )
        return self

    @property
    def causal(self) -> bool:
        """A token sees earlier ones only."""
        return True

    @property
    def longest_sequence(self) -> int:
        """See `ModelFamily.longest_sequence`."""
        return self.max_seq_len

    @property
    def inner_size(self) -> int:
        """Width of all heads of a layer."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """What passes a layer's convolution: heads, and what writes to states and reads them."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def in_size(self) -> int:
        """What a layer's first product gives: gates, what passes the convolution, steps."""
        return self.inner_size + self.conv_size + self.num_heads

    @property
    def num_block_matmul_params(self) -> int:
        """Parameters of a block that a token meets in a matrix product."""
        return self.hidden_size * (self.in_size + self.inner_size)

    @property
    def num_params(self) -> int:
        """All parameters; a tied embedding counts once."""
        biases = self.in_size + self.hidden_size if self.bias else 0
        block = self.num_block_matmul_params + biases + 3 * self.num_heads
        block += self.conv_size * (self.conv_width + self.conv_bias)
        block += self.inner_size + self.hidden_size  # norms
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * block + tables + self.hidden_size

    def units_per_sample(self, seq_len: int) -> int:
        """Tokens of a sample."""
        return seq_len

    def batch_text(self, samples: int, seq_len: int) -> str:
        """See `ModelFamily.batch_text`."""
        return f"{samples} x {seq_len} tokens"

    def forward_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of the forward pass, mean per token."""
        seen = min(self.chunk_size, seq_len) / 2
        pairs = 2 * seen * (self.num_groups * self.state_size + self.inner_size)
        states = 4 * self.inner_size * self.state_size
        block = 2 * (self.num_block_matmul_params + self.conv_size * self.conv_width)
        head = 2 * self.vocab_size * self.hidden_size
        return self.num_layers * (block + pairs + states) + head

    def train_flops_per_unit(self, seq_len: int) -> float:
        """Three times the forward pass."""
        return 3 * self.forward_flops_per_token(seq_len)

    def layout_refusals(self, layout: Layout) -> Iterator[str]:
        """Layers are whole on each rank, or sharded between steps."""
        cut = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) != 1]
        for axis in cut:
            yield (
                f"layout.{axis} = {getattr(layout, axis)} cuts the network, and model.family = "
                '"mamba2" is trained on dp and fsdp: set it to 1.'
            )
        if not cut:
            yield from super().layout_refusals(layout)


# ---- config.json of transformers ----------------------------------------------------------------

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "state_size": "state_size",
    "n_groups": "num_groups",
    "conv_kernel": "conv_width",
    "use_conv_bias": "conv_bias",
    "use_bias": "bias",
    "chunk_size": "chunk_size",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
    "time_step_min": "min_step",
    "time_step_max": "max_step",
}
# What an absent key means in transformers.
_DEFAULTS = {
    "num_heads": 128,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "n_groups": 8,
    "initializer_range": 0.1,
}
_NO_LIMITS = (None, *([0.0, most] for most in (math.inf, "inf", "Infinity")), (0.0, math.inf))


def mamba2_from_hf(config: Mapping[str, Any]) -> Mamba2:
    """Read the shapes from the contents of a `config.json`.

    Raises:
        InputError: a value is wrong, or of a network that isn't trained here.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(
            f"config.json: hidden_act = {config['hidden_act']!r} is no activation of Mamba-2 here: "
            "choose a network with silu."
        )
    limit = config.get("time_step_limit")
    if limit not in _NO_LIMITS:
        raise InputError(
            f"config.json: time_step_limit = {limit!r} cuts steps off, which isn't done here: "
            "choose a network without it."
        )
    given = {**_DEFAULTS, **config}
    known = {ours: given[theirs] for theirs, ours in _FIELDS.items() if theirs in given}
    model = Mamba2.parse({"family": "mamba2", **known}, where="config.json")
    expand = config.get("expand", 2)
    if not isinstance(expand, int | float) or model.hidden_size * expand != model.inner_size:
        raise InputError(
            f"config.json: hidden_size = {model.hidden_size} by expand = {expand!r} differs from "
            f"num_heads x head_dim = {model.inner_size}: correct one of them."
        )
    return model


def mamba2_to_hf(model: Mamba2) -> dict[str, Any]:
    """The contents of a `config.json` that transformers opens.

    Raises:
        InputError: all heads together aren't a whole number of times as wide as the stream.
    """
    if model.inner_size % model.hidden_size:
        raise InputError(
            f"num_heads x head_dim = {model.inner_size} is no multiple of hidden_size = "
            f"{model.hidden_size}, which transformers needs: export another network."
        )
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **{theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()},
        "expand": model.inner_size // model.hidden_size,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
