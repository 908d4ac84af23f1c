"""The parts of a `config.json` that only networks with experts have.

Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3: which of their keys say what of
`Experts` and `LatentAttention`. `paceline.config.huggingface` reads and writes the rest.

How training evens out the load of the experts (losses, the speed of the bias) is no part of the
network: it is neither read from a `config.json` nor written to one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.config.errors import InputError
from paceline.config.layers import Experts, LatentAttention
from paceline.config.model import Model


class Family(NamedTuple):
    """The keys of a family besides those that dense networks have."""

    architecture: str
    defaults: dict[str, Any]
    """What an absent key means in transformers; keys without a default must be there."""
    required: tuple[str, ...]
    only: dict[str, tuple[Any, ...]]
    """Features that the decoder doesn't have: the values that switch them off."""
    neutral: tuple[str, ...] = ()
    """Keys that don't change the network."""


_TRAINING = ("router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size")
_LATENT = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "v_dim",
}
_QWEN = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_DEEPSEEK = (*_QWEN, *_LATENT)
_QWEN_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
# head_dim and qk_head_dim follow from the parts; prediction of further tokens is a part of its own,
# which transformers doesn't build either.
_DEEPSEEK_NEUTRAL = ("head_dim", "qk_head_dim", "num_nextn_predict_layers", "auto_map", *_TRAINING)

FAMILIES = {
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_key_value_heads": 8, "rope_theta": 1e6},
        ("num_experts", "num_experts_per_tok"),
        {"router_jitter_noise": (0, None)},
        _TRAINING,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**_QWEN_DEFAULTS, "num_key_value_heads": 16, "qkv_bias": True},
        (*_QWEN, "shared_expert_intermediate_size"),
        {},
        _TRAINING,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_QWEN_DEFAULTS, "num_key_value_heads": 4},
        _QWEN,
        {},
        (*_TRAINING, "max_window_layers"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": None,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
        },
        _DEEPSEEK,
        {"scoring_func": ("softmax",), "moe_layer_freq": (1,), "rope_interleave": (True,)},
        # transformers doesn't divide the weights by their sum whatever norm_topk_prob says.
        ("norm_topk_prob", *_DEEPSEEK_NEUTRAL),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": None,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "rope_interleave": True,
        },
        _DEEPSEEK,
        {"scoring_func": ("sigmoid",), "moe_layer_freq": (1,), "topk_method": ("noaux_tc",)},
        _DEEPSEEK_NEUTRAL,
    ),
}


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give the number of experts, which has a name in each family, that of Qwen."""
    renamed = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
    return {renamed.get(key, key): value for key, value in config.items()}


def understood(model_type: str) -> frozenset[str]:
    """The keys that a family has besides those of dense networks."""
    family = FAMILIES[model_type]
    return frozenset((*family.defaults, *family.required, *family.only, *family.neutral))


def check_required(config: Mapping[str, Any], model_type: str) -> None:
    """Refuse a canonical `config.json` that lacks what its family can't do without."""
    for key in FAMILIES[model_type].required:
        optional = key == "q_lora_rank" and key in config
        if not optional and not isinstance(config.get(key), int):
            given = repr(config[key]) if key in config else "missing"
            raise InputError(f"config.json: {key} is {given}; it must be an integer, so add it.")


