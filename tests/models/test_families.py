"""The decoder against Hugging Face transformers on random weights: one process, a few seconds.

Every family, both ways: their directory into our network and ours into theirs. Logits and every
gradient in fp32 agree to 1e-5 (norm of the difference over the norm, tensor by tensor).
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config.huggingface import from_hf
from paceline.kernels.loss import cross_entropy
from paceline.models.decoder import Decoder
from paceline.models.names import sources
from paceline.models.weights import read_decoder, read_model, write_weights

transformers = pytest.importorskip("transformers")

SHAPES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 2.0,
}
QWEN_MOE = {
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LAYER_NORMS = {key: value for key, value in SHAPES.items() if key != "rms_norm_eps"}
# Families that have other names for their shapes.
OTHERS = {
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "gpt_neox": _LAYER_NORMS,
    "phi": _LAYER_NORMS,
    "bert": _LAYER_NORMS,
    "modernbert": _LAYER_NORMS,
}
# Else transformers keeps the row of token 0 from learning.
_UNPADDED = {"pad_token_id": None}
GEMMA3 = {
    **_UNPADDED,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
}
GEMMA2 = {
    **_UNPADDED,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
MODERNBERT = {**_UNPADDED, "local_attention": 14}
_MASKED = ("bert", "modernbert")
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
FAMILIES = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": (
        "llama",
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "mistral_uneven": (  # heads that don't divide hidden_size: LlamaConfig refuses them
        "mistral",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": None,
        },
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2_window": ("qwen2", {"num_key_value_heads": 2, "max_window_layers": 1, **WINDOW}),
    "qwen2_mixed": (
        "qwen2",
        {
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **WINDOW,
        },
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 6, "sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", {**QWEN_MOE, "shared_expert_intermediate_size": 40, **WINDOW}),
    "qwen2_moe_sparse_step": (  # and weights that are divided by their sum
        "qwen2_moe",
        {
            **QWEN_MOE,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe_window": ("qwen3_moe", {**QWEN_MOE, "head_dim": 24, **WINDOW}),
    "deepseek_v2": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3_yarn": (  # weights as they are, pairs that aren't neighbours
        "deepseek_v3",
        {
            **DEEPSEEK,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
            "norm_topk_prob": False,
            "rope_interleave": False,
            "n_shared_experts": 2,
        },
    ),
    "gpt2": ("gpt2", {}),
    "gpt2_untied": (
        "gpt2",
        {"n_inner": 144, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_sequential": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 2}),
    "gemma": ("gemma", {**_UNPADDED, "num_key_value_heads": 1, "head_dim": 24}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2_other_layers": (
        "gemma2",
        {
            **GEMMA2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        },
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3_stretched": (
        "gemma3_text",
        {
            **GEMMA3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
        },
    ),
    "gpt_oss_unstretched": (
        "gpt_oss",
        {
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    ),
    "bert": ("bert", _UNPADDED),
    "modernbert": ("modernbert", MODERNBERT),
    "modernbert_other_layers": (
        "modernbert",
        {
            **MODERNBERT,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "norm_bias": True,
            "decoder_bias": False,
        },
    ),
    "phi_whole_heads": ("phi", {"partial_rotary_factor": 1.0, "hidden_act": "gelu"}),
}
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def randomised(network):
    """Make every parameter count: biases and norms don't stay at zero and one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0
            parameter.normal_(centre, 0.2, generator=generator)
        for name, buffer in network.named_buffers():
            if name.endswith(("choice_bias", "e_score_correction_bias")):
                buffer.normal_(0.0, 0.2, generator=generator)
    return network


def config_of(name):
    model_type, changes = FAMILIES[name]
    return transformers.AutoConfig.for_model(
        model_type, **{**OTHERS.get(model_type, SHAPES), **changes}
    )


def opener(name):
    is_masked = FAMILIES[name][0] in _MASKED
    return transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM


def reference(name):
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    network = opener(name).from_config(config_of(name), **eager)
    return randomised(network).float().eval()


def gradients_of(network):
    """By the names in files, where each expert has its own tensors."""
    gradients = {}
    for name, parameter in network.named_parameters():
        stack = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
        if stack is None or network.config.model_type == "gpt_oss":
            if network.config.model_type == "gpt_neox":
                name = name.replace("lm_head.", "embed_out.")
            mixtral = network.config.model_type == "mixtral"
            name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
            gradients[name] = parameter.grad
            continue
        parts = {"down_proj": parameter.grad}
        if stack[2] == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), parameter.grad.chunk(2, 1), strict=True))
        for kind, of_all in parts.items():
            for expert, gradient in enumerate(of_all):
                short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[kind]
                if network.config.model_type == "mixtral":
                    name = f"{stack[1]}.block_sparse_moe.experts.{expert}.{short}.weight"
                else:
                    name = f"{stack[1]}.mlp.experts.{expert}.{kind}.weight"
                gradients[name] = gradient
    return gradients


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def logits_of(network):
    is_masked = network.config.model_type in _MASKED
    return network(TOKENS, **({} if is_masked else {"use_cache": False})).logits


