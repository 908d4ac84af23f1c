"""Proposals: the point that is worth its device time most, of many that were never run.

How it works: points are drawn at random, and around the trials that seem best. The planner refuses
what can't run, and says of the others every objective but the loss, and what their training costs.
A Gaussian process over settings and lengths of training, fitted to all losses so far, says what
loss to expect and how sure that is (several lengths in one process:
https://arxiv.org/abs/1605.07079), at the last rung that a few trials have come to: beyond it
nothing is sure, and every point would look as good. A point is worth the hypervolume
that it is expected to add, divided by its cost (improvement per second:
https://arxiv.org/abs/1206.2944). That expectation is taken over places drawn in the box of
objectives: each one that no trial dominates counts with the probability that the point does.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.search.forecast import Forecast, forecast
from paceline.search.halving import Halving, Trial
from paceline.search.space import (
    Choices,
    Dimension,
    Point,
    Range,
    Search,
    dimensions_of,
    job_at,
    settings_of,
)

Floats = NDArray[np.float64]

_AT_ONCE, _AROUND, _MOST_DRAWN = 4, 6, 200
"""Points a pool is drawn from: anywhere, around good trials, and at most where none can run."""
_POOLS = 8
"""Pools whose points wait for a later turn."""
_FIRST_TRIALS = 4
"""Losses that the process begins with."""
_NUM_PLACES = 512
_MOST_MOVES = 20
"""Of the lengths over which losses change, when they are fitted."""
_STEP = 0.15
"""Standard deviation of a step around a trial, of a setting's range."""


@dataclass(frozen=True)
class Candidate:
    """A point that can run."""

    point: Point
    expected: Forecast


@dataclass(frozen=True)
class Refusal:
    """A point that can't."""

    point: Point
    reason: str


