"""Layers: with most weights in files a network computes the same bits, in less memory."""

import threading

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from tests.generate.networks import MODELS, VOCAB, alone, built, prompt
from tests.generate.test_engine import made

MODEL = Model(
    vocab_size=VOCAB, hidden_size=64, ffn_size=128, num_layers=7, num_heads=4, max_seq_len=96
)
TOLD = Sampling(max_tokens=6, temperature=0, logprobs=20)


def layer_bytes(decoder):
    return sum(parameter.nbytes for parameter in decoder.blocks[0].parameters())


def other_bytes(decoder):
    """Of embedding, head and norm."""
    return sum(p.nbytes for p in decoder.parameters()) - 7 * layer_bytes(decoder)


def held_bytes(decoder, layers):
    """Of weights that lie in memory and not in files, and of the buffers."""
    homes = {moved._home.data.untyped_storage().data_ptr() for moved in layers._layers}
    stores = [p.untyped_storage() for p in decoder.parameters()]
    stores += [buffer.untyped_storage() for buffer in layers._buffers]
    kept = {store.data_ptr(): store.nbytes() for store in stores}
    return sum(num for place, num in kept.items() if place not in homes)


def told(engine, tokens):
    sequence = engine.submit(tokens, TOLD)
    while not engine.is_idle:
        engine.step()
    return sequence.logprobs


@pytest.mark.parametrize("num_kept", [0, 1, 3, 5, 6, 7])
def test_bits_are_those_of_the_whole_network_and_memory_is_kept(num_kept, tmp_path):
    decoder, whole = built(MODEL, torch.float32), built(MODEL, torch.float32)
    budget = other_bytes(decoder) + num_kept * layer_bytes(decoder)
    serving = Serving(exact=True, max_tokens=16, disk_folder=str(tmp_path))
    engine = Engine(decoder, serving.replace(weights_gb=(budget + 9) / 1e9))
    layers = engine._runner._layers
    assert layers.num_moved == 7 - num_kept
    assert budget - 1 <= layers.resident_bytes <= budget
    assert held_bytes(decoder, layers) <= budget + 2 * (layer_bytes(decoder) + 64)
    reference = Engine(whole, Serving(exact=True, max_tokens=16))
    for seed in range(3):
        assert told(engine, prompt(20, seed)) == told(reference, prompt(20, seed))
    assert held_bytes(decoder, layers) <= budget + 2 * (layer_bytes(decoder) + 64)
    assert not list(tmp_path.iterdir())  # files have no names, so that none can be left


@pytest.mark.parametrize("name", MODELS)
def test_every_family_makes_the_same_texts(name, tmp_path):
    decoder = built(MODELS[name])
    requests = [(prompt(9 + seed, seed), Sampling(max_tokens=8, seed=seed)) for seed in range(3)]
    wanted = [alone(decoder, *request) for request in requests]
    size = sum(parameter.nbytes for parameter in decoder.parameters()) / 1e9
    engine = Engine(decoder, Serving(weights_gb=size / 2, disk_folder=str(tmp_path)))
    assert engine._runner._layers.num_moved >= 1
    assert made(engine, requests) == wanted
    assert alone(decoder, *requests[0]) == wanted[0]  # by the network itself, between passes


def test_other_weights_are_used_from_the_next_pass_on(tmp_path):
    decoder, other = built(MODEL), built(MODEL, seed=1)
    budget = other_bytes(decoder) / 1e9 + 1e-9
    engine = Engine(decoder, Serving(weights_gb=budget, disk_folder=str(tmp_path)))
    request = (prompt(9, 0), Sampling(max_tokens=8, temperature=0))
    assert made(engine, [request]) == [alone(decoder, *request)]
    decoder.load_state_dict(other.state_dict())
    engine.weights_changed()
    assert made(engine, [request]) == [alone(other, *request)]


def test_a_layer_is_copied_while_another_computes(tmp_path):
    decoder = built(MODEL)
    budget = other_bytes(decoder) / 1e9 + 1e-9
    engine = Engine(decoder, Serving(weights_gb=budget, disk_folder=str(tmp_path)))
    layers = engine._runner._layers
    second_is_copied = threading.Event()
    copy = layers._layers[1].copy
    layers._layers[1].copy = lambda: (copy(), second_is_copied.set())
    first = decoder.blocks[0].attention
    forward = first.forward
    seen = []
    first.forward = lambda *args: (seen.append(second_is_copied.wait(60)), forward(*args))[1]
    made(engine, [(prompt(9, 0), Sampling(max_tokens=1))])
    assert seen == [True]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights_gb": 1.0}, "on a CPU needs a place for the other layers"),
        ({"weights_gb": 1e-9, "disk_folder": "here"}, "doesn't hold embedding, head and norms"),
        (
            {"weights_gb": 1.0, "disk_folder": "here", "weights": "int8"},
            "keeps all matrices in memory",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        Engine(built(MODEL), Serving(**settings))
