"""Models to and from the `config.json` of Hugging Face transformers.

Reads and writes the Llama, Mistral, Qwen2 and Qwen3 families, those with experts
(`huggingface_experts`) and those that are less like Llama (`huggingface_families`), in the form of
transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). Every key is either
translated, known not to change the network, or refused: a feature that the decoder can't honour is
an error, never ignored. It holds no weights: those are `paceline.models.weights`.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.config import huggingface_experts, huggingface_families
from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.huggingface_experts import expert_model_type, no_family
from paceline.config.layers import RopeScaling
from paceline.config.model import Model

# Names of transformers on the left, ours on the right.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
_SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# What an absent key means: the defaults of the configuration classes in transformers, where they
# are not ours. The shapes above have none: a config.json without them is incomplete.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    **{name: family.defaults for name, family in huggingface_experts.FAMILIES.items()},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **{name: family.architecture for name, family in huggingface_experts.FAMILIES.items()},
}
# Features this decoder doesn't have: the values that switch them off.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
}
# Keys that don't change what the network computes in training. pad_token_id only stops the padding
# row of the embedding from learning, and packed sequences hold no padding.
_NEUTRAL = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_llama_config",
        "label2id",
        "max_sequence_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_LIKE_LLAMA = {
    name: Model.model_fields[name].default
    for name in (
        *("norm", "residual", "post_norms", "positions", "rotary_share", "window_rope_theta"),
        *("score_width", "scale_embeddings", "bias", "head_bias", "gated", "causal"),
        *("score_cap", "logit_cap", "sinks"),
        *("norm_bias", "embedding_norm", "token_types", "head_layer"),
    )
} | {"activation": "silu"}
_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_QWEN_WINDOWS = frozenset(
    {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
)
_WINDOWS = {
    "llama": frozenset[str](),
    "mistral": frozenset({"sliding_window"}),
    "qwen2": _QWEN_WINDOWS,
    "qwen3": _QWEN_WINDOWS,
    "mixtral": frozenset({"sliding_window"}),
    "qwen2_moe": _QWEN_WINDOWS,
    "qwen3_moe": frozenset({"sliding_window", "use_sliding_window"}),
    "deepseek_v2": frozenset[str](),
    "deepseek_v3": frozenset[str](),
}


def from_hf(config: Mapping[str, Any]) -> Model:
    """Read a Model from the contents of a Hugging Face `config.json`.

    Keys that don't change the network (token ids, dtype) are passed over.

    Raises:
        InputError: the model_type is unknown, or a setting is one the decoder can't honour.
    """
    model_type = str(config.get("model_type"))
    if model_type in huggingface_families.FAMILIES:
        return _of_family(config, model_type)
    if model_type not in _DEFAULTS:
        known_types = [*_DEFAULTS, *huggingface_families.FAMILIES]
        raise InputError(
            f"config.json: model_type = {model_type!r} is not a network this decoder can be"
            f"{nearest(model_type, known_types)}"
        )
    _check_shapes(config, _SHAPES)
    has_experts = model_type in huggingface_experts.FAMILIES
    given = huggingface_experts.canonical(config) if has_experts else config
    if has_experts:
        huggingface_experts.check_required(given, model_type)
    known = {**_DEFAULTS[model_type], **given}
    _refuse_unsupported(known, model_type)
    fields = {ours: known[theirs] for theirs, ours in _FIELDS.items() if theirs in known}
    if has_experts:
        fields.update(huggingface_experts.parts_from_hf(known, model_type))
    if fields.get("num_kv_heads") is None:
        fields.pop("num_kv_heads", None)
    if fields.get("head_dim") is None or "latent" in fields:
        fields.pop("head_dim", None)
    fields["rope_theta"], fields["rope_scaling"] = _rope_from_hf(known)
    fields["sliding_window"], fields["full_layers"] = _windows_from_hf(known)
    fields["qkv_bias"] = model_type == "qwen2" or known.get("qkv_bias", False)
    fields["qk_norm"] = model_type in ("qwen3", "qwen3_moe")
    return Model.parse(fields, where="config.json")


def _of_family(config: Mapping[str, Any], model_type: str) -> Model:
    """Read a Model of one of `huggingface_families`."""
    family = huggingface_families.FAMILIES[model_type]
    _check_shapes(config, family.required)
    known = {**family.defaults, **config}
    keys = huggingface_families.understood(family)
    others = {key: values for key, values in _ONLY.items() if key not in keys}
    _refuse(known, model_type, keys | _NEUTRAL, {**others, **family.only})
    fields = huggingface_families.fields_from_hf(known, family)
    if family.rotary is not None:
        base, share = family.rotary
        forms = _rope_forms(known)
        if not forms and family.scaling is not None:
            forms = {"rope_parameters": dict(family.scaling)}
        if family.window_pattern is not None:
            fields |= _family_windows(known, forms, family)
        if share is not None:
            shares = [form.pop("partial_rotary_factor", None) for form in forms.values()]
            given = (each for each in shares if each is not None)
            fields["rotary_share"] = next(given, known[share])
        fields["rope_theta"], fields["rope_scaling"] = _rope_from_hf(
            {**forms, "rope_theta": known[base]}
        )
    return Model.parse(fields, where="config.json")


def _family_windows(
    config: Mapping[str, Any], forms: dict[str, dict[str, Any]], family: huggingface_families.Family
) -> dict[str, Any]:
    """Read the windows of a family, and where they have rotary frequencies of their own, these.

    Args:
        forms: see `_rope_forms`; one that has parts for each kind of layer becomes that of the
            layers without a window.
    """
    of_window = None if family.window_base is None else config[family.window_base]
    for key, form in forms.items():
        full = form.get("full_attention") if family.window_base else None
        if isinstance(full, Mapping):
            part = form.get("sliding_attention")
            own = dict(part) if isinstance(part, Mapping) else {}
            of_window = own.pop("rope_theta", of_window)
            if own.pop("rope_type", "default") != "default" or own:
                raise InputError(
                    f"config.json: {key}.sliding_attention = {part!r} stretches the frequencies of "
                    "windows, which this decoder doesn't do; choose another model."
                )
            forms[key] = dict(full)
    num_layers = config["num_hidden_layers"]
    pattern = config.get(family.pattern_key, family.window_pattern)
    if not isinstance(pattern, int) or pattern < 1:
        raise InputError(
            f"config.json: {family.pattern_key} = {pattern!r} must be an integer above 0: every "
            "so manyth layer has no window; correct it."
        )
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + family.pattern_from) % pattern else "full_attention"
        for layer in range(num_layers)
    ]
    _check_layer_types(kinds, num_layers, config[family.window_key])
    full_layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full_layers) == num_layers:
        return {}
    return {
        "sliding_window": config[family.window_key],
        "full_layers": full_layers,
        "window_rope_theta": of_window,
    }


def to_hf(model: Model) -> dict[str, Any]:
    """Write a Model as the contents of a `config.json` that transformers 4 and 5 both open.

    `from_hf(to_hf(model)) == model`. Rotary settings stand in the form of transformers 4, which 5
    also reads; windows in some layers only are honoured from transformers 4.53 on. Token ids are
    null, because a Model doesn't know the tokenizer. The network counts, not its label: a Mistral
    without a window comes back as the equal Llama, and how training evens out the load of experts
    doesn't come back.

    Raises:
        InputError: no family in transformers has this combination of features.
    """
    model_type = model_type_of(model)
    if model_type in huggingface_families.FAMILIES:
        return _family_to_hf(model, model_type)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_to_hf(model.rope_scaling),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if model.experts is not None:
        config.update(huggingface_experts.parts_to_hf(model, model_type))
    config.update(_windows_to_hf(model, model_type))
    return config


def _family_to_hf(model: Model, model_type: str) -> dict[str, Any]:
    """Write a Model as one of `huggingface_families`, whether or not it is one."""
    family = huggingface_families.FAMILIES[model_type]
    scaling: dict[str, Any] = {}
    if family.rotary is not None:
        plain = None if family.scaling is None else {"rope_type": "default"}
        scaling["rope_scaling"] = _rope_to_hf(model.rope_scaling) or plain
    if family.window_pattern is not None:
        slides = [model.window(layer) is not None for layer in range(model.num_layers)]
        scaling["layer_types"] = [f"{'sliding' if slid else 'full'}_attention" for slid in slides]
        # A family that always has one: where no layer is of that kind, it has no effect.
        default = family.defaults[family.window_key]
        scaling[family.window_key] = model.sliding_window or default
    if family.window_base is not None:
        base = family.defaults[family.window_base]
        scaling[family.window_base] = model.window_rope_theta or base
        if family.has_nested_scaling and model.rope_scaling is not None:
            turned = {"rope_theta": model.rope_theta, **scaling.pop("rope_scaling")}
            still = {"rope_type": "default", "rope_theta": scaling[family.window_base]}
            scaling["rope_parameters"] = {"full_attention": turned, "sliding_attention": still}
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        **huggingface_families.parts_to_hf(model, family),
        **scaling,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _check_shapes(config: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if not isinstance(config.get(key), int):
            given = repr(config[key]) if key in config else "missing"
            raise InputError(f"config.json: {key} is {given}; it must be an integer, so add it.")


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    understood = frozenset(_FIELDS) | _NEUTRAL | _ROPE | _WINDOWS[model_type]
    only = _ONLY
    if model_type in huggingface_experts.FAMILIES:
        understood = understood | huggingface_experts.understood(model_type)
        only = {key: values for key, values in _ONLY.items() if key not in understood}
        only = {**only, **huggingface_experts.FAMILIES[model_type].only}
    if config.get("output_router_logits"):
        raise InputError(
            "config.json: output_router_logits = true makes transformers add a loss of its own; "
            "set it to false, and model.experts.balance_loss for the one here."
        )
    _refuse(config, model_type, understood, only)


def _refuse(
    config: Mapping[str, Any],
    model_type: str,
    understood: frozenset[str],
    only: Mapping[str, tuple[Any, ...]],
) -> None:
    """Refuse features that the decoder doesn't have, and keys that nobody knows."""
    for key, value in config.items():
        if key in only and value not in only[key]:
            raise InputError(
                f"config.json: {key} = {value!r} is a feature this decoder doesn't have; only "
                f"{only[key][0]!r} can be trained, so choose another model."
            )
        if key not in understood and key not in only and not key.startswith("_"):
            raise InputError(
                f"config.json: {key} = {value!r} is not a setting that {model_type} is known to "
                "have; remove the key if the network doesn't depend on it."
            )