class Proposals:
    """Of one search. What is proposed follows from its trials alone."""

    def __init__(
        self, search: Search, job: JobSpec, cluster: Cluster, halving: Halving, *, is_here: bool
    ) -> None:
        """Begin; nothing is drawn yet."""
        self._search, self._job, self._cluster = search, job, cluster
        self._halving, self._is_here = halving, is_here
        self._dimensions = dimensions_of(search)
        self._pools: dict[int, list[Candidate | Refusal]] = {}

    def pool(self, trials: Sequence[Trial]) -> list[Candidate | Refusal]:
        """Points that are no trials yet; the Job's own is the first, where the space has it."""
        turn, done = len(trials), {_key(trial.point) for trial in trials}
        turns = range(max(0, turn - _POOLS + 1), turn + 1)
        self._pools = {each: self._pools.get(each) or self._drawn(each) for each in turns}
        waiting = [one for pool in self._pools.values() for one in pool]
        waiting += self._asked(self._around(trials))
        by_key = {_key(one.point): one for one in waiting}
        return [one for key, one in by_key.items() if key not in done]

    def best(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> Candidate:
        """The one that is worth its cost most."""
        if not trials:
            return candidates[0]
        if _num_at(trials, 0) < _FIRST_TRIALS:  # the cheaper half, as it is drawn
            middle = np.median([one.expected.cost_s for one in candidates])
            return next(one for one in candidates if one.expected.cost_s <= middle)
        costs = np.array([one.expected.cost_s for one in candidates])
        worth = self._gains(candidates, trials) / (costs + np.median(costs))
        return candidates[int(np.argmax(worth))]

    # ---- points

    def _drawn(self, turn: int) -> list[Candidate | Refusal]:
        """One pool: until so many can run."""
        draw = np.random.default_rng([self._search.seed, turn])
        own = self._own_point() if turn == 0 else None
        found = self._asked([] if own is None else [own])
        while sum(isinstance(one, Candidate) for one in found) < _AT_ONCE:
            if len(found) >= _MOST_DRAWN:
                break
            places = draw.random((_AT_ONCE, len(self._dimensions)))
            found += self._asked(map(self._point_at, places))
        return found

    def _around(self, trials: Sequence[Trial]) -> Iterator[Point]:
        """Near the best at the last rung that any has come to."""
        rung = max((len(trial.results) for trial in trials if not trial.failed), default=0) - 1
        best = self._halving.at(trials, max(rung, 0))[:4] + self._halving.at(trials, 0)[:4]
        draw = np.random.default_rng([self._search.seed, len(trials), 1])
        for at in range(_AROUND if best else 0):
            place = self._place_of(best[at % len(best)].point)
            moved = draw.random(len(place)) < 0.5
            moved[draw.integers(len(place))] = True
            steps = draw.normal(0, _STEP, len(place)) * moved
            yield self._point_at(np.clip(place + steps, 0, 1))

    def _asked(self, points: Iterable[Point]) -> list[Candidate | Refusal]:
        """What the planner says of points."""
        found: list[Candidate | Refusal] = []
        for point in points:
            try:
                job = job_at(self._job, point)
                said = forecast(job, self._cluster, self._search, is_here=self._is_here)
            except InputError as error:
                found.append(Refusal(point, str(error)))
            else:
                found.append(Candidate(point, said))
        return found

    def _own_point(self) -> Point | None:
        """What the Job says of the space's settings; None: that lies outside of it."""
        said = settings_of(self._job.model_dump(exclude_none=True))
        point: dict[str, Any] = {}
        for name, dimension in self._dimensions.items():
            if isinstance(dimension, Range):
                value = said.get(name)
                inside = isinstance(value, int | float) and dimension.low <= value <= dimension.high
                is_kind = isinstance(value, int) or not dimension.is_whole
                if not (inside and is_kind):
                    return None
                point[name] = value
                continue
            for value in dimension.values.values():
                if settings_of({name: value}).items() <= said.items():
                    point[name] = value
                    break
            else:
                return None
        return point

    def _point_at(self, place: Floats) -> Point:
        """The point at a place of the unit cube."""
        named = zip(self._dimensions.items(), place.tolist(), strict=True)
        return {name: _value_at(dimension, share) for (name, dimension), share in named}

    def _place_of(self, point: Point) -> Floats:
        return np.array(
            [_share_of(dimension, point[name]) for name, dimension in self._dimensions.items()]
        )

    # ---- worth

    def _gains(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> Floats:
        """Hypervolume that each is expected to add, as a share of the box."""
        from scipy.special import ndtr

        means, stds, losses = self._expected_losses(candidates, trials)
        others = [name for name in self._search.objectives if name != "loss"]
        new = np.array([[one.expected.figures[name] for name in others] for one in candidates])
        old = np.array([[one.figures[name] for name in others] for one in trials])
        lows = [min(np.exp(means - 2 * stds).min(), losses.min()), *_least(new, old)]
        highs = [losses.max(), *_most(new, old)]
        draw = np.random.default_rng([self._search.seed, len(trials), 2])
        places = draw.uniform(lows, highs, (_NUM_PLACES, 1 + len(others)))
        dominated = (losses <= places[:, :1]) & np.all(old <= places[:, None, 1:], axis=2)
        free = places[~dominated.any(axis=1)]
        within = np.all(new[:, None] <= free[None, :, 1:], axis=2)
        below = ndtr((np.log(free[None, :, 0]) - means[:, None]) / stds[:, None])
        return np.sum(within * below, axis=1) / _NUM_PLACES

    def _expected_losses(
        self, candidates: Sequence[Candidate], trials: Sequence[Trial]
    ) -> tuple[Floats, Floats, Floats]:
        """Logarithms of the losses to expect of candidates, mean and standard deviation; losses of
        trials at the same rung, where they have not come to it as expected."""
        rung = max(
            (at for at in range(len(self._halving.steps)) if _num_at(trials, at) >= _FIRST_TRIALS),
            default=0,
        )
        steps = self._halving.steps[rung]
        model = _LossModel(self._dimensions, self._halving.steps)
        model.fit(trials)
        means, stds = model.predict([one.point for one in candidates], steps)
        expected, _ = model.predict([one.point for one in trials], steps)
        pairs = zip([trial.loss(rung) for trial in trials], np.exp(expected).tolist(), strict=True)
        losses = np.array([end if one is None else one for one, end in pairs])
        return means, stds, np.minimum(losses, model.worst)


class _LossModel:
    """Logarithms of losses over settings and steps."""

    def __init__(self, dimensions: Mapping[str, Dimension], steps: Sequence[int]) -> None:
        self._columns = [column for each in dimensions.items() for column in _columns(*each)]
        self._steps = steps

    def fit(self, trials: Sequence[Trial]) -> None:
        """To all rungs of all trials."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        seen = [
            (trial.point, steps, math.inf if result.loss is None else result.loss)
            for trial in trials
            for steps, result in zip(self._steps, trial.results, strict=False)
        ]
        rows = np.array([self._row(point, steps) for point, steps, _ in seen])
        losses = np.array([loss for _, _, loss in seen])
        # How bad the bad ones are says nothing about the good ones.
        ends = losses[np.isfinite(losses)]
        least, most = np.quantile(ends, [0, 0.75]) if ends.size else (1.0, 1.0)
        self.worst = float(most + (most - least) / 2)
        logs = np.log(np.clip(losses, 1e-12, self.worst))
        lengths = Matern(np.full(rows.shape[1], 0.5), (0.1, 10.0), nu=2.5)
        kernel = ConstantKernel(1.0, (0.1, 10.0)) * lengths + WhiteKernel(1e-2, (1e-4, 0.2))
        self._process = GaussianProcessRegressor(kernel, optimizer=_fitted, normalize_y=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # lengths at a bound are settings that don't matter
            self._process.fit(rows, logs)

    def predict(self, points: Sequence[Point], steps: int) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm, each of one point."""
        rows = np.array([self._row(point, steps) for point in points])
        means, stds = self._process.predict(rows, return_std=True)
        return means, np.maximum(stds, 1e-9)

    def _row(self, point: Point, steps: int) -> list[float]:
        settings = settings_of(point)
        first, last = math.log(self._steps[0]), math.log(self._steps[-1])
        length = (math.log(steps) - first) / ((last - first) or 1.0)
        return [*(column.value(settings) for column in self._columns), length]


def _fitted(value_of: Callable[[Floats], Any], start: Floats, bounds: Floats) -> tuple[Any, Any]:
    """The least of a function with its gradient, in few moves."""
    from scipy.optimize import minimize

    moves = {"maxiter": _MOST_MOVES}
    found = minimize(value_of, start, jac=True, bounds=bounds, method="L-BFGS-B", options=moves)
    return found.x, found.fun


@dataclass(frozen=True)
class _Column:
    """A number between 0 and 1 that says a setting."""

    name: str
    scale: Dimension

    def value(self, settings: Mapping[str, Any]) -> float:
        """Of a point; 0.5 where it doesn't set it."""
        return _share_of(self.scale, settings[self.name]) if self.name in settings else 0.5


@dataclass(frozen=True)
class _IsColumn:
    """Whether a setting has one value."""

    name: str
    wanted: Any

    def value(self, settings: Mapping[str, Any]) -> float:
        """Of a point."""
        return float(settings.get(self.name) == self.wanted)


def _columns(name: str, dimension: Dimension) -> list[_Column | _IsColumn]:
    if isinstance(dimension, Range):
        return [_Column(name, dimension)]
    by_name: dict[str, list[Any]] = {}
    for value in dimension.values.values():
        for key, one in settings_of({name: value}).items():
            by_name.setdefault(key, []).append(one)
    columns: list[_Column | _IsColumn] = []
    for key, values in by_name.items():
        if all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            low, high = min(values), max(values)
            if low < high:
                columns.append(_Column(key, Range(low=float(low), high=float(high), log=low > 0)))
        else:
            columns += [_IsColumn(key, one) for one in values]
    return columns


def _value_at(dimension: Dimension, share: float) -> Any:
    """The value at a share of a setting's range."""
    if isinstance(dimension, Choices):
        values = list(dimension.values.values())
        return values[min(int(share * len(values)), len(values) - 1)]
    low, high = dimension.low, dimension.high
    if dimension.log:
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    if not dimension.is_whole:
        return min(max(value, low), high)
    step = dimension.step or 1
    return min(
        int(low) + step * round((value - low) / step),
        int(low) + (int(high) - int(low)) // step * step,
    )


def _share_of(dimension: Dimension, value: Any) -> float:
    """Where in its range a setting stands: 0..1."""
    if isinstance(dimension, Choices):
        at = list(dimension.values).index(dimension.key_of(value))
        return (at + 0.5) / len(dimension.values)
    low, high = float(dimension.low), float(dimension.high)
    if dimension.log:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def _num_at(trials: Sequence[Trial], rung: int) -> int:
    return sum(trial.loss(rung) is not None for trial in trials)


def _key(point: Point) -> str:
    return json.dumps(settings_of(point), sort_keys=True)


def _least(*found: Floats) -> list[float]:
    return np.concatenate(found).min(axis=0).tolist()


def _most(*found: Floats) -> list[float]:
    return np.concatenate(found).max(axis=0).tolist()
