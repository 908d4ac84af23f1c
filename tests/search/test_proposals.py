"""Proposals: what is drawn, what it is worth, and that it is better than chance."""

import itertools
import math

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.search import proposals as module
from paceline.search.forecast import Forecast
from paceline.search.halving import Halving, RungResult, Trial
from paceline.search.proposals import Candidate, Proposals, Refusal
from paceline.search.rules import hypervolume
from paceline.search.space import Choices, Range, Search, dimensions_of, settings_of
from tests.command_line import write_tiny_job

pytest.importorskip("sklearn")

SPACE = {
    "optim.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.num_layers": {"low": 1, "high": 8},
    "model.hidden_size": [32, 64, 128, 256],
}
STEPS = (10, 30, 90)


def search_of(space, **settings):
    asked = {"job": "job.toml", "objectives": ["loss", "memory"], "space": space}
    return Search.parse({**asked, **settings})


@pytest.fixture
def planner(monkeypatch):
    """One that says figures of a simple kind, and refuses seven layers and more."""

    def said(job, _cluster, _search, *, is_here):
        model = job.model
        if model.num_layers > 6:
            raise InputError("it has too many layers.")
        size = model.num_layers * model.hidden_size
        return Forecast(job, size * 1e-5, size * 1e-5, {"memory": 1e4 * size})

    monkeypatch.setattr(module, "forecast", said)


def proposals_of(tmp_path, space=SPACE, **settings):
    job = read_job(write_tiny_job(tmp_path))
    search = search_of(space, **settings)
    halving = Halving(STEPS, 3, search.objectives)
    return Proposals(search, job, None, halving, is_here=True)


def drawn(proposals, count):
    """So many candidates."""
    pools = (proposals._drawn(turn) for turn in itertools.count())
    found = (one for pool in pools for one in pool if isinstance(one, Candidate))
    return [*itertools.islice(found, count)]


def trial_of(number, candidate, *losses):
    expected = candidate.expected
    results = tuple(map(RungResult, losses))
    return Trial(number, candidate.point, expected.figures, expected.cost_s, results)


def true_loss(candidate, steps):
    """Best at a rate that falls with size; less for larger networks, and for longer training."""
    job = candidate.expected.job
    size = job.model.num_layers * job.model.hidden_size
    off = math.log10(job.optim.lr) + 1.5 + 0.3 * math.log10(size / 64)
    return 1.5 + 2 / size**0.3 + 0.5 * off**2 + 3 / steps**0.5


@pytest.mark.parametrize(
    ("dimension", "values"),
    [
        (Range(low=1e-4, high=1e-1, log=True), [1e-4, 3e-3, 1e-1]),
        (Range(low=-1.0, high=3.0), [-1.0, 0.0, 3.0]),
        (Range(low=1, high=9), [*range(1, 10)]),
        (Range(low=8, high=64, log=True), [*range(8, 65)]),
        (Range(low=2, high=11, step=4), [2, 6, 10]),
        (Choices({"1": 1, '"a"': "a", "null": None}), [1, "a", None]),
    ],
)
def test_a_value_and_its_share_say_the_same(dimension, values):
    for value in values:
        found = module._value_at(dimension, module._share_of(dimension, value))
        is_float = isinstance(value, float)
        assert found == (pytest.approx(value, rel=1e-12) if is_float else value)
    drawn = {module._value_at(dimension, share) for share in np.linspace(0, 1, 997).tolist()}
    if not isinstance(values[0], float):
        assert drawn == set(values)
    else:
        assert min(values) <= min(drawn) <= max(drawn) <= max(values)


def test_tables_numbers_and_words_become_columns():
    space = {
        "model": [{"hidden_size": 64, "num_heads": 4}, {"hidden_size": 128, "num_heads": 8}],
        "layout.precision": ["fp32", "bf16"],
        "optim.lr": {"low": 1e-4, "high": 1e-2, "log": True},
    }
    model = module._LossModel(dimensions_of(search_of(space)), STEPS)
    first = {"model": space["model"][0], "layout.precision": "bf16", "optim.lr": 1e-3}
    second = {"model": space["model"][1], "layout.precision": "fp32", "optim.lr": 1e-2}
    assert model._row(first, 10) == pytest.approx([0, 0, 0, 1, 0.5, 0])
    assert model._row(second, 30) == pytest.approx([1, 1, 1, 0, 1, 0.5])


def test_the_jobs_own_point_comes_first_and_only_where_the_space_has_it(planner, tmp_path):
    proposals = proposals_of(tmp_path)
    [own, *_] = pool = proposals.pool([])
    assert proposals.best([one for one in pool if isinstance(one, Candidate)], []) == own
    assert own.point == {"optim.lr": 3e-3, "model.num_layers": 2, "model.hidden_size": 32}
    space = {**SPACE, "model.hidden_size": [64, 128]}
    assert all(
        one.point["model.hidden_size"] > 32 for one in proposals_of(tmp_path, space).pool([])
    )
    tables = {"model": [{"hidden_size": 64}, {"hidden_size": 32, "num_layers": 2}]}
    [own, *_] = proposals_of(tmp_path, tables).pool([])
    assert settings_of(own.point) == {"model.hidden_size": 32, "model.num_layers": 2}


