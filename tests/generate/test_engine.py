"""Engine: every request gets the text that it would get alone, and nothing is left behind."""

import random

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.sampling import Grammar, Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.exact import check_places
from paceline.generate.packed import PackedWeights, can_pack
from paceline.generate.paged import KeyShape
from tests.generate.networks import MODELS, VOCAB, alone, built, prompt

SMALL = Serving(block_size=4, max_tokens=13, max_sequences=5)


def made(engine, requests):
    """The tokens of each (prompt, sampling)."""
    sequences = [engine.submit(tokens, sampling) for tokens, sampling in requests]
    while not engine.is_idle:
        engine.step()
    return [sequence.made for sequence in sequences]


def assert_nothing_is_left(engine):
    numbers = engine.numbers()
    assert numbers["blocks_free"] == numbers["blocks"]
    assert not engine._scheduler._coming


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_texts_are_those_of_each_request_alone(name, speculate):
    decoder = built(MODELS[name])
    requests = [
        (prompt(length, seed), Sampling(max_tokens=14, temperature=heat, seed=seed))
        for seed, (length, heat) in enumerate([(1, 0), (9, 0), (23, 0), (40, 1), (4, 2), (17, 0.7)])
    ]
    engine = Engine(decoder, SMALL.replace(speculate=speculate))
    wanted = [alone(decoder, *request) for request in requests]
    assert made(engine, requests) == wanted
    assert len({tuple(text) for text in wanted}) >= 5
    assert_nothing_is_left(engine)
    assert torch.equal(  # and the network is as it was
        decoder(torch.tensor([requests[2][0]])), built(MODELS[name])(torch.tensor([requests[2][0]]))
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_network_however_a_prompt_is_cut(name):
    decoder = built(MODELS[name])
    tokens = prompt(30, 7)
    wanted = decoder(torch.tensor([tokens]))[0, -1].float()
    for most in (1, 4, 7, 30, 64):
        engine = Engine(decoder, Serving(block_size=8, max_tokens=most))
        engine.submit(tokens, Sampling(max_tokens=1, logprobs=5, temperature=0))
        while not engine.is_idle:
            (progress, *_) = engine.step()
        told = progress.sequence.logprobs[0]
        best = wanted.log_softmax(-1).topk(5)
        assert [token for token, _ in told.likeliest] == best.indices.tolist()
        assert [log for _, log in told.likeliest] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["grouped", "window"])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_what_is_thought_of_a_prompt_is_told_however_it_is_cut_and_whoever_began_alike(
    name, max_tokens
):
    decoder = built(MODELS[name])
    tokens = prompt(30, 7)
    log = decoder(torch.tensor([tokens]))[0, :-1].float().log_softmax(-1)
    wanted = log.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    best = log.topk(3).indices.tolist()
    sampling = Sampling(max_tokens=max_tokens, temperature=0)
    for most in (1, 7, 64):
        engine = Engine(decoder, Serving(block_size=8, max_tokens=most))
        other = (prompt(9, 1), Sampling(max_tokens=4, temperature=0))
        made(engine, [(tokens, sampling.replace(max_tokens=1)), other])
        engine.submit(*other)
        told = engine.submit(tokens, sampling, prompt_logprobs=3)
        while not engine.is_idle:
            engine.step()
        assert [each.chosen for each in told.prompt_logprobs] == pytest.approx(wanted, abs=1e-5)
        found = [[token for token, _ in each.likeliest] for each in told.prompt_logprobs]
        assert found == best
        assert told.num_shared == 0
        assert told.made == (alone(decoder, tokens, sampling) if max_tokens else [])
        assert told.end == "length"
        assert_nothing_is_left(engine)


def test_what_is_thought_of_a_prompt_stays_told_when_it_has_to_wait_or_weights_change():
    decoder = built(MODELS["grouped"])
    engine = Engine(decoder, SMALL.replace(kv_gb=_gb(decoder, 16, 4)))
    sampling = Sampling(max_tokens=20, temperature=0)
    sequences = [engine.submit(prompt(20, n), sampling, prompt_logprobs=0) for n in range(3)]
    for _ in range(3):
        engine.step()
    engine.weights_changed()
    while not engine.is_idle:
        engine.step()
    assert engine.numbers()["preemptions"] > 0
    for number, sequence in enumerate(sequences):
        tokens = prompt(20, number)
        log = decoder(torch.tensor([tokens]))[0, :-1].float().log_softmax(-1)
        wanted = log.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        assert [each.chosen for each in sequence.prompt_logprobs] == pytest.approx(wanted, abs=1e-5)
        assert sequence.made == alone(decoder, tokens, sampling)
    assert_nothing_is_left(engine)


def test_what_is_thought_of_a_prompt_has_the_same_bits_in_any_company():
    decoder = built(MODELS["grouped"], torch.float32)
    tokens, told = prompt(40, 2), []
    for company in (0, 3):
        engine = Engine(decoder, Serving(block_size=4, exact=True, max_tokens=16))
        for seed in range(company):
            engine.submit(prompt(11, seed), Sampling(max_tokens=5, seed=seed))
        scored = engine.submit(tokens, Sampling(max_tokens=0), prompt_logprobs=2)
        while not engine.is_idle:
            engine.step()
        told.append(scored.prompt_logprobs)
    assert told[0] == told[1]


