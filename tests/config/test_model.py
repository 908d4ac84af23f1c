"""The Model noun and its config.json form: pure functions, no torch."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_seq_len": 64,
}
# The relevant part of published config.json files, as transformers 4 wrote them.
LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_2_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_2_5_0_5B = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_0_6B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "Llama-2-7B": (LLAMA_2_7B, 6_738_415_616),
    "Llama-3.2-1B": (LLAMA_3_2_1B, 1_235_814_400),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Qwen2.5-0.5B": (QWEN_2_5_0_5B, 494_032_768),
    "Qwen3-0.6B": (QWEN_3_0_6B, 596_049_920),
}


def small(**changes):
    return Model.parse({**SMALL, **changes})


def sentence(call, *args):
    with pytest.raises(InputError) as caught:
        call(*args)
    return str(caught.value)


def test_what_is_not_given_follows_from_what_is():
    model = small()
    assert (model.num_kv_heads, model.head_dim, model.family) == (4, 16, "decoder")
    assert small(num_kv_heads=2, head_dim=24).replace(num_layers=2).head_dim == 24


def test_a_model_survives_its_serialised_form():
    model = small(rope_scaling=LLAMA3, sliding_window=8, full_layers=[0, 2])
    raw = json.loads(json.dumps(model.model_dump(mode="json", exclude_none=True)))
    assert Model.parse(raw) == model
    assert hash(Model.parse(raw)) == hash(model)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads = 3; give a num_kv_heads that divides num_heads"),
        ({"num_heads": 3}, "hidden_size = 64 can't be split evenly over num_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"full_layers": [0]}, "full_layers can't take effect without a sliding_window"),
        ({"sliding_window": 8, "full_layers": [4]}, "block indices from 0 to 3"),
        ({"sliding_window": 8, "full_layers": [1, 0]}, "increasing block indices"),
        ({"sliding_window": 8, "full_layers": [1, 1]}, "each once"),
        ({"sliding_window": 8, "full_layers": [0, 1, 2, 3]}, "lists every block"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"num_layers": 0}, "num_layers = 0"),
        ({"num_heads": 0}, "num_heads = 0"),
        ({"hiden_size": 64}, "did you mean hidden_size?"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'llama3', 'linear' or 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "requires low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "rope_type": "linear"}}, "takes no low_freq_factor"),
        ({"rotary_share": 0.2}, "rotary_share = 0.2 lets 3 numbers of a head turn"),
        ({"positions": "learned", "rope_theta": 5e5}, "rope_theta can't take effect"),
        ({"bias": True, "qkv_bias": True}, "leave out qkv_bias"),
        ({"norm_bias": False}, "norm_bias = false has no effect on RMS norms"),
        ({"embedding_norm": True, "residual": "parallel"}, "takes the place of a norm that"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above low_freq_factor"),
    ],
)
def test_wrong_shapes_are_refused_in_a_sentence(changes, expected):
    assert expected in sentence(lambda: small(**changes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    config, num_params = PUBLISHED[name]
    assert from_hf(config).num_params == num_params


def test_flops_of_a_published_model_by_hand():
    model = from_hf(LLAMA_2_7B)
    # 32 layers of 4 · 4096² + 3 · 4096 · 11008, and a head of 4096 · 32000.
    assert model.num_matmul_params == 6_607_077_376
    # Scores and values: 2 products of 2 · 4096 · keys FLOPs, over half of 4096 keys, 32 layers.
    assert model.attention_flops_per_token(4096) == 32 * 2 * 2 * 4096 * 2048
    assert model.train_flops_per_token(4096, causal=False) == 3 * (
        2 * 6_607_077_376 + 32 * 2 * 2 * 4096 * 4096
    )


@given(seq_len=st.integers(1, 200), window=st.integers(1, 250))
def test_a_sliding_window_counts_the_keys_it_leaves(seq_len, window):
    """Against counting pairs one by one; those on both edges of the band count as half."""
    pairs = sum(
        0.5 if distance in (0, window) else 1.0
        for query in range(seq_len)
        for distance in range(min(window, query) + 1)
    )
    model = small(sliding_window=window)
    per_key = 4 * model.num_heads * model.head_dim * model.num_layers
    found = model.attention_flops_per_token(seq_len) * seq_len / per_key
    assert found == pytest.approx(pairs)


def test_only_the_sliding_blocks_count_a_window():
    both = small(sliding_window=16, full_layers=[1, 3]).attention_flops_per_token(128)
    full = small().attention_flops_per_token(128)
    sliding = small(sliding_window=16).attention_flops_per_token(128)
    assert both == (full + sliding) / 2
    assert small(sliding_window=128).attention_flops_per_token(128) == full


EVERY_FAMILY = [
    {},
    {"num_kv_heads": 2, "rope_scaling": LLAMA3, "rope_theta": 5e5, "tie_embeddings": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"sliding_window": 8},
    {"num_heads": 6, "head_dim": 8},
    {"qkv_bias": True, "norm_eps": 1e-6},
    {"qkv_bias": True, "sliding_window": 8, "full_layers": [0, 1]},
    {"qkv_bias": True, "sliding_window": 8, "full_layers": [1, 3]},
    {"qk_norm": True, "head_dim": 32, "init_std": 0.01},
]


@pytest.mark.parametrize("changes", EVERY_FAMILY)
def test_config_json_round_trip(changes):
    model = small(**changes)
    assert from_hf(json.loads(json.dumps(to_hf(model)))) == model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_json_comes_back_with_the_same_settings(name):
    config, _ = PUBLISHED[name]
    written = to_hf(from_hf(config))
    for key in ("torch_dtype", "pretraining_tp", "use_cache", "use_mrope", "mlp_bias"):
        assert key not in written
    unwritten = {"torch_dtype", "pretraining_tp", "use_cache", "use_mrope", "mlp_bias"}
    same = config.keys() - unwritten - {"attention_bias", "sliding_window"}
    assert {key: written[key] for key in same} == {key: config[key] for key in same}


def test_both_forms_of_rotary_settings_read_alike():
    old = {key: LLAMA_3_2_1B[key] for key in LLAMA_3_2_1B}
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf(new) == from_hf(old)
    oldest = {**LLAMA_2_7B, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf(oldest).rope_scaling == RopeScaling(rope_type="linear", factor=2.0)


def test_absent_keys_mean_what_transformers_takes_them_for():
    bare = {"head_dim", "num_key_value_heads", "rms_norm_eps", "sliding_window"}

    def read(config):
        return from_hf({key: value for key, value in config.items() if key not in bare})

    assert read(LLAMA_2_7B).num_kv_heads == 32
    assert read(LLAMA_2_7B).norm_eps == 1e-6
    assert (read(MISTRAL_7B).num_kv_heads, read(MISTRAL_7B).sliding_window) == (8, 4096)
    wide = {**QWEN_3_0_6B, "num_attention_heads": 32}
    assert (read(wide).num_kv_heads, read(wide).head_dim) == (32, 128)


def test_windows_of_qwen_by_layer():
    slides = {"use_sliding_window": True, "sliding_window": 64}
    model = from_hf({**QWEN_2_5_0_5B, **slides, "max_window_layers": 22})
    assert [model.window(layer) for layer in (0, 21, 22, 23)] == [None, None, 64, 64]
    kinds = ["sliding_attention", "full_attention"] * 12
    listed = from_hf({**QWEN_2_5_0_5B, **slides, "layer_types": kinds})
    assert listed.full_layers == tuple(range(1, 24, 2))
    assert from_hf({**QWEN_2_5_0_5B, **slides}).sliding_window is None  # 24 layers, none slides


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model_type": "bloom"},
            "known are bert, deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, gpt2, gpt_neox",
        ),
        ({"model_type": "llamaa"}, "did you mean llama?"),
        ({"model_type": None}, "model_type = 'None'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is a feature this decoder doesn't have"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 8}, "sliding_window = 8 is not a setting that llama"),
        ({"num_experts": 8}, "num_experts = 8 is not a setting that llama"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "'default' with ['factor']"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "['full_attention']"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"type": "linear"}},
            "two forms of one setting",
        ),
        ({"num_key_value_heads": 5}, "num_kv_heads = 5"),
    ],
)
def test_a_config_json_that_cannot_be_honoured_is_refused(changes, expected):
    assert expected in sentence(from_hf, {**LLAMA_2_7B, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["sliding_attention"] * 24}, "the kind 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types holds 3 kinds"),
        ({"layer_types": ["chunked_attention"] * 24}, "the kind 'chunked_attention'"),
    ],
)
def test_wrong_layer_types_are_refused(changes, expected):
    assert expected in sentence(from_hf, {**QWEN_2_5_0_5B, **changes})


def test_a_missing_shape_is_named_as_in_the_file():
    config = {key: value for key, value in LLAMA_2_7B.items() if key != "intermediate_size"}
    assert "intermediate_size is missing" in sentence(from_hf, config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"qkv_bias": True, "qk_norm": True}, "both qkv_bias and qk_norm"),
        ({"sliding_window": 8, "full_layers": [0]}, "neither qkv_bias nor qk_norm"),
    ],
)
def test_a_model_without_a_family_cannot_be_written(changes, expected):
    assert expected in sentence(to_hf, small(**changes))
