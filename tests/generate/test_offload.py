"""Offload: blocks come back where that is quicker, and texts stay what each request alone gets."""

import threading

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.offload import PassCosts, num_worth_fetching
from paceline.generate.paged import KeyShape
from tests.generate.networks import MODELS, alone, built, prompt
from tests.generate.test_engine import assert_nothing_is_left, made

GREEDY = Sampling(max_tokens=8, temperature=0)


class Takes:
    """What computing a token takes, instead of what was measured."""

    def __init__(self, token_s):
        self._token_s = token_s

    def add(self, seconds, spans):
        pass

    def seconds(self, start, stop):
        return self._token_s * (stop - start)


def gb(decoder, num_blocks, block_size=4):
    dtype = next(decoder.parameters()).dtype
    return KeyShape.of(decoder).block_bytes(block_size, dtype) * (num_blocks + 0.5) / 1e9


def engine_of(decoder, token_s=1e9, **serving):
    """With room for 15 blocks of 4 tokens on the device, and more in host memory."""
    serving = {"block_size": 4, "kv_gb": gb(decoder, 15), "host_gb": gb(decoder, 99), **serving}
    engine = Engine(decoder, Serving(**serving))
    engine._offload.passes = Takes(token_s)
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_histories_come_back_and_texts_are_those_of_each_request_alone(name, tmp_path):
    decoder = built(MODELS[name])
    prompts = [prompt(30 + seed, seed) for seed in range(6)]
    on_disk = {"host_gb": gb(decoder, 10), "disk_gb": 1.0, "disk_folder": str(tmp_path)}
    wanted = [alone(decoder, tokens, GREEDY) for tokens in prompts]
    for settings in ({}, on_disk):
        engine = engine_of(decoder, **settings)
        for _ in range(2):
            for tokens, text in zip(prompts, wanted, strict=True):
                assert made(engine, [(tokens, GREEDY)]) == [text]
                engine._offload.tiers.settle()
        numbers = engine.numbers()
        assert numbers["blocks_fetched"] > 12
        assert (numbers["blocks_disk"] > 20) == bool(settings)
        assert numbers["blocks_damaged"] == 0
        assert_nothing_is_left(engine)


def test_logits_have_the_same_bits_after_a_reload():
    decoder = built(MODELS["grouped"], torch.float32)
    told = Sampling(max_tokens=6, temperature=0, logprobs=20)
    engine = engine_of(decoder, exact=True, max_tokens=16)
    texts = []
    for number in (0, 1, 2, 0):
        sequence = engine.submit(prompt(40, number), told)
        while not engine.is_idle:
            engine.step()
        texts.append(sequence.logprobs)
    assert engine.numbers()["blocks_fetched"] == 9
    assert sequence.num_shared == 36
    assert texts[3] == texts[0]


def test_a_preempted_sequence_gets_its_blocks_back():
    decoder = built(MODELS["grouped"])
    requests = [(prompt(6, seed), Sampling(max_tokens=40, temperature=0)) for seed in range(4)]
    engine = engine_of(decoder)
    assert made(engine, requests) == [alone(decoder, *request) for request in requests]
    numbers = engine.numbers()
    assert numbers["preemptions"] > 0
    assert numbers["blocks_fetched"] > 0
    assert_nothing_is_left(engine)


def test_where_computing_is_always_quicker_nothing_is_kept():
    decoder = built(MODELS["grouped"])
    engine = engine_of(decoder, token_s=0.0, host_gb="auto")
    engine._offload._placing.add(1.0, 1)
    for number in (0, 1, 2, 0):
        made(engine, [(prompt(40, number), GREEDY)])
    numbers = engine.numbers()
    assert numbers["tier_bytes_in"] == numbers["blocks_host"] == numbers["blocks_fetched"] == 0


def test_what_is_kept_is_computed_anew_where_that_is_quicker_by_now():
    decoder = built(MODELS["grouped"])
    engine = engine_of(decoder)
    for number in (0, 1, 2):
        made(engine, [(prompt(40, number), GREEDY)])
    engine._offload.passes = Takes(0.0)
    assert made(engine, [(prompt(40, 0), GREEDY)]) == [alone(decoder, prompt(40, 0), GREEDY)]
    numbers = engine.numbers()
    assert numbers["blocks_fetched"] == 0
    assert numbers["blocks_recomputed"] == 9


