"""The laws of a ladder: known ones are found again, and intervals cover what they should."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.search.ladder.law import Law, Point, Sweep, fit, rate_interval, rate_law, worth

# Of a small vocabulary on a plain text.
TRUE = Law(floor=1.4, a=0.45, alpha=0.36, b=0.7, beta=0.31)
SIZES, LENGTHS = (5e4, 2e5, 8e5, 3e6), (1e6, 2e6, 4e6)


def points(law: Law, noise: float = 0.0, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    return [
        Point(n, d, float(law.loss(n, d)) * (1 + noise * random.standard_normal()))
        for n in SIZES
        for d in LENGTHS
    ]


@pytest.mark.parametrize(
    "law",
    [
        TRUE,
        Law(floor=1.7, a=0.2, alpha=0.5, b=1.0, beta=0.28),
        Law(floor=0.8, a=0.9, alpha=0.28, b=0.3, beta=0.45),
    ],
)
def test_a_known_law_is_found_again(law):
    found = fit(points(law))
    for params, tokens in ((3e6, 4e6), (3e7, 4e6), (3e7, 3e7)):
        assert found.law.loss(params, tokens) == pytest.approx(law.loss(params, tokens), rel=5e-3)
    assert found.law.alpha == pytest.approx(law.alpha, abs=0.1)
    assert found.law.beta == pytest.approx(law.beta, abs=0.1)
    assert found.noise < 0.003


def test_the_law_of_a_text_that_is_read_again_is_found_again():
    law = replace(TRUE, text_tokens=1_500_000)
    found = fit(points(law), law.text_tokens).law
    for params, tokens in ((3e6, 4e6), (3e7, 4e6), (3e7, 3e7)):
        assert found.loss(params, tokens) == pytest.approx(law.loss(params, tokens), rel=5e-3)
    once = fit(points(law)).law
    assert once.loss(3e7, 2e8) < 0.97 * law.loss(3e7, 2e8)  # as if all of it were new


def test_what_tokens_are_worth():
    text = 1000
    assert worth([10, 1000], text) == pytest.approx([10, 1000])
    assert worth(4000, text) == pytest.approx(3726, abs=1)  # three more readings, by hand
    assert worth(1e9, text) == pytest.approx(16_400)
    assert worth(1e9, None) == 1e9


def test_no_term_is_negative():
    found = fit(points(Law(floor=0.0, a=2.0, alpha=0.3, b=0.0, beta=0.3), 0.002))
    laws = [found.law, *(law for law, _ in found.draws)]
    assert all(min(law.floor, law.a, law.b) >= 0 for law in laws)


def test_nine_in_ten_intervals_cover_a_run_ten_times_as_large():
    random = np.random.default_rng(7)
    params, tokens, noise, covered, widths = 3e7, 1e7, 0.003, 0, []
    for seed in range(40):
        low, high = fit(points(TRUE, noise, seed)).interval(params, tokens)
        loss = float(TRUE.loss(params, tokens)) * (1 + noise * random.standard_normal())
        covered += low <= loss <= high
        widths.append((high - low) / loss)
    assert covered >= 33  # of 40; fewer than 0.6 % of binomials of 0.9 have less
    assert np.median(widths) < 0.15


def test_an_interval_grows_with_noise_and_distance():
    quiet, loud = fit(points(TRUE, 0.001)), fit(points(TRUE, 0.02))
    width = {
        (name, n): high - low
        for name, found in (("quiet", quiet), ("loud", loud))
        for n in (3e6, 3e8)
        for low, high in [found.interval(n, 4e6)]
    }
    assert width["quiet", 3e6] < width["loud", 3e6]
    assert width["quiet", 3e6] < width["quiet", 3e8]
    assert quiet.noise < loud.noise


# ---- the learning rate ---------------------------------------------------------------------------


def sweep(tokens: float, optimum: float) -> Sweep:
    rates = tuple(1e-3 * 2.0**at for at in range(-2, 3))
    losses = tuple(2 + 0.05 * float(np.log2(rate / optimum)) ** 2 for rate in rates)
    return Sweep(tokens, rates, losses)


def test_the_best_rate_falls_with_the_length():
    short = sweep(1e6, 1.5e-3)
    found = rate_law(short)
    assert found.rate(1e6) == pytest.approx(1.5e-3, rel=1e-6)
    assert found.rate(4e6) == pytest.approx(1.5e-3 * 4**-0.32, rel=1e-6)
    low, high = rate_interval(short, 4e7, 0.003)
    assert low < found.rate(4e7) < high
    near, far = (rate_interval(short, tokens, 0.003) for tokens in (2e6, 4e7))
    assert near[1] / near[0] < far[1] / far[0]  # published slopes differ
    loud = rate_interval(short, 2e6, 0.02)
    assert near[1] / near[0] < loud[1] / loud[0]


def test_rates_between_make_the_optimum_surer():
    def scatter(rates: tuple[float, ...]) -> float:
        losses = tuple(2 + 0.05 * float(np.log2(rate / 1.1e-3)) ** 2 for rate in rates)
        drawn = [Sweep(1e6, rates, losses).drawn(0.005, random).optimum for _ in range(400)]
        return float(np.std(np.log(drawn)))

    random = np.random.default_rng(3)
    three = tuple(1e-3 * 2.0**at for at in range(-1, 2))
    five = tuple(1e-3 * 2.0 ** (at / 2) for at in range(-2, 3))
    assert scatter(five) < 0.9 * scatter(three)


@pytest.mark.parametrize("losses", [(3, 2, 1, None, None), (1, 2, 3, 4, 5), (None, 1, 2, 3, 4)])
def test_a_sweep_without_a_neighbour_on_a_side_gives_what_was_tried(losses):
    found = Sweep(1e6, (1.0, 2.0, 4.0, 8.0, 16.0), losses)
    assert found.optimum == found.rates[found.best]
