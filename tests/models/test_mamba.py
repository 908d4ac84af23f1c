"""Mamba-2 against transformers on random weights, both ways; its scan against the recurrence."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config.errors import InputError
from paceline.config.mamba import Mamba2, mamba2_from_hf, mamba2_to_hf
from paceline.models.mamba import Mamba, check_mamba, exported, load_mamba, scan
from paceline.models.weights import write_state

SHAPES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "initializer_range": 0.1,
    "pad_token_id": None,
}
KINDS = {
    "plain": {},
    "tied, with biases": {"tie_word_embeddings": True, "use_bias": True},
    "one group, no bias": {"n_groups": 1, "use_conv_bias": False, "conv_kernel": 3},
}
MODEL = Mamba2(
    family="mamba2",
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    head_dim=8,
    state_size=12,
    num_groups=2,
    chunk_size=8,
)


def build(model=MODEL, dtype=torch.float32, seed=0):
    network = Mamba(model)
    network.init_weights(torch.Generator().manual_seed(seed))
    return network.to(dtype)


def tokens_of(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("length", [1, 7, 16, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers(kind, length, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.Mamba2Config(**SHAPES | KINDS[kind])
    theirs = transformers.Mamba2ForCausalLM(config)
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    model = mamba2_from_hf(config.to_dict())
    ours = Mamba(model)
    load_mamba(ours, tmp_path)
    assert model.num_params == sum(p.numel() for p in ours.parameters())
    tokens, targets = tokens_of(2, length), tokens_of(2, length + 1)[:, 1:]
    logits, wanted = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    for each in (logits, wanted):
        torch.nn.functional.cross_entropy(each.flatten(0, 1), targets.flatten()).backward()
    gradients = exported({name: p.grad for name, p in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        difference = (gradients[name] - parameter.grad).norm()
        assert difference <= 1e-5 * max(float(parameter.grad.norm()), 1e-2), name
    with torch.no_grad():
        loss = ours(tokens, targets=targets)
        other = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)


def test_transformers_opens_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, folder = build(), tmp_path / "written"
    config = mamba2_to_hf(MODEL)
    write_state(folder, exported(ours.state_dict()), torch.float32, config, {"a.txt": b"beside"})
    assert (folder / "a.txt").read_bytes() == b"beside"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokens_of(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    read = mamba2_from_hf(config)
    assert read == MODEL.replace(num_layers=2)


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
def test_the_scan_is_the_recurrence(chunk_size):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=random)

    x, steps = draw(2, 23, 4, 3), draw(2, 23, 4).exp()
    decay, writers, readers = -draw(4).exp(), draw(2, 23, 2, 5), draw(2, 23, 2, 5)
    starts = torch.tensor([[0] * 23, [0] * 6 + [6] * 9 + [15] * 8])
    found = scan(x, steps, decay, writers, readers, chunk_size, starts)
    wide = [each.repeat_interleave(2, 2) for each in (writers, readers)]
    state = x.new_zeros(2, 4, 3, 5)
    for at in range(23):
        state = state * (starts[:, at] != at)[:, None, None, None]
        state = state * (steps[:, at] * decay).exp()[..., None, None]
        written = (x[:, at] * steps[:, at, :, None])[..., None] * wide[0][:, at, :, None]
        state = state + written
        read = (state * wide[1][:, at, :, None]).sum(-1)
        torch.testing.assert_close(found[:, at], read, rtol=1e-10, atol=1e-10)


def test_documents_of_a_sample_are_apart():
    network, tokens = build(dtype=torch.float64), tokens_of(1, 40)
    lengths = (3, 17, 1, 19)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    with torch.no_grad():
        together = network(tokens, ids)
        apart = [network(part) for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=1e-6, atol=1e-6)


def test_first_weights_are_as_the_paper_has_them():
    mixer = build().blocks[0].mixer
    torch.testing.assert_close(mixer.decay_log.exp(), torch.arange(1.0, 9.0))
    steps = torch.nn.functional.softplus(mixer.step_bias)
    assert ((steps > 0.99e-3) & (steps < 0.101)).all()
    assert mixer.conv_weight.abs().max() <= 0.5
    loss = build()(tokens_of(2, 30), targets=tokens_of(2, 30))
    assert float(loss.detach()) == pytest.approx(math.log(61), abs=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ({"expand": 3}, "differs from num_heads x head_dim"),
        ({"n_groups": 3}, "divides num_heads"),
        ({"num_heads": "many"}, "config.json.num_heads"),
        ({"expand": "two"}, "expand"),
        ({"time_step_limit": 3}, "time_step_limit"),
    ],
)
def test_other_networks_are_refused_in_a_sentence(change, said):
    config = {**mamba2_to_hf(MODEL), **change}
    with pytest.raises(InputError, match=said):
        mamba2_from_hf(config)


def test_weights_of_another_network_are_refused(tmp_path):
    write_state(tmp_path / "w", exported(build().state_dict()), torch.float32)
    with pytest.raises(InputError, match="is missing"):
        check_mamba(MODEL.replace(num_layers=3), tmp_path / "w")
    file = tmp_path / "w/model.safetensors"
    tensors = load_file(file)
    tensors["backbone.layers.0.mixer.D"] = torch.zeros(3)
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"backbone.layers.0.mixer.D .* has shape \(3,\)"):
        check_mamba(MODEL, tmp_path / "w")
