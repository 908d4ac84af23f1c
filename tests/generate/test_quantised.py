"""Weights in fewer bits: close to the network's own, as each request alone, as large as said."""

import pytest
import torch

from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate import prices
from paceline.generate.engine import Engine
from paceline.generate.prices import WeightPrice, chosen_form, is_quicker, weight_prices
from paceline.generate.quantised import (
    QuantisedWeights,
    has_int8_products,
    product_of,
    quantised_matrices,
)
from paceline.models.quantised import matrices_of, quantised
from tests.generate.networks import MODELS, built, prompt
from tests.generate.test_engine import SMALL, assert_nothing_is_left, made

FORMS = ["int8", "int4"]
needs_vnni = pytest.mark.skipif(
    not has_int8_products(torch.device("cpu")), reason="needs a CPU with VNNI"
)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [None, 8, 32])
def test_each_weight_is_within_half_a_scale(bits, group_size):
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    matrix = quantised(weight, bits, group_size)
    half = matrix.scales.repeat_interleave(matrix.group_size, 1) / 2
    assert torch.all((matrix.dequantised() - weight).abs() <= half * (1 + 1e-5))
    assert matrix.values.abs().max() == (127 if bits == 8 else 7)
    assert torch.equal(matrix.dequantised()[2], torch.zeros(32))


def test_a_group_that_does_not_divide_a_row_is_halved():
    assert quantised(torch.ones(2, 48), 4, 64).group_size == 16