def test_requests_that_begin_alike_compute_the_beginning_once():
    decoder = built(MODELS["grouped"])
    start = prompt(24, 3)
    requests = [
        (start + prompt(5, seed), Sampling(max_tokens=6, temperature=0)) for seed in range(4)
    ]
    engine = Engine(decoder, Serving(block_size=4, max_tokens=64))
    counted = []
    forward = engine._runner.logits
    engine._runner.logits = lambda chunks: (
        counted.extend(chunk.num_tokens for chunk in chunks),
        forward(chunks),
    )[1]
    assert made(engine, requests) == [alone(decoder, *request) for request in requests]
    assert sum(counted) == 24 + 4 * 5 + 4 * 5  # the start, each one's own, each one's text
    assert_nothing_is_left(engine)
    idle = engine.numbers()["blocks_idle"]
    assert idle > 0
    again = engine.submit(*requests[0], salt=b"somebody else")
    engine.step()
    assert again.num_shared == 0
    engine.cancel(again)
    again = engine.submit(*requests[0])
    engine.step()
    assert again.num_shared == 28
    engine.cancel(again)
    assert_nothing_is_left(engine)


def test_a_text_of_one_token_leaves_its_prompt_to_others():
    engine = Engine(built(MODELS["grouped"]), Serving(block_size=4))
    for wanted in (0, 20):
        sequence = engine.submit(prompt(21, 0), Sampling(max_tokens=1))
        engine.step()
        assert sequence.end == "length"
        assert sequence.num_shared == wanted
    assert_nothing_is_left(engine)


def test_without_blocks_the_youngest_waits_and_nothing_changes():
    decoder = built(MODELS["grouped"])
    requests = [(prompt(6, seed), Sampling(max_tokens=40, temperature=0)) for seed in range(6)]
    engine = Engine(decoder, SMALL.replace(kv_gb=_gb(decoder, 30, 4)))
    assert engine.numbers()["blocks"] == 30
    assert made(engine, requests) == [alone(decoder, *request) for request in requests]
    assert engine.numbers()["preemptions"] > 0
    assert_nothing_is_left(engine)


def test_any_mix_gives_what_each_request_alone_gives():
    """Lengths, sampling, cancellations, shared prefixes and too few blocks, drawn at random."""
    decoder = built(MODELS["window"])
    draw = random.Random(5)
    for _ in range(6):
        engine = Engine(
            decoder,
            Serving(
                block_size=draw.choice([2, 4, 8]),
                max_tokens=draw.choice([3, 8, 40]),
                max_sequences=draw.choice([2, 5, 30]),
                kv_gb=draw.choice([2e-4, 4e-4, 1e-2]),
                share_prefixes=draw.random() < 0.7,
                speculate=draw.choice(["off", "ngram"]),
            ),
        )
        wanted, cancelled = {}, set()
        for number in range(25):
            tokens = prompt(draw.randint(0, 12), draw.randint(0, 2)) + prompt(
                draw.randint(1, 20), number
            )
            sampling = Sampling(
                max_tokens=draw.randint(1, 12),
                temperature=draw.choice([0.0, 0.0, 0.8, 1.5]),
                top_k=draw.choice([None, 1, 7]),
                top_p=draw.choice([1.0, 0.9, 0.3]),
                min_p=draw.choice([0.0, 0.1]),
                repetition_penalty=draw.choice([1.0, 1.3]),
                frequency_penalty=draw.choice([0.0, 0.5]),
                logit_bias=draw.choice([{}, {3: 4.0}]),
                seed=number,
            )
            if len(tokens) < engine.longest:
                most = min(sampling.max_tokens, engine.longest - len(tokens))
                sequence = engine.submit(tokens, sampling)
                wanted[sequence] = (tokens, sampling.replace(max_tokens=most))
            for _ in range(draw.randint(0, 2)):
                engine.step()
            if draw.random() < 0.2:
                victim = draw.choice(list(wanted))
                if victim.end is None:
                    cancelled.add(victim)
                engine.cancel(victim)
        while not engine.is_idle:
            engine.step()
        assert_nothing_is_left(engine)
        assert len(wanted) - len(cancelled) > 5
        for sequence, (tokens, sampling) in wanted.items():
            text = alone(decoder, tokens, sampling)
            if sequence in cancelled:
                assert sequence.end == "cancelled"
                assert text[: sequence.num_made] == sequence.made
            else:
                assert sequence.made == text


def test_other_weights_are_used_from_the_next_token_on():
    decoder, other = built(MODELS["grouped"]), built(MODELS["grouped"], seed=1)
    engine = Engine(decoder, SMALL)
    tokens, sampling = prompt(10, 0), Sampling(max_tokens=20, temperature=0)
    sequence = engine.submit(tokens, sampling)
    for _ in range(6):
        engine.step()
    before = sequence.made
    decoder.load_state_dict(other.state_dict())
    engine.weights_changed()
    while not engine.is_idle:
        engine.step()
    rest = sampling.replace(max_tokens=20 - len(before))
    assert 0 < len(before) < 20
    assert sequence.made == before + alone(other, tokens + before, rest)
    assert_nothing_is_left(engine)