def test_others_go_on_while_blocks_are_fetched():
    decoder = built(MODELS["grouped"])
    engine = engine_of(decoder, kv_gb=gb(decoder, 30))
    for number in range(4):
        made(engine, [(prompt(40, number), GREEDY)])
    tiers, goes_on = engine._offload.tiers, threading.Event()
    fetch = tiers._fetch
    tiers._fetch = lambda read: goes_on.wait(60) and fetch(read)
    waits = engine.submit(prompt(40, 0), GREEDY)
    other = engine.submit(prompt(5, 9), GREEDY)
    while other.end is None:
        engine.step()
    assert waits.num_made == 0
    assert engine.step() == []
    goes_on.set()
    while not engine.is_idle:
        engine.step()
    assert waits.made == alone(decoder, prompt(40, 0), GREEDY)
    assert engine.numbers()["blocks_fetched"] > 0
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("does", ["cancelled", "other weights"])
def test_what_nobody_wants_any_more_is_let_go(does):
    decoder = built(MODELS["grouped"])
    engine = engine_of(decoder)
    for number in range(3):
        made(engine, [(prompt(40, number), GREEDY)])
    tiers, goes_on = engine._offload.tiers, threading.Event()
    find = tiers._find
    tiers._find = lambda name: goes_on.wait(60) and find(name)
    sequence = engine.submit(prompt(40, 0), GREEDY)
    engine.step()
    assert sequence.read is not None
    if does == "cancelled":
        engine.cancel(sequence)
    else:
        engine.weights_changed()
        assert engine.numbers()["blocks_host"] == 0
    goes_on.set()
    tiers.settle()
    assert not any(held.num_readers for held in tiers._host.values())
    while not engine.is_idle:
        engine.step()
    assert engine.numbers()["blocks_fetched"] == 0
    if does != "cancelled":
        assert sequence.made == alone(decoder, prompt(40, 0), GREEDY)
    assert_nothing_is_left(engine)


def test_what_is_damaged_is_computed_anew():
    decoder = built(MODELS["grouped"])
    engine = engine_of(decoder)
    for number in range(3):
        made(engine, [(prompt(40, number), GREEDY)])
    tiers = engine._offload.tiers
    tiers.settle()
    names = engine.submit(prompt(40, 0), GREEDY)
    engine._scheduler._name(names, 5)
    tiers._host[names.names[5]].data[3] ^= 1
    while not engine.is_idle:
        engine.step()
    assert names.made == alone(decoder, prompt(40, 0), GREEDY)
    assert names.num_shared == 20
    numbers = engine.numbers()
    assert (numbers["blocks_damaged"], numbers["blocks_fetched"]) == (1, 5)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"disk_gb": 1.0}, "serve.disk_gb = 1.0 has an effect only where serve.disk_folder says"),
        ({"disk_gb": 1.0, "host_gb": 0.0}, "only where serve.host_gb isn't 0"),
        ({"host_gb": 1.0, "share_prefixes": False}, "serve.share_prefixes is false"),
    ],
)
def test_settings_without_effect_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        Engine(built(MODELS["grouped"]), Serving(**settings))


def test_as_many_are_fetched_as_make_a_sequence_ready_soonest():
    assert num_worth_fetching([], lambda count: 9.0) == 0
    # Fetching takes 1 a block, computing 2; then 1 and 1, where nothing is gained; then 3 and 2.
    assert num_worth_fetching([1.0] * 4, lambda count: 2.0 * (6 - count)) == 4
    assert num_worth_fetching([1.0] * 4, lambda count: 1.0 * (6 - count)) == 0
    assert num_worth_fetching([1.0, 1.0, 3.0, 3.0], lambda count: 2.0 * (6 - count)) == 2
    # Late tokens take longer than early ones, so that reading a slow tier may pay in the end.
    assert num_worth_fetching([2.0] * 4, lambda count: float(16 - count * count)) == 4


def test_seconds_of_passes_are_learnt_from_those_that_ran():
    passes = PassCosts(most_tokens=100)
    assert passes.seconds(0, 50) == 0

    def pass_s(start, stop):
        return 2e-3 + 1e-4 * (stop - start) + 1e-7 * (stop**2 - start**2) / 2

    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        start, count = torch.randint(0, 800, (2,), generator=draw).tolist()
        passes.add(pass_s(start, start + count % 100 + 1), [(start, start + count % 100 + 1)])
    for start, stop in ((0, 100), (500, 600), (0, 1000)):
        wanted = (stop - start) / 100 * 2e-3 + pass_s(start, stop) - 2e-3
        assert passes.seconds(start, stop) == pytest.approx(wanted, rel=1e-3)
    for _ in range(400):  # and then they take half as long
        passes.add(pass_s(7, 70) / 2, [(7, 70)])
    assert passes.seconds(7, 70) == pytest.approx(pass_s(7, 70) / 2, rel=0.25)


def test_no_term_of_a_pass_is_negative():
    passes = PassCosts(most_tokens=8)
    for tokens, seconds in ((1, 9e-3), (8, 2e-3), (4, 4e-3)):
        passes.add(seconds, [(0, tokens)])
    assert passes.seconds(0, 1) >= 0
    assert passes.seconds(1000, 1008) >= 0
