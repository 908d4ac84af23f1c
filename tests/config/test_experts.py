"""Experts and latent attention in the Model noun and in config.json: pure functions, no torch."""

import json

import pytest

from paceline.config.errors import InputError
from paceline.config.huggingface import from_hf, to_hf
from paceline.config.layers import RopeScaling
from paceline.config.model import Model

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_size": 160,
    "num_layers": 4,
    "num_heads": 4,
    "max_seq_len": 128,
}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "ffn_size": 24}
LATENT = {"kv_rank": 20, "nope_dim": 10, "rope_dim": 8, "v_dim": 12}
DEEPSEEK_V3_EXPERTS = {
    **EXPERTS,
    "shared_ffn_size": 48,
    "scores": "sigmoid",
    "choice_bias": True,
    "scaling": 2.5,
    "num_groups": 4,
    "groups_per_token": 2,
    "dense_layers": [0],
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# The relevant part of published config.json files, as transformers 4 wrote them.
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_1_5_MOE = {
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_30B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# Parameters, and those that a token meets.
PUBLISHED = {
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "Qwen1.5-MoE-A2.7B": (QWEN_1_5_MOE, 14_315_784_192),
    "Qwen3-30B-A3B": (QWEN_3_30B, 30_532_122_624),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_404_352),
}


def small(**changes):
    return Model.parse({**SMALL, **changes})


def sentence(call, *args):
    with pytest.raises(InputError) as caught:
        call(*args)
    return str(caught.value)


def test_what_follows_from_latent_attention():
    model = small(latent=LATENT, experts=EXPERTS)
    assert (model.head_dim, model.rope_dim, model.value_dim) == (18, 8, 12)
    assert model.num_kv_heads == 4
    plain = small(experts=EXPERTS)
    assert (plain.head_dim, plain.rope_dim, plain.value_dim) == (16, 16, 16)


def test_a_model_survives_its_serialised_form():
    model = small(latent=LATENT, experts=DEEPSEEK_V3_EXPERTS)
    raw = json.loads(json.dumps(model.model_dump(mode="json", exclude_none=True)))
    assert Model.parse(raw) == model
    assert hash(Model.parse(raw)) == hash(model)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_groups": 3}, "num_experts = 8 can't be cut into num_groups = 3"),
        ({"groups_per_token": 2}, "groups_per_token = 2 is more than num_groups = 1"),
        ({"experts_per_token": 9}, "experts_per_token = 9 is more than the 8 experts"),
        ({"num_groups": 4, "experts_per_token": 3}, "more than the 2 experts a token can choose"),
        ({"num_groups": 8, "scores": "sigmoid", "groups_per_token": 2}, "leaves one expert"),
        ({"bias_update_speed": 0.1}, "can't take effect without choice_bias"),
        ({"shared_gate": True}, "shared_gate can't take effect without shared experts"),
        ({"dense_layers": [4]}, "experts.dense_layers = [4] must be increasing block indices"),
        ({"dense_layers": [1, 0]}, "increasing block indices from 0 to 3"),
        ({"dense_layers": [0, 1, 2, 3]}, "lists every block, so that no block has experts"),
        ({"num_expert": 4}, "did you mean num_experts?"),
        ({"scores": "tanh"}, "experts.scores = 'tanh' can't be used"),
    ],
)
def test_wrong_experts_are_refused_in_a_sentence(changes, expected):
    assert expected in sentence(lambda: small(experts={**EXPERTS, **changes}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads = 2 differs from num_heads = 4"),
        ({"head_dim": 16}, "head_dim = 16 differs from nope_dim + rope_dim = 18"),
        ({"qk_norm": True}, "leave out qkv_bias, bias, qk_norm"),
        ({"latent": {**LATENT, "rope_dim": 7}}, "latent.rope_dim = 7"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "requires original_max_seq_len"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "no mscale"),
    ],
)
def test_wrong_latent_attention_is_refused_in_a_sentence(changes, expected):
    assert expected in sentence(lambda: small(**{"latent": LATENT, **changes}))