def test_a_text_ends_where_it_should():
    decoder = built(MODELS["grouped"])
    tokens, sampling = prompt(5, 2), Sampling(max_tokens=30, temperature=0)
    text = alone(decoder, tokens, sampling)
    end = text[7]
    engine = Engine(decoder, SMALL, end_tokens=[end])
    first = engine.submit(tokens, sampling)
    second = engine.submit(tokens, sampling.replace(ignore_end=True))
    third = engine.submit(prompt(90, 1), sampling)
    while not engine.is_idle:
        engine.step()
    assert first.made == text[: text.index(end) + 1]
    assert (first.end, second.end, third.end) == ("stop", "length", "length")
    assert second.made == text
    assert len(third.tokens) == decoder.model.max_seq_len


@pytest.mark.parametrize(
    ("tokens", "sampling", "said"),
    [
        ([], Sampling(), "has no tokens"),
        ([VOCAB], Sampling(), f"has token {VOCAB}, but the network knows 0 to {VOCAB - 1}"),
        ([1] * 96, Sampling(), "has 96 tokens, but prompt and text together may have 96"),
        ([1], Sampling(logit_bias={99: 1.0}), "logit_bias names token 99"),
        ([1], Sampling(stop=("a",)), "Stop strings need text"),
        ([1], Sampling(grammar=Grammar(kind="regex", source="a")), "needs a matcher"),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(tokens, sampling, said):
    engine = Engine(built(MODELS["grouped"]), SMALL)
    with pytest.raises(InputError, match=said):
        engine.submit(tokens, sampling)
    assert engine.is_idle


def test_memory_for_no_block_is_refused():
    with pytest.raises(InputError, match=r"serve.kv_gb = 1e-09 doesn't hold a block of 4 tokens"):
        Engine(built(MODELS["grouped"]), SMALL.replace(kv_gb=1e-9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_exact_logits_have_the_same_bits_in_any_company(name, dtype):
    """Alone in one engine; among others, in parts, preempted, with shared beginnings in another."""
    decoder = built(MODELS[name], dtype)
    exact = Serving(block_size=8, exact=True, max_tokens=16)

    def told(engine, requests):
        sequences = [engine.submit(*request) for request in requests]
        while not engine.is_idle:
            engine.step()
        return [[told.likeliest for told in sequence.logprobs] for sequence in sequences]

    start = prompt(17, 0)
    requests = [
        (start + prompt(length, length), Sampling(max_tokens=12, logprobs=20, seed=1))
        for length in (1, 5, 11, 30)
    ]
    alone_ = [told(Engine(decoder, exact), [request])[0] for request in requests]
    assert told(Engine(decoder, exact), requests) == alone_
    few = Engine(decoder, exact.replace(kv_gb=_gb(decoder, 12, 8), speculate="ngram"))
    assert told(few, requests) == alone_
    assert few.numbers()["preemptions"] > 0


def _gb(decoder, num_blocks, block_size):
    dtype = next(decoder.parameters()).dtype
    return KeyShape.of(decoder).block_bytes(block_size, dtype) * (num_blocks + 0.5) / 1e9


def test_results_that_depend_on_a_place_are_told():
    """Seen with torch 2.13 and MKL: (16, 8) x (8, 10) in fp32 rounds even and odd rows apart."""
    rows = torch.randn(1, 5).expand(4, 5).clone()
    check_places(rows)
    rows[2, 3] = torch.nextafter(rows[2, 3], rows.new_tensor(9.0))
    with pytest.raises(InputError, match="rounds rows differently by their place"):
        check_places(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_called_packable_can_be_packed(dtype):
    """oneDNN knows of bf16 on any CPU, and packs it only on some."""
    decoder = built(MODELS["grouped"], dtype)
    if can_pack(decoder):
        PackedWeights(decoder)
    else:
        assert dtype != torch.float32 or not torch.backends.mkldnn.is_available()


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", MODELS)
def test_packed_products_are_close_to_the_networks_own(name, dtype, close):
    decoder, other = built(MODELS[name], dtype), built(MODELS[name], dtype, seed=1)
    if not can_pack(decoder):
        pytest.skip("this CPU has no products of packed matrices")
    tokens = prompt(20, 0)
    engine = Engine(decoder, Serving())
    assert engine._runner._packed is not None

    def told():
        sequence = engine.submit(tokens, Sampling(max_tokens=1, temperature=0, logprobs=1))
        engine.step()
        return sequence.logprobs[0].likeliest[0][1]

    def own(network):
        with torch.no_grad():
            logits = network(torch.tensor([tokens]))[0, -1].float()
        return float(logits.log_softmax(-1).max())

    assert told() == pytest.approx(own(decoder), abs=close)
    decoder.load_state_dict(other.state_dict())
    engine.weights_changed()
    assert told() == pytest.approx(own(other), abs=close)
    assert "forward" not in decoder.blocks[0].ffn.up_proj.__dict__
