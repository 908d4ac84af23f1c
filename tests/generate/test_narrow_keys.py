"""Keys and values in 8 bits: near the network's own, as each request alone, as large as said."""

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate import key_prices as prices_of_keys
from paceline.generate.engine import Engine
from paceline.generate.key_prices import (
    KeyLoad,
    KeyPrice,
    chosen_key_form,
    expected_loads,
    key_prices,
)
from paceline.generate.narrow_keys import kept_width, narrowed, scales_of, widened
from paceline.generate.paged import KeyShape
from paceline.generate.prices import is_quicker, read_prices, text_of
from tests.generate.networks import MODELS, alone, built, prompt, with_rounded_keys
from tests.generate.ranks import on_ranks
from tests.generate.test_engine import SMALL, assert_nothing_is_left, made
from tests.generate.test_offload import engine_of

NARROW = SMALL.replace(kv="int8")


def _requests():
    start = prompt(17, 9)
    return [
        (tokens, Sampling(max_tokens=14, temperature=heat, seed=seed))
        for seed, (tokens, heat) in enumerate(
            [
                (prompt(1, 0), 0),
                (prompt(9, 1), 0),
                (prompt(23, 2), 0),
                (prompt(40, 3), 1),
                (start + prompt(3, 4), 2),
                (start + prompt(4, 5), 0.7),
            ]
        )
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 6])
def test_each_number_is_within_half_a_scale(dtype, width):
    rows = torch.randn(5, 3, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[2] = 0
    kept = narrowed(rows)
    assert kept.shape == (5, 3, kept_width(width, torch.int8))
    found = widened(kept, width, torch.float64)
    half = scales_of(kept).double() / 2
    assert torch.all((found - rows.double()).abs() <= half * (1 + 1e-5))
    assert torch.allclose(scales_of(kept)[0, :, 0] * 127, rows[0].abs().amax(-1).float())
    assert torch.equal(found[2], torch.zeros(3, width, dtype=torch.float64))


def test_what_is_no_number_stays_none():
    rows = torch.ones(2, 8)
    rows[0, 3] = torch.nan
    assert widened(narrowed(rows), 8, torch.float32).isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_texts_are_those_of_each_request_alone(name, speculate):
    decoder = built(MODELS[name])
    engine = Engine(decoder, NARROW.replace(speculate=speculate))
    found = made(engine, _requests())
    assert_nothing_is_left(engine)
    with with_rounded_keys(decoder):
        wanted = [alone(decoder, *request) for request in _requests()]
    assert found == wanted
    assert len({tuple(text) for text in wanted}) >= 5


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_how_a_prompt_is_cut(name):
    decoder = built(MODELS[name])
    tokens = prompt(30, 7)
    with with_rounded_keys(decoder):
        wanted = decoder(torch.tensor([tokens]))[0, -1].float().log_softmax(-1).topk(5)
    for most in (1, 4, 7, 30, 64):
        engine = Engine(decoder, Serving(block_size=8, max_tokens=most, kv="int8"))
        told = engine.submit(tokens, Sampling(max_tokens=1, logprobs=5, temperature=0))
        while not engine.is_idle:
            engine.step()
        found = [log for _, log in told.logprobs[0].likeliest]
        assert found == pytest.approx(wanted.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_near_those_of_whole_keys(name):
    # The networks' weights are large, so it is more than in trained ones.
    decoder = built(MODELS[name], torch.float32)
    tokens = torch.tensor([prompt(60, 1)])
    wanted = decoder(tokens)
    with with_rounded_keys(decoder):
        found = decoder(tokens)
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.1


def test_a_prompt_that_comes_back_from_the_tiers_gives_the_same_text(tmp_path):
    decoder = built(MODELS["grouped"])
    few = (KeyShape.of(decoder).block_bytes(4, torch.int8) + 0.5) * 1e-9
    engine = engine_of(
        decoder,
        kv="int8",
        kv_gb=15 * few,
        host_gb=10 * few,
        disk_gb=1.0,
        disk_folder=str(tmp_path),
    )
    assert engine.numbers()["blocks"] == 15
    greedy = Sampling(max_tokens=8, temperature=0)
    prompts = [prompt(30 + seed, seed) for seed in range(6)]
    with with_rounded_keys(decoder):
        wanted = [alone(decoder, tokens, greedy) for tokens in prompts]
    for _ in range(2):
        for tokens, text in zip(prompts, wanted, strict=True):
            assert made(engine, [(tokens, greedy)]) == [text]
            engine._offload.tiers.settle()
    numbers = engine.numbers()
    assert numbers["blocks_fetched"] > 12
    assert numbers["blocks_disk"] > 20
    assert numbers["blocks_damaged"] == 0


def test_the_same_memory_holds_nearly_four_times_the_blocks_of_fp32():
    wide = MODELS["grouped"].replace(head_dim=64)
    for dtype, times in ((torch.float32, 4 * 64 / 68), (torch.bfloat16, 2 * 64 / 68)):
        decoder = built(wide, dtype)
        sizes = SMALL.replace(kv_gb=0.005)
        before, after = (
            Engine(decoder, sizes.replace(kv=form)).numbers()["blocks"]
            for form in ("as_weights", "int8")
        )
        assert after == pytest.approx(times * before, abs=times)


def _told(new_engine):
    engine = new_engine(NARROW)
    return made(engine, _requests())


def test_ranks_round_the_keys_of_their_heads():
    decoder = built(MODELS["grouped"])
    wanted = made(Engine(decoder, NARROW), _requests())
    assert on_ranks(_told, "grouped", 2, 1) == wanted


def test_a_draft_guesses_for_narrow_keys():
    decoder = built(MODELS["grouped"])
    wanted = made(Engine(decoder, NARROW), _requests())
    guessing = Engine(decoder, NARROW.replace(speculate="draft"), draft=decoder)
    assert made(guessing, _requests()) == wanted
    assert guessing.numbers()["guessed_right"] > 0


def test_exact_passes_do_not_round():
    decoder = built(MODELS["grouped"])
    with pytest.raises(InputError, match=r"serve\.exact promises"):
        Engine(decoder, Serving(kv="int8", exact=True))
    assert chosen_key_form(decoder, Serving(kv="auto", exact=True), 64) == "as_weights"


def test_bytes_are_as_predicted():
    decoder = built(MODELS["grouped"], torch.float32)
    loads = [KeyLoad(3, 1, 20), KeyLoad(1, 5, 9)]
    found = key_prices(decoder, ["as_weights", "int8"], loads, 4)
    assert [price.load for price in found] == [loads[0], loads[0], loads[1], loads[1]]
    rows = 3 * 2 * 2  # layers, keys and values, heads
    assert [price.token_bytes for price in found] == 2 * [rows * 8 * 4, rows * (8 + 4)]


def test_loads_fit_into_what_is_filled():
    for longest, texts, tokens in [(96, 1, 13), (96, 64, 512), (100_000, 64, 512), (8, 4, 1)]:
        for load in expected_loads(longest, texts, tokens):
            assert 0 < load.tokens <= load.context <= longest
            assert load.texts * load.context <= prices_of_keys._MOST_FILLED
            assert load.texts * load.tokens <= max(tokens, texts)


def test_auto_measures_once_and_follows_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder = built(MODELS["grouped"], torch.float32)
    serving = SMALL.replace(kv="auto")
    chosen = chosen_key_form(decoder, serving, 13)
    (file,) = (tmp_path / "paceline" / "keys").iterdir()
    kept = read_prices(file, KeyPrice)
    assert chosen == ("int8" if is_quicker(kept[::2], kept[1::2]) else "as_weights")
    for slow, wanted in [("as_weights", "int8"), ("int8", "as_weights")]:
        file.write_text(
            text_of([KeyPrice(p.form, p.load, 2.0 if p.form == slow else 1.0, 1) for p in kept])
        )
        assert Engine(decoder, serving).key_form == wanted
    assert Engine(decoder, SMALL).key_form == "as_weights"