def test_a_pool_is_the_same_again_and_lacks_trials_and_what_is_refused(planner, tmp_path):
    proposals, trials = proposals_of(tmp_path), []
    for number in range(1, 13):
        pool = proposals.pool(trials)
        assert pool == proposals_of(tmp_path).pool(trials)  # as after a kill
        candidates = [one for one in pool if isinstance(one, Candidate)]
        refused = [one for one in pool if isinstance(one, Refusal)]
        assert len(candidates) >= 4
        assert all(one.point["model.num_layers"] <= 6 for one in candidates)
        assert {one.reason for one in refused} <= {"it has too many layers."}
        assert not [one for one in pool if one.point in [trial.point for trial in trials]]
        best = proposals.best(candidates, trials)
        assert best == proposals_of(tmp_path).best(candidates, trials)
        trials.append(trial_of(number, best, true_loss(best, 10)))


def test_a_small_space_is_exhausted(planner, tmp_path):
    space = {"model.num_layers": [1, 2, 7], "model.hidden_size": [32, 64]}
    proposals, trials = proposals_of(tmp_path, space), []
    for number in itertools.count(1):
        candidates = [one for one in proposals.pool(trials) if isinstance(one, Candidate)]
        if not candidates:
            break
        best = proposals.best(candidates, trials)
        trials.append(trial_of(number, best, 3.0 - 0.1 * number))
    assert len(trials) == 4


def test_a_gain_is_the_expected_hypervolume(planner, tmp_path, monkeypatch):
    """Against losses drawn from the same distribution, each with the volume that it adds."""
    monkeypatch.setattr(module, "_NUM_PLACES", 200_000)
    proposals = proposals_of(tmp_path)
    pool = drawn(proposals, 8)
    trials = [trial_of(at, one, 3.0) for at, one in enumerate(pool[:4], 1)]
    means, stds = np.log([2.8, 2.0, 2.6, 3.2]), np.array([0.1, 0.05, 0.3, 1e-9])
    ends = np.array([3.0, 2.7, 2.9, 2.2])
    monkeypatch.setattr(Proposals, "_expected_losses", lambda *_: (means, stds, ends))
    found = proposals._gains(pool[4:], trials)

    memory = [one.expected.figures["memory"] for one in pool]
    low = min(np.exp(means - 2 * stds).min(), ends.min()), min(memory)
    worst = ends.max(), max(memory)
    box = (worst[0] - low[0]) * (worst[1] - low[1])
    front = [*zip(ends.tolist(), memory[:4], strict=True)]
    before, draw = hypervolume(front, worst), np.random.default_rng(0)
    for at in range(4):
        losses = np.exp(draw.normal(means[at], stds[at], 2000)).clip(min=low[0])
        volumes = [hypervolume([*front, (loss, memory[4 + at])], worst) for loss in losses.tolist()]
        assert found[at] == pytest.approx((np.mean(volumes) - before) / box, abs=3e-3)


@pytest.mark.parametrize("objectives", [["loss"], ["loss", "memory"]])
def test_points_that_are_proposed_beat_points_that_are_drawn(objectives, planner, tmp_path):
    """At equal predicted cost, on a known function, trials of the first rung alone."""

    def reached(seed, is_proposed):
        proposals, trials = proposals_of(tmp_path, objectives=objectives, seed=seed), []
        spent_s, values = 0.0, []
        while spent_s < 0.1:
            pool = [one for one in proposals.pool(trials) if isinstance(one, Candidate)]
            draw = np.random.default_rng([seed, len(trials)])
            any_one = pool[draw.integers(min(4, len(pool)))]
            best = proposals.best(pool, trials) if is_proposed else any_one
            trials.append(trial_of(len(trials) + 1, best, true_loss(best, 10)))
            values.append((true_loss(best, 90), best.expected.figures["memory"]))
            spent_s += best.expected.cost_s * 10
        if objectives == ["loss"]:
            return -min(loss for loss, _ in values)
        return hypervolume(values, (4.0, 2e7))

    ours, chance = ([reached(seed, each) for seed in range(5)] for each in (True, False))
    assert np.median(ours) > np.median(chance)
    assert np.mean(ours) > np.mean(chance)


def test_losses_that_failed_or_diverged_do_not_hide_the_good_ones(planner, tmp_path):
    proposals = proposals_of(tmp_path)
    pool = drawn(proposals, 20)
    trials = [trial_of(at, one, true_loss(one, 10)) for at, one in enumerate(pool[:10], 1)]
    trials += [trial_of(11, pool[10], None), trial_of(12, pool[11], 1e6)]
    means, stds, ends = proposals._expected_losses(pool[12:], trials)
    assert np.isfinite(means).all()
    assert (stds > 0).all()
    assert ends.max() < 10
