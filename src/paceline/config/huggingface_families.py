"""The `config.json` of families that differ from Llama in more than a switch: GPT-2, GPT-NeoX, Phi.

Each is a row of a table: which of its keys are fields of a Model as they stand, and which fields
all of its networks have. `paceline.config.huggingface` reads and writes by it.

Dropout is a setting of training, which there is none of here: what a `config.json` says of it is
passed over.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.config.model import Model

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
_WRITTEN_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}


class Family(NamedTuple):
    """One row."""

    architecture: str
    fields: dict[str, str]
    """Their keys, and the Model's fields that have the same values."""
    activation: str
    """Their key of the activation."""
    required: tuple[str, ...]
    """Keys that must be there."""
    defaults: dict[str, Any]
    """What an absent key means in transformers."""
    network: dict[str, Any]
    """Fields of a Model that all networks of the family have."""
    rotary: tuple[str, str] | None = None
    """Their keys of the rotary base and of the share of a head that turns; None: nothing turns."""
    only: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012
    """Features that the decoder doesn't have: the values that switch them off."""
    neutral: tuple[str, ...] = ()
    """Keys that don't change the network."""


_SHAPES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len",
}
_BESIDE = {
    "layer_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
_DEFAULTS = {"layer_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False}
_GPT = {"norm": "layer", "bias": True, "gated": False}

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_inner": "ffn_size",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_positions": "max_seq_len",
            "layer_norm_epsilon": "norm_eps",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tie_embeddings",
        },
        "activation_function",
        ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
        },
        {**_GPT, "positions": "learned"},
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        neutral=(
            *("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "reorder_and_upcast_attn"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "summary_first_dropout",
        ),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        _SHAPES | _BESIDE,
        "hidden_act",
        tuple(_SHAPES),
        {**_DEFAULTS, "hidden_act": "gelu", "rotary_pct": 0.25, "use_parallel_residual": True},
        _GPT,
        ("rotary_emb_base", "rotary_pct"),
        only={"attention_bias": (True,)},
        neutral=("attention_dropout", "hidden_dropout", "classifier_dropout", "is_decoder"),
    ),
    "phi": Family(
        "PhiForCausalLM",
        _SHAPES | _BESIDE | {"num_key_value_heads": "num_kv_heads"},
        "hidden_act",
        tuple(_SHAPES),
        {**_DEFAULTS, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        {**_GPT, "residual": "parallel_shared", "head_bias": True},
        ("rope_theta", "partial_rotary_factor"),
        only={"qk_layernorm": (False,)},
        neutral=("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
}
_PARALLEL = "use_parallel_residual"


def understood(family: Family) -> frozenset[str]:
    """All keys that a family is known to have."""
    rotary = (*family.rotary, "rope_scaling", "rope_parameters") if family.rotary else ()
    named = (family.activation, *family.fields, *family.defaults, *rotary, *family.neutral)
    return frozenset(named)


def fields_from_hf(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Read the fields of a Model, without rotary positions.

    Args:
        config: with the family's defaults filled in, and checked.
    """
    fields = {ours: config[theirs] for theirs, ours in family.fields.items() if theirs in config}
    given = str(config[family.activation])
    fields["activation"] = _ACTIVATIONS.get(given, given)
    if fields.get("ffn_size") is None:
        fields["ffn_size"] = 4 * fields["hidden_size"]
    if fields.get("num_kv_heads") is None:
        fields.pop("num_kv_heads", None)
    if _PARALLEL in family.defaults:
        fields["residual"] = "parallel" if config[_PARALLEL] else "sequential"
    return {**fields, **family.network}


def parts_to_hf(model: Model, family: Family) -> dict[str, Any]:
    """Write the keys of a family but for the scaling of rotary positions; what the family doesn't
    have is left out."""
    config = {theirs: getattr(model, ours) for theirs, ours in family.fields.items()}
    config[family.activation] = _WRITTEN_ACTIVATIONS[model.activation]
    if _PARALLEL in family.defaults:
        config[_PARALLEL] = model.residual == "parallel"
    if family.rotary:
        config |= dict(zip(family.rotary, (model.rope_theta, model.rotary_share), strict=True))
    return config
