"""`paceline bench serve --forms`: what fewer bits take, and what they cost."""

import json

import pytest
import torch

from paceline.bench.serving.forms import (
    WEIGHT_FORMS,
    FormPass,
    FormPrice,
    crossover,
    form_prices,
    forms_of_keys,
    same_load,
)
from paceline.config.serving import Serving
from paceline.generate.prices import weight_prices
from tests.command_line import paceline, write_tiny_job
from tests.generate.networks import MODELS, built


def test_parts_of_a_pass_are_of_its_matrices():
    decoder = built(MODELS["experts"], torch.float32)
    prices = form_prices(decoder, Serving(max_sequences=6), 32)
    wanted = weight_prices(decoder, WEIGHT_FORMS, [1])
    for price, other in zip(prices, wanted, strict=True):
        assert price.resident_bytes == other.resident_bytes
        assert [one.rows for one in price.passes] == [1, 4, 6, 32]
        assert all(one.pass_s > 0 and one.bytes_s > 0 for one in price.passes)
        rates = [one.product_s / one.rows for one in price.passes]
        assert rates == pytest.approx([rates[0]] * 4)
        assert price.peak_bytes is None or price.peak_bytes >= 0


def test_keys_are_measured_load_by_load():
    decoder = built(MODELS["grouped"], torch.float32)
    for before, after in same_load(forms_of_keys(decoder, Serving(max_sequences=3), 32)):
        assert before.load == after.load
        assert (before.form, after.form) == ("as_weights", "int8")
        assert after.token_bytes < before.token_bytes


def _price(*seconds):
    passes = tuple(
        FormPass(rows, s, 0.5, 0.75) for rows, s in zip((1, 4, 16), seconds, strict=True)
    )
    return FormPrice("int8", 1, 1, passes)


def test_a_form_is_slower_from_the_first_pass_on_that_takes_as_long():
    assert crossover(_price(1, 2, 3), _price(0.5, 2, 2)) == 4
    assert crossover(_price(1, 2, 3), _price(0.5, 1, 2)) is None
    assert [one.rest_s for one in _price(1, 2, 3).passes] == [0, 0.75, 1.75]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", "--set", "train.steps=8", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_by_the_command(trained):
    settings = ("--set", "serve.max_sequences=2", "--set", "serve.max_tokens=16")
    done = paceline("bench", "serve", "runs/tiny", "--forms", *settings, "--json", folder=trained)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    losses = [form["loss"] for form in found["weights"]] + [found["keys_loss"]]
    assert len(losses) == 4
    assert max(losses) - min(losses) < 0.1
    assert len({round(loss, 9) for loss in losses}) == 4
    assert "forms of keys and values" in done.stdout
    done = paceline("bench", "serve", "runs/tiny", "--forms", "--rate", "max", folder=trained)
    assert done.returncode == 2
    assert "leave the others out" in done.stderr


def test_what_has_no_text_has_no_loss_and_narrow_weights_no_forms(trained):
    done = paceline("export", "runs/tiny", "wide", folder=trained)
    assert done.returncode == 0, done.stderr
    settings = ("--set", "serve.max_sequences=2", "--set", "serve.max_tokens=16")
    done = paceline("bench", "serve", "wide", "--forms", *settings, folder=trained)
    assert done.returncode == 0, done.stderr
    assert "the loss is unknown" in done.stdout
    assert (
        paceline("export", "runs/tiny", "narrow", "--weights", "int8", folder=trained).returncode
        == 0
    )
    done = paceline("bench", "serve", "narrow", "--forms", folder=trained)
    assert done.returncode == 2
    assert "give the run that they were made of" in done.stderr
