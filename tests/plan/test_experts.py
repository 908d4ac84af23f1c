"""Expert placement: pure functions, against brute force on tiny cases and stated figures."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.plan.experts import hot_experts, move_experts, rank_loads


def _skewed(layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """Loads as routers make them: log-normal, the busiest expert 3.5 times the mean."""
    return np.random.default_rng(seed).lognormal(sigma=0.5, size=(layers, experts)) * 1000


def _in_order(layers: int, experts: int) -> np.ndarray:
    return np.tile(np.arange(experts), (layers, 1))


def _imbalance(slots: np.ndarray, loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Busiest over mean."""
    ranks = rank_loads(slots, loads, num_ranks)
    return ranks.max(axis=1) / ranks.mean(axis=1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_close_to_the_best_of_all(ranks):
    for seed in range(12):
        loads = _skewed(1, 6, seed)
        found = _imbalance(move_experts(_in_order(1, 6), loads, ranks, target=1.0), loads, ranks)
        every = np.array(list(permutations(range(6))))
        best = _imbalance(every, np.repeat(loads, len(every), axis=0), ranks).min()
        assert 1 - 1e-12 <= found[0] / best <= 1 + 1e-9


@given(sizes=st.sampled_from([(8, 4), (8, 2), (6, 3), (4, 1)]), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_every_expert_has_one_slot_and_no_layer_gets_worse(sizes, seed):
    experts, ranks = sizes
    rng = np.random.default_rng(seed)
    loads = np.floor(rng.pareto(1.0, size=(3, experts)) * 4)  # wild, with zeros
    before = rng.permuted(_in_order(3, experts), axis=1)
    after = move_experts(before, loads, ranks)
    assert (np.sort(after, axis=1) == np.arange(experts)).all()
    peaks = [rank_loads(slots, loads, ranks).max(axis=1) for slots in (before, after)]
    assert (peaks[1] <= peaks[0] + 1e-9).all()


def test_drift_is_mended_by_few_moves():
    """After 10 % drift on 61 layers x 256 experts on 32 ranks (figures in the docs)."""
    loads = _skewed(61, 256)
    before = move_experts(_in_order(61, 256), loads, 32, target=1.0)
    drifted = loads * np.random.default_rng(1).lognormal(sigma=0.1, size=loads.shape)
    after = move_experts(before, drifted, 32)
    assert _imbalance(before, loads, 32).max() < 1.01
    assert _imbalance(before, drifted, 32).mean() > 1.07
    assert _imbalance(after, drifted, 32).max() <= 1.02
    assert (before // 8 != after // 8).mean() < 0.1


def test_nothing_moves_when_nothing_is_wrong():
    loads = _skewed(4, 32)
    before = move_experts(_in_order(4, 32), loads, 4)
    for now in (loads, loads * 0):
        assert (move_experts(before, now, 4) == before).all()


def test_a_case_worked_out_by_hand():
    """Ranks of 70 + 60 and 10 + 20: the first expert changes places with the last."""
    assert move_experts([[0, 1, 2, 3]], [[70, 60, 10, 20]], 2).tolist() == [[3, 1, 2, 0]]


@pytest.mark.parametrize(
    ("loads", "sentence"),
    [
        ([1, 2], r"shape \(2,\)"),
        ([[1, -2]], "not negative"),
        ([[1, float("nan")]], "finite"),
        ([[1, 2, 3]], r"shape \(1, 3\) .* 1 layers and 2 experts"),
    ],
)
def test_wrong_input(loads, sentence):
    with pytest.raises(InputError, match=sentence):
        move_experts([[0, 1]], loads, 2)


def _with_copies(slots, loads, copied, num_ranks):
    """(ranks,): loads of a layer where tokens of copied experts are spread evenly."""
    others = loads.copy()
    others[copied] = 0
    return rank_loads(slots[None], others[None], num_ranks)[0] + loads[copied].sum() / num_ranks


def test_copies_take_what_makes_a_rank_the_busiest():
    """Expert 1 alone; then two of two ranks, of which one would make it worse; then none."""
    loads = [
        [10, 90, 10, 10, 10, 10, 10, 10],
        [80, 10, 80, 10, 10, 10, 10, 10],
        [10, 10, 10, 10, 10, 10, 10, 10],
    ]
    slots = _in_order(3, 8)
    first, second, third = hot_experts(slots, loads, 4, 2)
    assert first.tolist() == [1]
    assert sorted(second.tolist()) == [0, 2]
    assert third.tolist() == []
    assert [each.tolist() for each in hot_experts(slots, loads, 4, 1)] == [[1], [], []]
    moved = slots[:, ::-1]
    assert hot_experts(moved, loads, 4, 2)[0].tolist() == [1]


@given(sizes=st.sampled_from([(8, 4), (8, 2), (6, 3), (4, 1)]), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_copies_are_of_different_experts_and_no_rank_gets_busier(sizes, seed):
    experts, ranks = sizes
    rng = np.random.default_rng(seed)
    loads = np.floor(rng.pareto(1.0, size=(3, experts)) * 4)  # wild, with zeros
    slots = rng.permuted(_in_order(3, experts), axis=1)
    for layer, copied in enumerate(hot_experts(slots, loads, ranks, experts - 1)):
        assert len(set(copied.tolist())) == len(copied) < experts
        after = _with_copies(slots[layer], loads[layer], copied, ranks).max()
        assert after <= rank_loads(slots, loads, ranks)[layer].max() + 1e-9


def test_copies_even_out_what_routers_make():
    """Of 64 experts on 8 ranks (figures in the docs)."""
    loads = np.random.default_rng(3).lognormal(sigma=1.0, size=(61, 64))
    slots = _in_order(61, 64)
    assert _imbalance(slots, loads, 8).mean() == pytest.approx(1.74, abs=0.005)
    for most, expected in ((1, 1.44), (2, 1.32), (4, 1.20), (8, 1.12)):
        chosen = hot_experts(slots, loads, 8, most)
        layers = zip(slots, loads, chosen, strict=True)
        ranks = np.stack([_with_copies(*layer, 8) for layer in layers])
        found = (ranks.max(axis=1) / ranks.mean(axis=1)).mean()
        assert found == pytest.approx(expected, abs=0.005)