def _rope_forms(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Copies of the settings of rotary positions, in whichever form they stand."""
    forms = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, form in forms.items():
        if not isinstance(form, Mapping):
            raise InputError(f"config.json: {key} is {form!r}; it must be an object or null.")
    return {key: dict(form) for key, form in forms.items()}


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    forms = list(_rope_forms(config).values())
    if len(forms) > 1:
        raise InputError(
            "config.json: rope_scaling and rope_parameters are both given, and they are two forms "
            "of one setting; remove one."
        )
    settings = forms[0] if forms else {}
    theta = settings.pop("rope_theta", config.get("rope_theta", 10000.0))
    legacy_type = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", legacy_type)
    if settings.get("partial_rotary_factor") == 1:
        del settings["partial_rotary_factor"]
    if rope_type == "default" and not settings:
        return theta, None
    if rope_type not in ("llama3", "linear", "yarn"):
        raise InputError(
            f"config.json: rope_type = {rope_type!r} with {sorted(settings)} can't be honoured; "
            "known are default (without further settings), linear, llama3 and yarn."
        )
    if settings.get("truncate") is True:  # the default, and all that there is here
        del settings["truncate"]
    if "original_max_position_embeddings" in settings:
        settings["original_max_seq_len"] = settings.pop("original_max_position_embeddings")
    given = {name: value for name, value in settings.items() if value is not None}
    raw = {"rope_type": rope_type, **given}
    return theta, RopeScaling.parse(raw, where="config.json: rope_scaling")


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    settings = scaling.model_dump(exclude_none=True)
    if "original_max_seq_len" in settings:
        settings["original_max_position_embeddings"] = settings.pop("original_max_seq_len")
    return settings


def _windows_from_hf(config: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    model_type = config["model_type"]
    if not model_type.startswith("qwen"):
        return window, ()
    if not config.get("use_sliding_window", False):
        window = None
    if model_type == "qwen3_moe":
        return window, ()
    slides = _default_slides(model_type, num_layers, config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "sliding_attention" if window is not None and slid else "full_attention" for slid in slides
    ]
    _check_layer_types(kinds, num_layers, window)
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return (None, ()) if len(full) == num_layers else (window, full)


def _default_slides(model_type: str, num_layers: int, limit: int) -> list[bool]:
    """Which layers slide where layer_types doesn't say: the last ones, or (MoE) half of the first.

    As in the configuration classes of transformers.
    """
    if model_type == "qwen2_moe":
        return [i < limit and i % 2 == 0 for i in range(num_layers)]
    return [i >= limit for i in range(num_layers)]


def _check_layer_types(kinds: list[str], num_layers: int, window: int | None) -> None:
    allowed = {"full_attention", *(["sliding_attention"] if window is not None else [])}
    kinds = kinds if isinstance(kinds, list) else [str(kinds)]
    unknown = [kind for kind in kinds if kind not in allowed]
    if unknown or len(kinds) != num_layers:
        given = f"the kind {unknown[0]!r}" if unknown else f"{len(kinds)} kinds"
        raise InputError(
            f"config.json: layer_types holds {given}; it needs one of {sorted(allowed)} for each "
            f"of the {num_layers} layers (sliding_attention also needs use_sliding_window and "
            "sliding_window), so correct the list."
        )


def _windows_to_hf(model: Model, model_type: str) -> dict[str, Any]:
    if model_type in ("mistral", "mixtral"):
        return {"sliding_window": model.sliding_window}
    if not model_type.startswith("qwen"):
        return {}
    config: dict[str, Any] = {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
    }
    if model_type == "qwen3_moe":
        return config
    slides = [model.window(layer) is not None for layer in range(model.num_layers)]
    # transformers before 4.53 has no layer_types and reads "slides from this layer on".
    config["max_window_layers"] = slides.index(True) if True in slides else model.num_layers
    config["layer_types"] = [f"{'sliding' if slid else 'full'}_attention" for slid in slides]
    return config


def model_type_of(model: Model) -> str:
    """The family whose network a Model is.

    Raises:
        InputError: no family in transformers has this combination of features.
    """
    if not is_like_llama(model):
        return _other_type(model)
    if model.experts is not None or model.latent is not None:
        return expert_model_type(model)
    if model.qkv_bias and model.qk_norm:
        raise no_family("both qkv_bias and qk_norm")
    if model.qkv_bias or model.qk_norm:
        return "qwen2" if model.qkv_bias else "qwen3"
    if model.full_layers:
        raise no_family("full_layers, but neither qkv_bias nor qk_norm,")
    # LlamaConfig requires heads that divide hidden_size; Mistral is the same network without.
    fits_llama = model.sliding_window is None and model.hidden_size % model.num_heads == 0
    return "llama" if fits_llama else "mistral"


def is_like_llama(model: Model) -> bool:
    """Whether blocks are those of Llama, or the same with experts, latent attention, windows, norms
    of heads, or biases of queries, keys and values."""
    return all(getattr(model, name) == value for name, value in _LIKE_LLAMA.items())


def _other_type(model: Model) -> str:
    """The one of `huggingface_families` that reads a Model as it was written."""
    if model.experts is not None:  # how training evens out their load is no part of the network
        model = model.replace(experts=model.experts.replace(balance_loss=0.0))
    for model_type, family in huggingface_families.FAMILIES.items():
        fits = all(getattr(model, name) == value for name, value in family.network.items())
        with suppress(InputError):
            if fits and _of_family(_family_to_hf(model, model_type), model_type) == model:
                return model_type
    switches = [
        f"{name} = {getattr(model, name)!r}"
        for name, value in _LIKE_LLAMA.items()
        if getattr(model, name) != value
    ]
    raise no_family(f"{', '.join(switches)} and its other features")