def test_magnitudes_of_yarn():
    """0.1 · mscale · log(factor) + 1: in the rotation, or in the scores of latent attention."""
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_seq_len": 4096}
    assert RopeScaling.parse(yarn).magnitude == pytest.approx(1.3688879)
    assert RopeScaling.parse(yarn).latent_score_factor == 1
    shared = RopeScaling.parse({**yarn, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert shared.magnitude == 1
    assert shared.latent_score_factor == pytest.approx(1.3688879**2)
    assert RopeScaling.parse({**yarn, "attention_factor": 1.5}).magnitude == 1.5


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    config, num_params = PUBLISHED[name]
    assert from_hf(config).num_params == num_params


def test_flops_of_a_published_model_by_hand():
    model = from_hf(DEEPSEEK_V3)
    attention = 7168 * 1536 + 1536 * 128 * 192  # queries
    attention += 7168 * (512 + 64) + 512 * 128 * (128 + 128)  # keys and values
    attention += 128 * 128 * 7168
    dense, sparse = 3 * 7168 * 18432, 3 * 7168 * 2048 * (8 + 1) + 7168 * 256
    matrices = 61 * attention + 3 * dense + 58 * sparse + 7168 * 129280
    assert model.num_matmul_params == matrices
    # Scores over 192 numbers, values over 128, half of 4096 keys.
    assert model.attention_flops_per_token(4096) == 61 * 2 * 128 * (192 + 128) * 2048
    assert model.train_flops_per_token(4096) == 3 * (
        2 * matrices + model.attention_flops_per_token(4096)
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_json_comes_back_with_the_same_settings(name):
    config, _ = PUBLISHED[name]
    written = json.loads(json.dumps(to_hf(from_hf(config))))
    assert from_hf(written) == from_hf(config)
    # Keys of training, of the present file format, and those that follow from others.
    unwritten = {"router_aux_loss_coef", "output_router_logits", "sliding_window", "rope_scaling"}
    unwritten |= {"auto_map", "ep_size", "moe_layer_freq", "num_nextn_predict_layers"}
    unwritten |= {"attention_bias", "max_window_layers"}
    same = config.keys() - unwritten
    assert {key: written[key] for key in same} == {key: config[key] for key in same}


ROUND_TRIPS = {
    "mixtral": {"experts": EXPERTS, "ffn_size": 24, "sliding_window": 8},
    "qwen2_moe": {
        "experts": {**EXPERTS, "shared_ffn_size": 40, "shared_gate": True, "dense_layers": [1, 3]},
        "qkv_bias": True,
        "sliding_window": 8,
        "full_layers": [1],
    },
    "qwen2_moe_without_bias": {
        "experts": {**EXPERTS, "shared_ffn_size": 40, "shared_gate": True, "normalise": False}
    },
    "qwen3_moe": {"experts": {**EXPERTS, "dense_layers": [0]}, "qk_norm": True, "head_dim": 24},
    "deepseek_v2": {
        "experts": {**EXPERTS, "normalise": False, "shared_ffn_size": 24, "scaling": 16.0},
        "latent": LATENT,
    },
    "deepseek_v3": {
        "experts": DEEPSEEK_V3_EXPERTS,
        "latent": {**LATENT, "q_rank": 24, "interleaved": False},
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_seq_len": 32,
            "mscale_all_dim": 0.7,
        },
    },
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_config_json_round_trip(name):
    model = small(**ROUND_TRIPS[name])
    written = json.loads(json.dumps(to_hf(model)))
    assert name.startswith(written["model_type"])
    assert from_hf(written) == model


def test_how_training_balances_is_not_in_a_config_json():
    trained = {**DEEPSEEK_V3_EXPERTS, "balance_loss": 1e-4, "bias_update_speed": 1e-3}
    model = small(**{**ROUND_TRIPS["deepseek_v3"], "experts": trained})
    assert from_hf(to_hf(model)) == small(**ROUND_TRIPS["deepseek_v3"])


def test_which_layers_are_dense():
    assert from_hf(DEEPSEEK_V3).experts.dense_layers == (0, 1, 2)
    listed = from_hf({**QWEN_3_30B, "mlp_only_layers": [5], "decoder_sparse_step": 2})
    assert listed.experts.dense_layers[:5] == (0, 2, 4, 5, 6)
    assert [listed.has_experts(layer) for layer in (0, 1, 5)] == [False, True, False]


def test_windows_of_each_family():
    slides = {"use_sliding_window": True, "sliding_window": 64}
    mixed = from_hf({**QWEN_1_5_MOE, **slides})  # every other one of the first 21 layers
    assert [mixed.window(layer) for layer in (0, 1, 20, 22)] == [64, None, 64, None]
    assert from_hf({**QWEN_3_30B, **slides}).full_layers == ()
    assert from_hf({**MIXTRAL_8X7B, "sliding_window": 64}).sliding_window == 64


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is a feature"),
        (MIXTRAL_8X7B, {"num_local_experts": None}, "num_experts is None"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "experts_per_token = 9 is more than"),
        (MIXTRAL_8X7B, {"n_group": 2}, "n_group = 2 is not a setting that mixtral"),
        (QWEN_3_30B, {"attention_bias": True}, "attention_bias = True"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is None"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_kv_heads = 8 differs"),
    ],
)
def test_a_config_json_that_cannot_be_honoured_is_refused(config, changes, expected):
    assert expected in sentence(from_hf, {**config, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"scores": "sigmoid"}),
        ("mixtral", {"choice_bias": True}),
        ("mixtral", {"scaling": 2.0}),
        ("mixtral", {"shared_ffn_size": 8}),
        ("mixtral", {"dense_layers": [0]}),
        ("mixtral", {"normalise": False}),
        ("qwen3_moe", {"shared_ffn_size": 8, "shared_gate": True}),
        ("deepseek_v2", {"normalise": True}),
        ("deepseek_v3", {"shared_ffn_size": 0}),
        ("deepseek_v3", {"shared_ffn_size": 25}),
        ("deepseek_v3", {"dense_layers": [1]}),
        ("deepseek_v3", {"choice_bias": False}),
    ],
)
def test_experts_without_a_family_cannot_be_written(name, changes):
    given = ROUND_TRIPS[name]
    model = small(**{**given, "experts": {**given["experts"], **changes}})
    assert "has no family in Hugging Face transformers" in sentence(to_hf, model)


def test_latent_attention_without_experts_cannot_be_written():
    assert "latent, but no experts" in sentence(to_hf, small(latent=LATENT))
