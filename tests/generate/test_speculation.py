"""Speculation: guesses of any kind leave texts as they are, and good ones save passes."""

import random

import pytest
import torch
from pydantic import ValidationError

from paceline.config.errors import InputError
from paceline.config.heads import Heads
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from tests.generate.networks import MODELS, VOCAB, alone, built, heads_of, prompt
from tests.generate.test_engine import SMALL, assert_nothing_is_left, made

DRAFT = MODELS["window"].replace(
    hidden_size=16, ffn_size=24, num_heads=2, num_kv_heads=1, head_dim=8, num_layers=2
)


def _requests(lengths=(1, 9, 23, 40, 4, 17)):
    heats = (0, 0, 0, 1, 2, 0.7)
    return [
        (prompt(length, seed), Sampling(max_tokens=14, temperature=heat, seed=seed))
        for seed, (length, heat) in enumerate(zip(lengths, heats, strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "kind", "by"),
    [
        (name, kind, by)
        for name, model in MODELS.items()
        for by in ("draft", "heads")
        for kind in (by, "auto")
        if by == "draft" or not model.head_bias  # which heads can't have: see below
    ],
)
def test_texts_are_those_without_guesses(name, kind, by):
    decoder = built(MODELS[name])
    draft = built(DRAFT) if by == "draft" else heads_of(decoder)
    engine = Engine(decoder, SMALL.replace(speculate=kind), draft=draft)
    assert made(engine, _requests()) == [alone(decoder, *request) for request in _requests()]
    assert kind == "auto" or engine.numbers()["guessed"] > 0
    assert_nothing_is_left(engine)
    assert not decoder.norm._forward_hooks


def test_heads_of_a_network_whose_head_has_a_bias_are_refused():
    with pytest.raises(ValidationError, match=r"trunk\.head_bias = true adds to the product"):
        Heads(family="heads", of="runs/a", step=1, trunk=MODELS["phi"])


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_that_is_the_network_is_always_right(name):
    """Also where its own keys and values came in parts, from shared blocks, or anew."""
    decoder = built(MODELS[name])
    requests = [
        (prompt(20, 0) + prompt(length, length), Sampling(max_tokens=20, temperature=heat, seed=1))
        for length, heat in ((1, 0), (3, 0.8), (9, 0))
    ]
    serving = Serving(
        block_size=4, max_tokens=24, max_sequences=3, speculate="draft", guess_tokens=4, kv_gb=1.0
    )
    engine = Engine(decoder, serving, draft=built(MODELS[name]))
    steps = 0
    sequences = [engine.submit(*request) for request in requests]
    while not engine.is_idle:
        engine.step()
        steps += 1
    assert [one.made for one in sequences] == [alone(decoder, *request) for request in requests]
    numbers = engine.numbers()
    assert numbers["guessed_right"] == numbers["guessed"] > 40
    assert steps < 12  # 20 tokens by five at a time, and the prompts
    assert_nothing_is_left(engine)


def test_any_mix_gives_what_each_request_alone_gives():
    """Preemption, cancellations, shared prefixes and drawn texts, with a draft of any quality."""
    decoder = built(MODELS["grouped"])
    draw = random.Random(3)
    for round_ in range(8):
        draft, kind = [
            (built(DRAFT), "draft"),
            (built(MODELS["grouped"]), "auto"),
            (heads_of(decoder), "heads"),
            (heads_of(decoder), "auto"),
        ][round_ % 4]
        serving = Serving(
            block_size=draw.choice([2, 4, 8]),
            max_tokens=draw.choice([8, 40]),
            max_sequences=draw.choice([2, 5, 30]),
            kv_gb=draw.choice([6e-4, 1e-2]),
            share_prefixes=draw.random() < 0.7,
            speculate=kind,
            guess_tokens=draw.choice([1, 3, 7]),
        )
        engine = Engine(decoder, serving, draft=draft)
        wanted, cancelled = {}, set()
        for number in range(20):
            tokens = prompt(draw.randint(0, 12), draw.randint(0, 2)) + prompt(
                draw.randint(1, 20), number
            )
            sampling = Sampling(
                max_tokens=draw.randint(1, 14),
                temperature=draw.choice([0.0, 0.0, 0.8]),
                top_k=draw.choice([None, 7]),
                repetition_penalty=draw.choice([1.0, 1.3]),
                seed=number,
            )
            most = min(sampling.max_tokens, engine.longest - len(tokens))
            wanted[engine.submit(tokens, sampling)] = (tokens, sampling.replace(max_tokens=most))
            for _ in range(draw.randint(0, 2)):
                engine.step()
            if draw.random() < 0.2 and (victim := draw.choice(list(wanted))).end is None:
                cancelled.add(victim)
                engine.cancel(victim)
        while not engine.is_idle:
            engine.step()
        assert_nothing_is_left(engine)
        for sequence, (tokens, sampling) in wanted.items():
            text = alone(decoder, tokens, sampling)
            assert sequence.made == (text[: sequence.num_made] if sequence in cancelled else text)


@pytest.mark.parametrize("exact", [False, True])
def test_heads_guess_beside_prompts_that_are_told_of(exact):
    decoder = built(MODELS["grouped"], torch.float32)
    sampling = Sampling(max_tokens=14, temperature=0)
    requests = [(prompt(length, length), sampling) for length in (9, 5, 40)]
    serving = SMALL.replace(max_tokens=16, exact=exact)
    plain = [text for request in requests for text in made(Engine(decoder, serving), [request])]
    heads = heads_of(decoder)
    engine = Engine(decoder, serving.replace(speculate="heads"), draft=heads)
    told = (2, None, 0)
    sequences = [
        engine.submit(*request, prompt_logprobs=count)
        for request, count in zip(requests, told, strict=True)
    ]
    while not engine.is_idle:
        engine.step()
        for sequence, state in engine._speculator._guessers["heads"]._states.items():
            with torch.no_grad():  # of the last token that was computed
                states = decoder(torch.tensor([sequence.tokens[:-1]]), returns_states=True)
            assert torch.allclose(state, states[0, -1], atol=1e-4)
    assert [sequence.made for sequence in sequences] == plain
    assert [len(sequence.prompt_logprobs) for sequence in sequences] == [8, 0, 39]


def test_a_draft_of_other_weights_goes_on_guessing():
    decoder, other = built(MODELS["grouped"]), built(MODELS["grouped"], seed=1)
    serving = Serving(block_size=4, max_tokens=24, speculate="draft", guess_tokens=2)
    engine = Engine(decoder, serving, draft=built(MODELS["grouped"], seed=1))
    tokens, sampling = prompt(10, 0), Sampling(max_tokens=30, temperature=0)
    sequence = engine.submit(tokens, sampling)
    for _ in range(4):
        engine.step()
    before, wrong = sequence.made, engine.numbers()
    assert wrong["guessed_right"] < wrong["guessed"]
    decoder.load_state_dict(other.state_dict())
    engine.weights_changed()
    while not engine.is_idle:
        engine.step()
    rest = sampling.replace(max_tokens=30 - len(before))
    assert sequence.made == before + alone(other, tokens + before, rest)
    numbers = engine.numbers()
    assert (
        numbers["guessed_right"] - wrong["guessed_right"] == numbers["guessed"] - wrong["guessed"]
    )


@pytest.mark.parametrize("exact", [False, True])
def test_a_head_reads_the_state_of_the_token_before(exact):
    """Heads that add nothing guess, at each place, what the network itself chose there."""
    decoder = built(MODELS["grouped"], torch.float32)
    heads = heads_of(decoder, num_heads=1)
    serving = Serving(block_size=4, max_tokens=24, speculate="heads", exact=exact)
    engine = Engine(decoder, serving, draft=heads)
    guessed = []
    guess = engine._speculator.guess
    engine._speculator.guess = lambda chunks: (guessed.extend(made := guess(chunks)), made)[1]
    requests = [(prompt(n, n), Sampling(max_tokens=9, temperature=0)) for n in (3, 30, 7)]
    assert made(engine, requests) == [alone(decoder, *request) for request in requests]
    told = [
        (chunk.sequence.tokens[chunk.stop - 1], chunk.guess) for chunk in guessed if chunk.guess
    ]
    assert len(told) > 10
    assert all(guess == (last,) for last, guess in told)


def test_exact_logits_have_the_same_bits_with_guesses():
    decoder = built(MODELS["grouped"], torch.float32)
    exact = Serving(block_size=8, exact=True, max_tokens=16)
    requests = [(prompt(n, n), Sampling(max_tokens=12, logprobs=20, seed=1)) for n in (1, 5, 30)]

    def told(engine):
        sequences = [engine.submit(*request) for request in requests]
        while not engine.is_idle:
            engine.step()
        return [[told.likeliest for told in sequence.logprobs] for sequence in sequences]

    draft = built(MODELS["grouped"], torch.float32)
    for kind, by in (("draft", draft), ("auto", draft), ("heads", heads_of(decoder))):
        engine = Engine(decoder, exact.replace(speculate=kind), draft=by)
        assert told(engine) == told(Engine(decoder, exact))
        assert kind == "auto" or engine.numbers()["guessed"] > 0


def test_a_draft_that_reads_less_stops_guessing_where_it_ends():
    decoder, draft = built(MODELS["grouped"]), built(DRAFT.replace(max_seq_len=30))
    engine = Engine(decoder, SMALL.replace(speculate="draft", max_tokens=64), draft=draft)
    request = (prompt(20, 0), Sampling(max_tokens=40, temperature=0))
    assert made(engine, [request]) == [alone(decoder, *request)]
    assert 0 < engine.numbers()["guessed"] <= 10 * 6


_OTHER = MODELS["grouped"].replace(vocab_size=VOCAB + 1)


@pytest.mark.parametrize(
    ("kind", "draft", "said"),
    [
        ("draft", lambda: None, "needs a small network"),
        ("heads", lambda: None, "needs heads: train them"),
        ("heads", lambda: built(DRAFT), "needs heads: train them"),
        ("draft", lambda: heads_of(built(MODELS["grouped"])), "needs a small network"),
        ("ngram", lambda: built(DRAFT), 'no effect with serve.speculate = "ngram": set it to "dr'),
        ("off", lambda: heads_of(built(MODELS["grouped"])), 'no effect .* "off": set it to "heads'),
        ("auto", lambda: built(_OTHER), f"knows {VOCAB + 1} tokens and the network"),
        ("auto", lambda: heads_of(built(_OTHER)), "The heads are of nowhere, which is 32 wide"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(kind, draft, said):
    with pytest.raises(InputError, match=said):
        Engine(built(MODELS["grouped"]), SMALL.replace(speculate=kind), draft=draft())