def parts_from_hf(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Read the fields of a Model that only these families set, from a canonical `config.json`.

    Args:
        config: with the family's defaults filled in.
        model_type: the family.
    """
    chosen = {
        "num_experts": config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "ffn_size": config[
            "intermediate_size" if model_type == "mixtral" else "moe_intermediate_size"
        ],
    }
    if model_type.startswith("qwen"):
        chosen.update(_qwen(config))
    if not model_type.startswith("deepseek"):
        return {"experts": Experts.parse(chosen, where="config.json")}
    chosen.update(_deepseek(config, model_type))
    latent = {ours: config[theirs] for theirs, ours in _LATENT.items()}
    latent["interleaved"] = config.get("rope_interleave", True)
    return {
        "experts": Experts.parse(chosen, where="config.json"),
        "latent": LatentAttention.parse(latent, where="config.json"),
    }


def _qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    step, listed = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
    layers = range(config["num_hidden_layers"])
    shared = config.get("shared_expert_intermediate_size", 0)
    return {
        "normalise": config["norm_topk_prob"],
        "shared_ffn_size": shared,
        "shared_gate": shared > 0,
        "dense_layers": [i for i in layers if i in listed or (i + 1) % step],
    }


def _deepseek(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    is_v3 = model_type == "deepseek_v3"
    grouped = is_v3 or config["topk_method"] == "group_limited_greedy"
    if not is_v3 and config["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise InputError(
            f"config.json: topk_method = {config['topk_method']!r} is a choice of experts this "
            "decoder doesn't have; known are 'greedy' and 'group_limited_greedy'."
        )
    dense = min(config["first_k_dense_replace"], config["num_hidden_layers"])
    return {
        "scores": "sigmoid" if is_v3 else "softmax",
        "choice_bias": is_v3,
        "normalise": config["norm_topk_prob"] if is_v3 else False,
        "scaling": config["routed_scaling_factor"],
        "shared_ffn_size": config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
        "num_groups": config["n_group"] if grouped else 1,
        "groups_per_token": config["topk_group"] if grouped else 1,
        "dense_layers": list(range(dense)),
    }


def parts_to_hf(model: Model, model_type: str) -> dict[str, Any]:
    """Write what only networks with experts have; the keys of transformers 4 and 5."""
    experts = model.experts
    assert experts is not None
    config: dict[str, Any] = {"num_experts_per_tok": experts.experts_per_token}
    if model_type == "mixtral":
        sizes = {"intermediate_size": experts.ffn_size, "num_local_experts": experts.num_experts}
        return {**config, **sizes, "router_jitter_noise": 0.0}
    config["moe_intermediate_size"] = experts.ffn_size
    config["norm_topk_prob"] = experts.normalise
    if model_type.startswith("deepseek"):
        return {**config, **_deepseek_to_hf(model, experts, model_type)}
    config["num_experts"] = experts.num_experts
    config["decoder_sparse_step"] = 1
    config["mlp_only_layers"] = list(experts.dense_layers)
    if model_type == "qwen2_moe":
        config["shared_expert_intermediate_size"] = experts.shared_ffn_size
        config["qkv_bias"] = model.qkv_bias
    return config


def _deepseek_to_hf(model: Model, experts: Experts, model_type: str) -> dict[str, Any]:
    latent = model.latent
    assert latent is not None
    grouped = experts.num_groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {
        **{theirs: getattr(latent, ours) for theirs, ours in _LATENT.items()},
        "head_dim": latent.rope_dim,
        "rope_interleave": latent.interleaved,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_ffn_size // experts.ffn_size,
        "routed_scaling_factor": experts.scaling,
        "scoring_func": experts.scores,
        "topk_method": "noaux_tc" if model_type == "deepseek_v3" else method,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
        "first_k_dense_replace": len(experts.dense_layers),
        "num_nextn_predict_layers": 0,
    }


def expert_model_type(model: Model) -> str:
    """The family that has a model's combination of features.

    Raises:
        InputError: there is none.
    """
    experts = model.experts
    if experts is None:
        raise no_family("latent, but no experts,")
    if model.latent is not None:
        return _deepseek_type(model, experts)
    for name in ("choice_bias", "num_groups", "scaling", "scores"):
        if getattr(experts, name) != Experts.model_fields[name].default:
            raise no_family(f"experts.{name} = {getattr(experts, name)!r}, but no latent,")
    if experts.shared_gate and not model.qk_norm:
        return "qwen2_moe"
    if experts.shared_ffn_size or model.qkv_bias:
        raise no_family("experts and shared ones or qkv_bias, but not both a gate and no qk_norm,")
    if model.full_layers:
        raise no_family("experts and full_layers, but no gated shared experts,")
    if model.qk_norm:
        return "qwen3_moe"
    if experts.dense_layers or not experts.normalise:
        raise no_family("experts and dense_layers or normalise = false, but no qk_norm,")
    return "mixtral"


def _deepseek_type(model: Model, experts: Experts) -> str:
    is_v3 = experts.choice_bias
    dense = experts.dense_layers
    fits = {
        "a sliding_window": model.sliding_window is None,
        "no shared experts of whole experts' width": experts.shared_ffn_size > 0
        and experts.shared_ffn_size % experts.ffn_size == 0,
        "a gate of shared experts": not experts.shared_gate,
        "dense_layers that aren't the first ones": dense == tuple(range(len(dense))),
        "these scores, bias and weights": (experts.scores == "sigmoid") == is_v3
        and (is_v3 or not experts.normalise),
        "pairs that aren't neighbours": is_v3 or (model.latent is None or model.latent.interleaved),
    }
    for feature, holds in fits.items():
        if not holds:
            raise no_family(f"latent and {feature}")
    return "deepseek_v3" if is_v3 else "deepseek_v2"


def no_family(features: str) -> InputError:
    """The refusal to write a combination that transformers doesn't know."""
    return InputError(
        f"A model with {features} has no family in Hugging Face transformers, so that it can't be "
        "written as a config.json; change one of these features."
    )
