"""Ranks share a network: every request gets the text that one rank gives. Several gloo ranks."""

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.paged import KeyShape
from paceline.generate.ranks import check_ranks
from tests.generate.networks import MODELS, alone, built, prompt
from tests.generate.ranks import on_ranks

SMALL = Serving(block_size=4, max_tokens=13, max_sequences=5)
START = prompt(17, 9)
REQUESTS = [
    (prompt(length, seed), Sampling(max_tokens=12, temperature=heat, seed=seed))
    for seed, (length, heat) in enumerate([(1, 0), (23, 0), (40, 1), (4, 2)])
] + [(START + prompt(3, seed), Sampling(max_tokens=12, temperature=0)) for seed in (1, 2)]
WAYS = [
    *((name, 2, 1) for name in MODELS if name != "gpt_oss"),  # see below
    *(("experts", 1, 2), ("experts", 2, 2), ("gpt_oss", 1, 2)),
]


def done(engine, requests):
    sequences = [engine.submit(*request) for request in requests]
    while not engine.is_idle:
        engine.step()
    numbers = engine.numbers()
    assert numbers["blocks_free"] == numbers["blocks"]
    return sequences


def texts(new_engine, few_gb):
    """In parts and with shared beginnings; with guesses; with too few blocks."""
    plain, guessing = new_engine(SMALL), new_engine(SMALL.replace(speculate="auto"))
    sequences = done(plain, REQUESTS)
    assert sequences[-1].num_shared == 16
    made = [[sequence.made for sequence in sequences]]
    made.append([sequence.made for sequence in done(guessing, REQUESTS)])
    few = new_engine(SMALL.replace(kv_gb=few_gb))
    made.append([sequence.made for sequence in done(few, REQUESTS)])
    assert few.numbers()["preemptions"] > 0
    return made


@pytest.mark.parametrize(("name", "tp", "ep"), WAYS)
def test_texts_are_those_of_each_request_alone(name, tp, ep):
    decoder = built(MODELS[name])
    wanted = [alone(decoder, *request) for request in REQUESTS]
    assert len({tuple(text) for text in wanted}) >= 5
    shape = KeyShape.of(decoder)
    heads_of_rank = shape.num_heads // (1 if name == "latent" else tp)
    block_bytes = shape.block_bytes(4, torch.float64) * heads_of_rank // shape.num_heads
    assert on_ranks(texts, name, tp, ep, 18.5 * block_bytes / 1e9) == [wanted] * 3


def told(new_engine):
    """What is thought of tokens, by the weights of one network and then of another."""
    engine = new_engine(SMALL)
    ask = [(prompt(30, 7), Sampling(max_tokens=4, temperature=0, logprobs=20))]
    thought = [done(engine, ask)[0].logprobs]
    engine.take_weights([built(engine.decoder.model, _dtype(engine), seed=1).state_dict()])
    return [*thought, done(engine, ask)[0].logprobs]


def _dtype(engine):
    return next(engine.decoder.parameters()).dtype


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 1e-3), (torch.bfloat16, 0.3)]
)
@pytest.mark.parametrize(("name", "tp", "ep"), [("latent", 2, 1), ("experts", 2, 2)])
def test_logits_are_those_of_one_rank_after_other_weights_too(name, tp, ep, dtype, close):
    shared = on_ranks(told, name, tp, ep, dtype=dtype)
    own = told(lambda serving: Engine(built(MODELS[name], dtype), serving))
    for ours, theirs in zip(shared, own, strict=True):
        chances = [dict(each[0].likeliest) for each in (ours, theirs)]
        common = chances[0].keys() & chances[1].keys()
        assert len(common) >= 15
        for token in common:
            assert chances[0][token] == pytest.approx(chances[1][token], abs=close)


def lost(new_engine):
    engine = new_engine(SMALL)
    engine.others._ends[0].send_bytes(b"no numbers")
    done(engine, REQUESTS)


def test_a_rank_that_fails_ends_the_others_wait():
    with pytest.raises(AssertionError, match="buffer size must be a multiple"):
        on_ranks(lost, "grouped", 2, 1)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("grouped", {"tp": 4}, r"serve.tp = 4 does not divide num_kv_heads = 2 .* \(1, 2\)"),
        ("window", {"tp": 3}, "serve.tp = 3 does not divide num_heads = 4"),
        ("experts", {"ep": 4}, "this network has 6 experts, which it does not divide"),
        ("grouped", {"ep": 2}, "this network has no experts"),
        ("gpt_oss", {"tp": 2}, "which those with biases can't be: use serve.ep"),
        ("grouped", {"tp": 2, "exact": True}, "serve.exact = True is for one rank"),
        ("grouped", {"tp": 2, "host_gb": 1.0}, "serve.host_gb = 1.0 is for one rank"),
        ("experts", {"ep": 2, "weights": "int8"}, "serve.weights = int8 is for one rank"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_a_sentence(name, settings, said):
    with pytest.raises(InputError, match=said):
        check_ranks(MODELS[name], Serving(**settings))
