"""The `config.json` of families that differ from Llama in more than a switch: GPT-2, GPT-NeoX, Phi,
Gemma 1 to 3, gpt-oss, BERT and ModernBERT.

Each is a row of a table: which of its keys are fields of a Model as they stand, and which fields
all of its networks have. `paceline.config.huggingface` reads and writes by it.

Dropout is a setting of training, which there is none of here: what a `config.json` says of it is
passed over.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.config.layers import Experts
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
    rotary: tuple[str, str | None] | None = None
    """Their keys of the rotary base and of the share of a head that turns, if that isn't all; None:
    nothing turns."""
    window_pattern: int | None = None
    """Every so manyth block has no window unless `layer_types` says otherwise; None: windows are no
    part of the family."""
    window_key: str = "sliding_window"
    pattern_key: str = "sliding_window_pattern"
    pattern_from: int = 1
    """1: the last block of each pattern has no window; 0: the first one."""
    window_base: str | None = None
    """Their key of the rotary base of blocks with a window, where some have one."""
    has_nested_scaling: bool = False
    """Whether a scaling that isn't given by kinds of layers would be one of windows, too."""
    scaling: dict[str, Any] | None = None
    """How rotary frequencies are stretched where no key says so."""
    experts: dict[str, str] | None = None
    """Their keys, and fields of Experts that have the same values; None: there are no experts."""
    activation_names: dict[str, str] = _WRITTEN_ACTIVATIONS
    """How our activations are written."""
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
_GEMMA_FIELDS = {
    **_SHAPES,
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
_GEMMA = {"norm": "rms_plus_one", "scale_embeddings": True}
_GEMMA_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
_MASKED = {"causal": False, "embedding_norm": True, "head_layer": True}
_OF_POOLERS = (
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
)
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
        {
            **_DEFAULTS,
            "hidden_act": "gelu",
            "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
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
        {
            **_DEFAULTS,
            "hidden_act": "gelu_new",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        {**_GPT, "residual": "parallel_shared", "head_bias": True},
        ("rope_theta", "partial_rotary_factor"),
        only={"qk_layernorm": (False,)},
        neutral=("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA_FIELDS,
        "hidden_act",
        tuple(_SHAPES),
        {
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_theta": 10000.0,
        },
        _GEMMA,
        ("rope_theta", None),
        activation_names=_GEMMA_ACTIVATIONS,
        only={
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
            "hidden_activation": (None, "gelu_pytorch_tanh"),
        },
        neutral=("attention_dropout",),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA_FIELDS,
            "query_pre_attn_scalar": "score_width",
            "attn_logit_softcapping": "score_cap",
            "final_logit_softcapping": "logit_cap",
        },
        "hidden_activation",
        tuple(_SHAPES),
        {
            **_GEMMA_DEFAULTS,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rope_theta": 1e4,
            "sliding_window": 4096,
        },
        {**_GEMMA, "post_norms": True},
        ("rope_theta", None),
        window_pattern=2,
        activation_names=_GEMMA_ACTIVATIONS,
        only={"attention_bias": (False,), "use_bidirectional_attention": (None, False)},
        # What Gemma 2 first said, and transformers passes over.
        neutral=("attention_dropout", "layer_types", "cache_implementation", "hidden_act"),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA_FIELDS, "query_pre_attn_scalar": "score_width"},
        "hidden_activation",
        tuple(_SHAPES),
        {
            **_GEMMA_DEFAULTS,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
        },
        {**_GEMMA, "post_norms": True, "qk_norm": True},
        ("rope_theta", None),
        window_pattern=6,
        window_base="rope_local_base_freq",
        activation_names=_GEMMA_ACTIVATIONS,
        only={
            "attention_bias": (False,),
            "use_bidirectional_attention": (False, None),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
        },
        neutral=(
            *("attention_dropout", "layer_types", "cache_implementation"),
            *("sliding_window_pattern", "_sliding_window_pattern"),
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **_SHAPES,
            "num_key_value_heads": "num_kv_heads",
            "head_dim": "head_dim",
            "rms_norm_eps": "norm_eps",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tie_embeddings",
        },
        "hidden_act",
        (*_SHAPES, "num_local_experts", "num_experts_per_tok"),
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        {"norm": "rms", "bias": True, "sinks": True},
        ("rope_theta", None),
        window_pattern=2,
        scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts={
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "intermediate_size": "ffn_size",
            "swiglu_limit": "gate_limit",
        },
        only={
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "output_router_logits": (False,),
        },
        neutral=(
            *("attention_dropout", "layer_types", "router_aux_loss_coef"),
            *("experts_per_token", "initial_context_length", "num_experts"),
        ),
    ),
    "bert": Family(
        "BertForMaskedLM",
        {**_SHAPES, **_BESIDE, "type_vocab_size": "token_types"},
        "hidden_act",
        tuple(_SHAPES),
        {
            "layer_norm_eps": 1e-12,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
        },
        {**_GPT, **_MASKED, "residual": "post_norm", "positions": "learned", "head_bias": True},
        only={
            "tie_word_embeddings": (True,),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        neutral=(
            *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
            *("directionality", "gradient_checkpointing", *_OF_POOLERS),
        ),
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        {
            **_SHAPES,
            "norm_eps": "norm_eps",
            "norm_bias": "norm_bias",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tie_embeddings",
            "decoder_bias": "head_bias",
        },
        "hidden_activation",
        tuple(_SHAPES),
        {
            "norm_eps": 1e-5,
            "norm_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "decoder_bias": True,
            "hidden_activation": "gelu",
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        },
        {**_MASKED, "norm": "layer"},
        ("global_rope_theta", None),
        window_pattern=3,
        window_key="local_attention",
        pattern_key="global_attn_every_n_layers",
        pattern_from=0,
        window_base="local_rope_theta",
        has_nested_scaling=True,
        only={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "classifier_bias": (False,),
            "classifier_activation": ("gelu",),
        },
        neutral=(
            *("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"),
            *("classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor"),
            *("reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
            *("sparse_prediction", "layer_types", "global_attn_every_n_layers", "cls_token_id"),
            *("sep_token_id", "position_embedding_type", "layer_norm_eps"),
            "gradient_checkpointing",
        ),
    ),
}
_PARALLEL = "use_parallel_residual"


def understood(family: Family) -> frozenset[str]:
    """All keys that a family is known to have."""
    rotary = (*family.rotary, "rope_scaling", "rope_parameters") if family.rotary else ()
    named = (family.activation, *family.fields, *family.defaults, *rotary, *family.neutral)
    named += (*(family.experts or ()),)
    return frozenset(named)


def fields_from_hf(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Read the fields of a Model, without rotary positions.

    Args:
        config: with the family's defaults filled in, and checked.
    """
    fields = {ours: config[theirs] for theirs, ours in family.fields.items() if theirs in config}
    given = str(config[family.activation])
    fields["activation"] = _ACTIVATIONS.get(given, given)
    if family.network.get("scale_embeddings") and given == "gelu":
        fields["activation"] = "gelu_tanh"  # what the first Gemma says, and doesn't mean
    if fields.get("ffn_size") is None:
        fields["ffn_size"] = 4 * fields["hidden_size"]
    if fields.get("num_kv_heads") is None:
        fields.pop("num_kv_heads", None)
    if family.experts is not None:
        own = {ours: config[theirs] for theirs, ours in family.experts.items()}
        fields["experts"] = Experts.parse({**own, "bias": True}, where="config.json")
    if _PARALLEL in family.defaults:
        fields["residual"] = "parallel" if config[_PARALLEL] else "sequential"
    return {**fields, **family.network}


def parts_to_hf(model: Model, family: Family) -> dict[str, Any]:
    """Write the keys of a family but for the scaling of rotary positions; what the family doesn't
    have is left out."""
    config = {theirs: getattr(model, ours) for theirs, ours in family.fields.items()}
    if family.experts is not None and model.experts is not None:
        config |= {theirs: getattr(model.experts, ours) for theirs, ours in family.experts.items()}
    config[family.activation] = family.activation_names.get(model.activation)
    if _PARALLEL in family.defaults:
        config[_PARALLEL] = model.residual == "parallel"
    if family.rotary:
        base, share = family.rotary
        config[base] = model.rope_theta
        config |= {} if share is None else {share: model.rotary_share}
    return config