def assert_close(found, expected, name):
    # An expert that no token chose has a gradient of zero.
    error = (found - expected).norm() / expected.norm() if expected.any() else found.norm()
    assert error <= 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_every_gradient(name, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    ours = read_decoder(tmp_path)
    expected, found = logits_of(theirs), ours(TOKENS)
    assert_close(found, expected, "logits")
    cross_entropy(expected, TOKENS).backward()
    cross_entropy(found, TOKENS).backward()
    gradients = gradients_of(theirs)
    own = {name: p.grad for name, p in ours.named_parameters()}
    for their_name, source in sources(ours.model, shapes_of(own)).items():
        if source.join is None:
            found = own[source.name] if source.expert is None else own[source.name][source.expert]
        else:
            found = source.join.joined([own[each] for each in source.join.names])
        expected = gradients.pop(their_name)
        if their_name.endswith("self.key.bias"):  # moves all scores of a query alike
            assert max(found.norm(), expected.norm()) < 1e-7
        else:
            assert_close(found, expected, their_name)
    assert not gradients


@pytest.mark.parametrize("name", FAMILIES)
def test_as_many_parameters(name):
    with torch.device("meta"):
        theirs = opener(name).from_config(config_of(name))
    model = from_hf(config_of(name).to_dict())
    assert model.num_params == theirs.num_parameters()


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"),
    [(name, (10**9, 40_000)[number % 2]) for number, name in enumerate(FAMILIES)],
)
def test_transformers_open_what_we_write(name, max_shard_bytes, tmp_path):
    reference(name).save_pretrained(tmp_path / "theirs")
    model = read_model(tmp_path / "theirs")
    ours = randomised(Decoder(model))
    write_weights(tmp_path / "ours", model, ours.state_dict(), max_shard_bytes=max_shard_bytes)
    opened, report = opener(name).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    assert opened.dtype == torch.float32
    assert not any(report.values()), report
    assert_close(ours(TOKENS), logits_of(opened), "logits")
    assert torch.equal(read_decoder(tmp_path / "ours")(TOKENS), ours(TOKENS))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2_untied",
        "gpt_neox_sequential",
        "phi",
        "gemma",
        "gemma2",
        "gemma3",
        "gpt_oss",
        "bert",
        "modernbert",
    ],
)
def test_export_back_gives_the_same_tensors(name, tmp_path):
    reference(name).save_pretrained(tmp_path / "theirs")
    ours = read_decoder(tmp_path / "theirs")
    write_weights(tmp_path / "ours", ours.model, ours.state_dict())
    given, written = (
        load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "ours")
    )
    assert given.keys() == written.keys()
    assert all(torch.equal(given[each], written[each]) for each in given)


def test_gpt2_is_read_under_the_names_that_it_was_published_with(tmp_path):
    reference("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    ours = read_decoder(tmp_path)
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(tensors, file)
    assert torch.equal(read_decoder(tmp_path)(TOKENS), ours(TOKENS))


def test_bert_is_read_under_the_names_that_it_was_published_with(tmp_path):
    reference("bert").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    ours, tensors = read_decoder(tmp_path), load_file(file)
    for now, then in (
        ("LayerNorm.weight", "LayerNorm.gamma"),
        ("LayerNorm.bias", "LayerNorm.beta"),
    ):
        tensors = {name.replace(now, then): value for name, value in tensors.items()}
    tensors["cls.predictions.decoder.weight"] = tensors[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    tensors["bert.pooler.dense.weight"] = torch.ones(64, 64)
    tensors["cls.seq_relationship.bias"] = torch.ones(2)
    save_file(tensors, file)
    assert torch.equal(read_decoder(tmp_path)(TOKENS), ours(TOKENS))


def test_written_bf16_weights_are_theirs_and_ours(tmp_path):
    reference("llama3").save_pretrained(tmp_path / "theirs")
    ours = read_decoder(tmp_path / "theirs")
    write_weights(tmp_path / "bf16", ours.model, ours.state_dict(), dtype=torch.bfloat16)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert opened.dtype == torch.bfloat16
    # Read back in fp32 on both sides: the same rounded weights, so the same network.
    assert_close(read_decoder(tmp_path / "bf16")(TOKENS), logits_of(opened.float()), "logits")
    assert not torch.equal(read_decoder(tmp_path / "bf16")(TOKENS), ours(TOKENS))
    assert read_decoder(tmp_path / "bf16", dtype=torch.bfloat16)(TOKENS).dtype == torch.bfloat16


def test_their_shards_and_long_positions(tmp_path):
    """Scaled rotary positions up to the end of the table, from a directory in several files."""
    theirs = reference("llama3")
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.randint(0, 96, (1, 128), generator=torch.Generator().manual_seed(2))
    expected = theirs(tokens, use_cache=False).logits
    assert_close(read_decoder(tmp_path)(tokens), expected, "logits")
