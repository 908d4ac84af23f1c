"""Differential privacy of clients, without Flower: bounds, noise and the accountant's figures."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.config.federate import Privacy, read_federate
from paceline.federate.grid import half_of
from paceline.federate.privacy import epsilon_of, noise_for, noisy_mean, on_grid_within
from paceline.federate.rounds import limit_of_norm

needs_library = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="dp-accounting is not installed"
)


def stream(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "spread", [lambda n: stream().normal(size=n), np.ones, lambda n: np.eye(n)[0]]
)
@pytest.mark.parametrize("norm", [0.3, 0.7, 1e6])
def test_what_a_client_tells_is_never_longer_than_the_clip(bits, spread, norm):
    """Exactly: rounding makes most changes longer, so those that are clipped are at the edge."""
    clip, count = 0.7, 1000
    change = spread(count) / np.linalg.norm(spread(count)) * norm
    limit = limit_of_norm(clip, count)
    for seed in range(20):
        values, _ = on_grid_within(change, limit, bits, clip, stream(seed))
        assert np.abs(values).max() <= half_of(bits)
        assert np.linalg.norm(values * (limit / half_of(bits))) <= clip * (1 + 1e-12)


def test_a_change_that_fits_is_told_as_without_privacy_and_its_error_is_kept():
    change = stream().normal(size=1000) * 0.5 / math.sqrt(1000)
    limit = limit_of_norm(1.0, 1000)
    values, error = on_grid_within(change, limit, 8, 1.0, stream(1))
    assert values * (limit / half_of(8)) + error == pytest.approx(change, abs=1e-15)
    assert np.abs(error).max() <= limit / half_of(8)


def test_what_clipping_takes_away_is_gone():
    change = 10 * stream().normal(size=1000) / math.sqrt(1000)
    values, error = on_grid_within(change, limit_of_norm(1.0, 1000), 8, 1.0, stream(1))
    told = values * (limit_of_norm(1.0, 1000) / half_of(8))
    # A change in its direction, whose length is the clip but for rounding.
    assert 0.97 < np.linalg.norm(told) <= 1
    assert told @ change / np.linalg.norm(told) / np.linalg.norm(change) > 0.999
    assert np.linalg.norm(error) < 0.05


def test_the_noise_of_a_sum_is_that_of_the_clip_and_comes_of_the_seed():
    mean, clients, noise, clip = stream(1).normal(size=200_000), 6, 1.5, 0.4
    found = noisy_mean(mean, clients, noise, clip, stream(5))
    on_sum = (found - mean) * clients
    drawn = stream(5).standard_normal(200_000)
    assert on_sum == pytest.approx(noise * clip * drawn, abs=1e-9)
    assert on_sum.var() == pytest.approx((noise * clip) ** 2, rel=0.02)
    assert (noisy_mean(mean, clients, noise, clip, stream(6)) != found).all()


@needs_library
@pytest.mark.parametrize(("noise", "rounds"), [(0.8, 1), (2.0, 10), (5.0, 100)])
def test_epsilon_is_the_accountants(noise, rounds):
    """Of numerical composition of the rounds, which knows nothing of the closed form."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    found = epsilon_of(noise, 1e-5, rounds)
    pld = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    pld.compose(GaussianDpEvent(noise), rounds)
    assert found == pytest.approx(pld.get_epsilon(1e-5), rel=1e-3)
    rdp = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    rdp.compose(GaussianDpEvent(noise), rounds)
    assert found < rdp.get_epsilon(1e-5) < 1.3 * found
    assert epsilon_of(noise, 1e-5, 0) == 0


@needs_library
@pytest.mark.parametrize("epsilon", [0.5, 8.0, 100.0])
def test_noise_is_the_least_that_keeps_epsilon(epsilon):
    asked = Privacy(epsilon=epsilon, clip=1.0)
    noise = noise_for(asked, 8, 10)
    assert epsilon_of(noise, asked.delta, 10) == pytest.approx(epsilon, rel=1e-6)
    stated = asked.replace(noise=1.01 * noise)
    assert noise_for(stated, 8, 10) == stated.noise
    with pytest.raises(InputError, match=r"10 rounds with .*give a noise of at least"):
        noise_for(asked.replace(noise=0.99 * noise), 8, 10)


@needs_library
def test_the_noise_that_a_refusal_names_is_enough():
    asked = Privacy(epsilon=3.0, clip=1.0, noise=0.1)
    with pytest.raises(InputError) as refused:
        noise_for(asked, 8, 10)
    named = float(str(refused.value).split("at least ")[1].split(",")[0])
    assert noise_for(asked.replace(noise=named), 8, 10) == named


@needs_library
def test_a_delta_that_gives_somebody_away_is_refused():
    with pytest.raises(InputError, match=r"one of 8 clients .*less than 0.125"):
        noise_for(Privacy(epsilon=3.0, clip=1.0, delta=0.125), 8, 10)


@pytest.mark.skipif(find_spec("dp_accounting") is not None, reason="dp-accounting is installed")
def test_a_sentence_says_that_the_library_is_missing():
    with pytest.raises(InputError, match=r"pip install \"paceline\[federate-dp\]\""):
        noise_for(Privacy(epsilon=3.0, clip=1.0), 8, 10)


def test_settings_stand_in_a_table_of_their_own(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text("[federate]\njob = 'a'\n[federate.privacy]\nepsilon = 8.0\nclip = 0.5")
    assert read_federate(file).privacy == Privacy(epsilon=8.0, clip=0.5, delta=1e-5, noise="auto")
    file.write_text("[federate]\njob = 'a'\n[federate.privacy]\nepsilon = 8.0\nnoise = 0.0")
    with pytest.raises(InputError, match=r"federate\.privacy\.(noise|clip)"):
        read_federate(file)