@needs_vnni
def test_an_int8_product_is_that_of_rounded_inputs_whatever_stands_beside():
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(9, 40, generator=draw) * torch.logspace(-3, 3, 9)[:, None]
    x[4] = 0
    matrix = quantised(torch.randn(24, 40, generator=draw), 8)
    bias = torch.randn(24, generator=draw)
    product = product_of(matrix, bias)
    scales = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    rounded = (x / scales).add(128.5).floor() - 128
    whole = rounded.double() @ matrix.values.double().T
    wanted = whole * matrix.scales.T.double() * scales.double() + bias.double()
    assert torch.allclose(product(x).double(), wanted, rtol=1e-5, atol=1e-6)
    for row in range(9):
        assert torch.equal(product(x[row : row + 1]), product(x)[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("out_features", "group_size"), [(32, 32), (32, 16), (24, 32)], ids=["kernel", "group", "rows"]
)
def test_an_int4_product_is_that_of_the_written_out_matrix(dtype, out_features, group_size):
    draw = torch.Generator().manual_seed(3)
    matrix = quantised(torch.randn(out_features, 64, generator=draw), 4, group_size)
    x, bias = torch.randn(2, 5, 64, generator=draw), torch.randn(out_features, generator=draw)
    out = product_of(matrix, bias.to(dtype))(x.to(dtype))
    wanted = x @ matrix.dequantised().T + bias
    assert out.dtype == dtype
    assert (out - wanted).norm() < 0.01 * wanted.norm()


# What rounding matrices changes in logits, as a part of them. The networks' weights are large, so
# it is more than in trained ones.
ERRORS = {"int8": 0.08, "int4": 0.6}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_logits_are_near_those_of_the_network(name, form):
    decoder = built(MODELS[name], torch.float32)
    tokens = torch.tensor([prompt(40, 1)])
    wanted = decoder(tokens)
    with QuantisedWeights(decoder, quantised_matrices(decoder, form, 32)).put_in():
        found = decoder(tokens)
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-4 < error < ERRORS[form]
    assert torch.equal(decoder(tokens), wanted)  # and the network is as it was


def _requests(logprobs=None):
    return [
        (
            prompt(length, seed),
            Sampling(max_tokens=14, temperature=heat, seed=seed, logprobs=logprobs),
        )
        for seed, (length, heat) in enumerate([(1, 0), (9, 0), (23, 0), (40, 1), (4, 2), (17, 0.7)])
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_texts_are_those_of_each_request_alone(name, form):
    # In fp64, as rounding inputs to fewer bits makes more of the differences that company makes.
    decoder = built(MODELS[name])
    serving = SMALL.replace(weights=form, speculate="ngram")
    engine = Engine(decoder, serving)
    wanted = [made(Engine(decoder, serving), [request])[0] for request in _requests()]
    assert made(engine, _requests()) == wanted
    assert len({tuple(text) for text in wanted}) >= 5
    assert_nothing_is_left(engine)


@pytest.mark.parametrize(("form", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)])
def test_exact_passes_give_the_same_bits_in_any_company(form, dtype):
    decoder = built(MODELS["grouped"], dtype)
    serving = SMALL.replace(weights=form, max_tokens=16, exact=True)

    def logprobs(requests):
        engine = Engine(decoder, serving)
        sequences = [engine.submit(*request) for request in requests]
        while not engine.is_idle:
            engine.step()
        return [sequence.logprobs for sequence in sequences]

    together = logprobs(_requests(logprobs=3))
    assert together == [logprobs([request])[0] for request in _requests(logprobs=3)]


def test_other_weights_are_quantised_anew():
    decoder = built(MODELS["grouped"], torch.float32)
    engine = Engine(decoder, SMALL.replace(weights="int8"))
    request = [(prompt(9, 0), Sampling(max_tokens=14, temperature=0))]
    before = made(engine, request)
    other = built(MODELS["grouped"], torch.float32, seed=1)
    decoder.load_state_dict(other.state_dict())
    engine.weights_changed()
    after = made(engine, request)
    assert after == made(Engine(other, SMALL.replace(weights="int8")), request)
    assert after != before


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_as_predicted(name):
    decoder = built(MODELS[name], torch.float32)
    sizes = [(w.shape[0], w.shape[1], key) for key, w in matrices_of(decoder)]
    found = {p.form: p for p in weight_prices(decoder, ["as_trained", "int8", "int4"], [3], 32)}
    assert found["as_trained"].resident_bytes == sum(4 * out * inner for out, inner, _ in sizes)
    assert found["int8"].resident_bytes == sum(out * (inner + 4) for out, inner, _ in sizes)
    for key, matrix in quantised_matrices(decoder, "int4", 32):
        weight = dict(matrices_of(decoder))[key]
        assert matrix.bits == (8 if key == "head" else 4)
        assert matrix.num_bytes == weight.numel() * matrix.bits // 8 + matrix.scales.nbytes


def _prices(seconds):
    return [WeightPrice("int8", rows, s, 1) for rows, s in enumerate(seconds)]


def test_auto_takes_a_form_only_where_it_is_quicker_everywhere():
    assert is_quicker(_prices([1, 2, 3]), _prices([0.5, 1.8, 2]))
    assert not is_quicker(_prices([1, 2, 3]), _prices([0.5, 1.8, 3.1]))
    assert not is_quicker(_prices([1, 2, 3]), _prices([0.5, 1.99, 2]))  # noise


@needs_vnni
def test_auto_measures_once_and_follows_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder = built(MODELS["grouped"], torch.float32)
    serving = SMALL.replace(weights="auto")
    chosen = chosen_form(decoder, serving, 13)
    (file,) = (tmp_path / "paceline" / "weights").iterdir()
    kept = prices.read_prices(file, WeightPrice)
    assert [p.rows for p in kept[::2]] == [1, 2, 4, 13]
    assert chosen == ("int8" if is_quicker(kept[::2], kept[1::2]) else "as_trained")
    for slow, wanted in [("as_trained", "int8"), ("int8", "as_trained")]:
        pretended = [WeightPrice(p.form, p.rows, 2.0 if p.form == slow else 1.0, 1) for p in kept]
        file.write_text(prices.text_of(pretended))
        assert chosen_form(decoder, serving, 13) == wanted
        assert Engine(decoder, serving).weight_form == wanted
    file.write_text('[{"form": "int8", "rows": "many"}]')
    chosen_form(decoder, serving, 13)
    assert len(prices.read_prices(file, WeightPrice)) == len(kept)


def test_auto_leaves_exact_passes_alone():
    decoder = built(MODELS["grouped"], torch.float32)
    assert chosen_form(decoder, Serving(weights="auto", exact=True), 64) == "as_trained"
