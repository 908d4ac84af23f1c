"""Law: held-out loss as a function of parameters and tokens, fitted with what is uncertain of it.

    loss = floor + a / N^alpha + b / D^beta

(https://arxiv.org/abs/2203.15556, section 3.3) with N in millions of parameters that multiply
(blocks and head) and D in millions of tokens; those of a text that is read again are worth less
than new ones. For given exponents the rest is least squares with
terms that are not negative, so the fit is a search over two numbers: it needs no starting values.
A few small runs say little of the exponents; they are held near those of published fits, the more
so the more the runs scatter around the law. Losses of short trainings fall faster and faster at
first, which no such law does: a run counts by its length.

Intervals come from a parametric bootstrap: losses are drawn anew around the fitted law, with a
standard deviation that is itself drawn, since few runs tell it badly. They cover what runs
scatter, not that the law may bend beyond the runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NUM_DRAWS = 200
# Of exponents: bounds; what published fits of decoders scatter around (0.28 to 0.5), and how far.
_LOW, _HIGH, _USUAL, _SPREAD = 0.05, 1.2, 0.37, 0.15
# Two runs that differ in their seed alone differ by some 0.3 % in loss; known as well as two runs.
_SEED_NOISE, _SEED_RUNS = 0.003, 2.0
# Readings of a text after the first, over which the worth of another one falls to 1/e
# (https://arxiv.org/abs/2305.16264, table 1).
_READINGS = 15.4
_GRID, _ZOOMS, _REPEATS = 24, 3, 3
_SETS = [np.array(kept) for size in (1, 2, 3) for kept in combinations(range(3), size)]


@dataclass(frozen=True)
class Point:
    """A run."""

    params: float
    """Those that multiply: of blocks and head."""
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    """Of one family of networks on one text."""

    floor: float
    """What no size and no length takes away."""
    a: float
    alpha: float
    b: float
    beta: float
    text_tokens: int | None = None
    """Of the text that is trained on; None: it has no end."""

    def loss(self, params: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
        """Of a run.

        Args:
            params: see `Point`.
            tokens: it is trained on.
        """
        x, y = np.asarray(params, float) / 1e6, worth(tokens, self.text_tokens) / 1e6
        return np.asarray(self.floor + self.a * x**-self.alpha + self.b * y**-self.beta)


def worth(tokens: npt.ArrayLike, text_tokens: int | None) -> Array:
    """How many new tokens are worth as much as tokens of a text that is read again and again
    (https://arxiv.org/abs/2305.16264, equation 5).

    Args:
        text_tokens: see `Law`.
    """
    read = np.asarray(tokens, float)
    if text_tokens is None:
        return read
    again = np.maximum(read / text_tokens - 1, 0)
    return np.minimum(read, text_tokens) + text_tokens * _READINGS * -np.expm1(-again / _READINGS)


@dataclass(frozen=True)
class Fit:
    """The law of some runs, and what it might as well be."""

    points: tuple[Point, ...]
    law: Law
    noise: float
    """Standard deviation of a loss around the law, as a share of it; of one of the longest runs."""
    draws: tuple[tuple[Law, float], ...]
    """Laws of losses that were drawn anew, each with the noise that it was drawn with."""

    def interval(self, params: float, tokens: float, share: float = 0.9) -> tuple[float, float]:
        """Between which the loss of a new run is expected to lie."""
        random = np.random.default_rng(1)
        drawn = [
            float(law.loss(params, tokens)) * (1 + noise * random.standard_normal())
            for law, noise in self.draws
        ]
        low, high = np.quantile(drawn, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)


def fit(points: Iterable[Point], text_tokens: int | None = None, seed: int = 0) -> Fit:
    """The law of some runs.

    Args:
        points: of two sizes and two lengths at least.
        text_tokens: see `Law`.
        seed: of the draws.
    """
    found = tuple(points)
    params = np.array([one.params for one in found])
    tokens = np.array([one.tokens for one in found])
    losses = np.array([one.loss for one in found])
    weights = tokens / tokens.max()
    freedom = max(len(found) - 5, 0) + _SEED_RUNS
    noise2 = _SEED_NOISE**2
    for _ in range(_REPEATS):
        law = _fit(params, tokens, losses, noise2, text_tokens)
        expected = law.loss(params, tokens)
        off = losses / expected - 1
        noise2 = float(weights @ off**2 + _SEED_RUNS * _SEED_NOISE**2) / freedom
    random = np.random.default_rng(seed)
    draws = []
    for _ in range(NUM_DRAWS):
        noise = (noise2 * freedom / random.chisquare(freedom)) ** 0.5
        drawn = expected * (1 + noise * random.standard_normal(len(found)) / weights**0.5)
        draws.append((_fit(params, tokens, drawn, noise**2, text_tokens), noise))
    return Fit(found, law, noise2**0.5, tuple(draws))


def _fit(
    params: Array, tokens: Array, losses: Array, noise2: float, text_tokens: int | None
) -> Law:
    """The likeliest law where relative errors have a variance and exponents are near usual ones."""
    x, y, weights = params / 1e6, worth(tokens, text_tokens) / 1e6, tokens / tokens.max()
    bounds = [(_LOW, _HIGH), (_LOW, _HIGH)]
    best = _Best(np.inf, 0.0, 0.0, np.zeros(3))
    for _ in range(_ZOOMS):
        alphas, betas = (np.linspace(low, high, _GRID) for low, high in bounds)
        found = _on_grid(x, y, losses, weights, alphas, betas, noise2)
        best = min(best, found, key=lambda one: one.cost)
        bounds = [
            (max(_LOW, at - 2 * step), min(_HIGH, at + 2 * step))
            for at, step in (
                (best.alpha, alphas[1] - alphas[0]),
                (best.beta, betas[1] - betas[0]),
            )
        ]
    floor, a, b = map(float, best.factors)
    return Law(floor, a, best.alpha, b, best.beta, text_tokens)


@dataclass(frozen=True)
class _Best:
    cost: float
    alpha: float
    beta: float
    factors: Array
    """Of the three terms."""


def _on_grid(
    x: Array,
    y: Array,
    losses: Array,
    weights: Array,
    alphas: Array,
    betas: Array,
    noise2: float,
) -> _Best:
    """The best of a grid of exponents.

    Args:
        x: millions of parameters.
        y: millions of tokens.
        weights: of the runs.
    """
    terms = np.empty((len(alphas), len(betas), len(losses), 3))
    terms[..., 0] = 1
    terms[..., 1] = (x ** -alphas[:, None])[:, None, :]
    terms[..., 2] = (y ** -betas[:, None])[None, :, :]
    roots = weights**0.5
    terms *= (roots / losses)[:, None]
    factors, squares = _not_negative(terms, roots)
    usual = ((alphas[:, None] - _USUAL) ** 2 + (betas - _USUAL) ** 2) / _SPREAD**2
    cost = squares / noise2 + usual
    at = np.unravel_index(np.argmin(cost), cost.shape)
    return _Best(float(cost[at]), float(alphas[at[0]]), float(betas[at[1]]), factors[at])


def _not_negative(terms: Array, wanted: Array) -> tuple[Array, Array]:
    """Factors, none negative, with which terms sum best to what is wanted; and the squares left.

    Args:
        terms: (..., points, 3).
        wanted: (points,)

    Returns:
        (..., 3) and (...): the best of all sets of terms whose least squares are not negative.
    """
    best = np.zeros((*terms.shape[:-2], 3))
    least = np.full(terms.shape[:-2], float(wanted @ wanted))  # with no term at all
    for kept in _SETS:
        part = terms[..., kept]
        square = np.swapaxes(part, -1, -2) @ part + 1e-13 * np.eye(len(kept))
        factors = np.linalg.solve(square, (wanted @ part)[..., None])
        left = ((part @ factors)[..., 0] - wanted) ** 2
        squares = left.sum(-1)
        is_better = (factors[..., 0] >= 0).all(-1) & (squares < least)
        least = np.where(is_better, squares, least)
        whole = np.zeros_like(best)
        whole[..., kept] = factors[..., 0]
        best = np.where(is_better[..., None], whole, best)
    return best, least


# ---- the learning rate ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in their learning rate alone."""

    tokens: float
    rates: tuple[float, ...]
    """Increasing."""
    losses: tuple[float | None, ...]
    """None: it failed."""

    @property
    def is_open(self) -> bool:
        """Whether the best is the smallest or the largest that was tried."""
        at = self.best
        return at in (0, len(self.rates) - 1)

    @property
    def best(self) -> int:
        """Index of the least loss."""
        return min(range(len(self.rates)), key=lambda at: _or_inf(self.losses[at]))

    @property
    def optimum(self) -> float:
        """The learning rate of the least loss: of a parabola, over the logarithm of the rate,
        through the best and those from a third to three times as large, by least squares."""
        best = self.rates[self.best]
        near = [
            (float(np.log(rate / best)), loss)
            for rate, loss in zip(self.rates, self.losses, strict=True)
            if loss is not None and 1 / 3 < rate / best < 3
        ]
        x, losses = np.transpose(near)
        if not x.min() < 0 < x.max():
            return best
        bend, slope, _ = np.polyfit(x, losses, 2)
        if bend <= 0:
            return best
        return float(best * np.exp(np.clip(-slope / (2 * bend), x.min(), x.max())))

    def drawn(self, noise: float, random: np.random.Generator) -> "Sweep":
        """The same with losses drawn anew.

        Args:
            noise: share of them.
        """
        losses = [
            None if loss is None else loss * (1 + noise * random.standard_normal())
            for loss in self.losses
        ]
        return replace(self, losses=tuple(losses))


# Of a longer training the best rate is smaller: as D^-0.32 (https://arxiv.org/abs/2409.19913), and
# what others found scatters around it so much. Two lengths that a ladder can afford say less.
_FALL, _FALL_SPREAD = -0.32, 0.1


@dataclass(frozen=True)
class RateLaw:
    """The best learning rate by the length of training: rate = at_one x D^slope, D in millions of
    tokens. Width and depth don't matter under muP."""

    at_one: float
    slope: float

    def rate(self, tokens: float) -> float:
        """At the peak, for a run of so many tokens."""
        return float(self.at_one * (tokens / 1e6) ** self.slope)


def rate_law(sweep: Sweep, slope: float = _FALL) -> RateLaw:
    """The law through the best rate of a sweep."""
    return RateLaw(sweep.optimum * (sweep.tokens / 1e6) ** -slope, slope)


def rate_interval(
    sweep: Sweep, tokens: float, noise: float, share: float = 0.9
) -> tuple[float, float]:
    """Between which the best rate of a run of so many tokens is expected to lie, as far as the
    scatter of losses and of published slopes goes."""
    random = np.random.default_rng(2)
    drawn = [
        rate_law(sweep.drawn(noise, random), random.normal(_FALL, _FALL_SPREAD)).rate(tokens)
        for _ in range(NUM_DRAWS)
    ]
    low, high = np.quantile(drawn, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _or_inf(loss: float | None) -> float:
    return float("inf") if loss is None else loss
