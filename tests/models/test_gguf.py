"""Weights as GGUF: llama.cpp itself finds the same logits and cuts texts the same way."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.gguf import read_gguf, write_gguf
from tests.command_line import paceline, write_tiny_job

_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "ffn_size": 96,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 128,
}
MODELS = {
    "llama": Model(**_SHAPE, tie_embeddings=True),
    "wide heads": Model(**_SHAPE, head_dim=32, rope_theta=1e6),
    "qwen2": Model(**_SHAPE, qkv_bias=True),
    "qwen3": Model(**_SHAPE, qk_norm=True, norm_eps=1e-6),
}
TEXT = "def main(value):\n    return [each + 1 for each in value]  # it's 42\n"
CLOSE = {"F32": 1e-3, "BF16": 2e-2, "Q8_0": 5e-2, "Q4_0": 0.5}
"""Of logits, as a part of them. llama.cpp keeps keys and values in fp16."""


def tokenizer():
    """Of fewer tokens than the networks know."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return found


def built(model):
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return decoder


def written(file, model, form):
    decoder = built(model)
    text = tokenizer().to_str().encode()
    write_gguf(file, model, decoder.state_dict(), form, text, 0)
    return decoder


@pytest.fixture(scope="module")
def llama_cpp():
    pytest.importorskip("gguf", reason="needs gguf, which writes the files")
    return pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, which reads them")


@pytest.mark.parametrize("form", CLOSE)
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_finds_the_same_logits(tmp_path, llama_cpp, name, form):
    decoder = written(tmp_path / "x.gguf", MODELS[name], form)
    tokens = tokenizer().encode(TEXT).ids
    opened = llama_cpp.Llama(str(tmp_path / "x.gguf"), n_ctx=128, logits_all=True, verbose=False)
    assert opened.tokenize(TEXT.encode(), add_bos=False) == tokens
    opened.eval(tokens)
    found = torch.from_numpy(np.array(opened.scores[: len(tokens)]))
    with torch.no_grad():
        wanted = decoder(torch.tensor([tokens]))[0]
    assert (found - wanted).norm() < CLOSE[form] * wanted.norm()
    if form == "F32":
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert opened.detokenize(tokens).decode() == TEXT
    assert opened.token_eos() == 0


def test_a_file_says_what_the_network_is(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs gguf, which writes the files")
    decoder = written(tmp_path / "x.gguf", MODELS["llama"], "Q8_0")
    found = gguf.GGUFReader(tmp_path / "x.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in found.tensors}
    assert kinds["token_embd.weight"] == kinds["blk.2.ffn_down.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert len(kinds) == len(decoder.state_dict())
    assert "output.weight" not in kinds  # it is the embedding's


OFF = {"F32": 0, "BF16": 2**-8, "Q8_0": 1 / 254 + 2**-11, "Q4_0": 1 / 8 + 2**-11}
"""Of a weight, as a part of the largest of its group of 32: half a scale of 127, or a whole one of
8, as numbers end at 7; and the rounding of scales to fp16."""


@pytest.mark.parametrize("form", OFF)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_that_were_written(tmp_path, name, form):
    pytest.importorskip("gguf", reason="needs gguf, which writes the files")
    wanted = written(tmp_path / "x.gguf", MODELS[name], form).state_dict()
    found = read_gguf(tmp_path / "x.gguf", MODELS[name])
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        off, allowed = (found[key] - tensor).abs(), tensor.abs().max() * 0
        if tensor.ndim > 1:
            groups = tensor.abs().unflatten(-1, (-1, 32)).amax(-1)
            allowed = OFF[form] * groups.repeat_interleave(32, -1)
        assert (off <= allowed).all(), key


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 16}, "its own sliding_window"),
        ({"qkv_bias": True, "qk_norm": True}, "qk_norm beside qkv_bias"),
        ({"gated": False}, "its own gated"),
    ],
)
def test_other_networks_are_refused(tmp_path, changes, said):
    model = MODELS["llama"].replace(**changes)
    with pytest.raises(InputError, match=said):
        write_gguf(tmp_path / "x.gguf", model, {}, "F32", tokenizer().to_str().encode(), 0)
    assert not (tmp_path / "x.gguf").exists()


def test_other_tokenizers_are_refused(tmp_path):
    other = json.loads(tokenizer().to_str())
    other["normalizer"] = {"type": "NFC"}
    with pytest.raises(InputError, match="cut texts as GPT-2 does"):
        write_gguf(
            tmp_path / "x.gguf", MODELS["llama"], {}, "F32", json.dumps(other).encode(), None
        )


def test_rows_that_groups_do_not_divide_are_refused(tmp_path):
    pytest.importorskip("gguf", reason="needs gguf, which writes the files")
    model = MODELS["llama"].replace(ffn_size=80)
    with pytest.raises(InputError, match=r"down_proj.weight has rows of 80 weights"):
        written(tmp_path / "x.gguf", model, "Q8_0")


def test_by_the_command(tmp_path):
    pytest.importorskip("gguf", reason="needs gguf, which writes the files")
    write_tiny_job(tmp_path)
    done = paceline("train", "job.toml", "--set", "train.steps=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = paceline(
        "export", "runs/tiny", "out", "--format", "gguf", "--weights", "int8", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "tiny.gguf").stat().st_size > 10_000
